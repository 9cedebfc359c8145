"""What a fit says in words: whether A is known, and what hangs on what."""

from scalerl_jax.scaling.curve_fit import CurveFit


def asymptote_line(fit: CurveFit, level: float = 0.9) -> str:
  """The first line of every answer: A with its interval, or why not.

  Where A is unknown, also the compute at which that is expected to be over.

  Args:
    fit: the fit.
    level: probability inside the interval.
  """
  if not fit.identified:
    decided, last = fit.decided_at, fit.compute[-1]
    when = f"not to be decided within {100 * last:.3g}"
    if decided is not None and decided <= last:
      when = "more evaluations this far would decide it"
    elif decided is not None:
      when = f"expected to be decided at compute {decided:.3g}"
    return f"asymptote: unidentified ({'; '.join(fit.reasons)}); {when}"
  low, high = fit.intervals(level)["asymptote"]
  return f"asymptote: {fit.params.asymptote:.3f} [{low:.3f}, {high:.3f}]"


def remarks(fit: CurveFit, compute: float, level: float = 0.9) -> list[str]:
  """What a reader must know besides the numbers, a line each.

  Evaluations that were given little weight; and, where R_0 was not measured,
  A and a forecast under each prior of R_0.

  Args:
    fit: the fit.
    compute: of the forecast.
    level: probability inside the bands.
  """
  told = []
  if fit.outliers:
    at = ", ".join(f"{c:.4g}" for c in fit.outliers)
    told.append(f"far from the others and given little weight: compute {at}")
  for one in fit.sensitivity(compute, level):
    a = f"A {one.asymptote:.3f} [{one.asymptote_low:.3f}"
    a += f", {one.asymptote_high:.3f}]"
    if not one.identified:
      a = "A unidentified"
    told.append(
      f"R_0 known to within {one.initial_sd:g}: {a}, at {compute:.4g}"
      f" {one.mean:.3f} [{one.low:.3f}, {one.high:.3f}]"
    )
  return told


def parameter_rows(
  fit: CurveFit, level: float = 0.9
) -> list[tuple[str, float, float, float]]:
  """Name, value, low and high of each parameter of the law.

  Args:
    fit: the fit.
    level: probability inside the interval.
  """
  bounds = fit.intervals(level)
  return [
    (name, value, *bounds[name]) for name, value in fit.params._asdict().items()
  ]
