"""How well a curve determines its law: intervals, and when A is unknown."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64
from scipy import special

from scalerl_jax.scaling import laws
from scalerl_jax.scaling import posterior as posterior_lib

# Least squares closer than this to a bound counts as at it.
_AT_BOUND = 1e-6
_FEWEST_DRAWS = 30.0
_PROFILED = 512  # Shapes of each law: the size that sampling has compiled.


class Parameters(NamedTuple):
  """The law's parameters; the midpoint has the unit of compute."""

  initial: float
  asymptote: float
  exponent: float
  midpoint: float


def parameter_draws(
  draws: posterior_lib.Posterior, last_compute: float
) -> dict[str, np.ndarray]:
  """The draws of each of `Parameters`: B = exp(ln B), C_mid in compute."""
  return {
    "initial": draws.initial,
    "asymptote": draws.asymptote,
    "exponent": np.exp(draws.log_exponent),
    "midpoint": np.exp(draws.log_midpoint) * last_compute,
  }


def profile_asymptote(
  evidence: posterior_lib.Evidence,
  start: posterior_lib.Initial,
  draws: posterior_lib.Posterior,
  level: float,
) -> tuple[float, float]:
  """Profile-likelihood interval of A under correlated misfit.

  Noise, misfit and length are held at their medians; R_0 is minimised in
  closed form, (ln B, ln C_mid, ln tail) over the posterior's own draws, of all
  its laws. For each of them the sum of squares is a parabola in A, so the set
  of A within the χ² quantile of the least is a union of intervals, and its ends
  are exact.

  Args:
    evidence: the curve.
    start: what is known of R_0.
    draws: the posterior, for noise and the region of the shape.
    level: in (0, 1).

  Returns:
    The ends of the interval, in [0, 1].
  """
  phi = np.empty((_PROFILED, 6))
  phi[:, 2:5] = [np.median(d) for d in draws[4:7]]
  parts = []
  for law in np.unique(draws.law):
    of = np.flatnonzero(draws.law == law)
    index = of[np.linspace(0, len(of) - 1, _PROFILED).astype(int)]
    phi[:, 0] = draws.log_exponent[index]
    phi[:, 1] = draws.log_midpoint[index]
    phi[:, 5] = draws.log_tail[index]
    found = posterior_lib.conditional(evidence, start, phi, laws.NAMES[law])
    parts.append((found.square, found.asymptote, found.asymptote_sd))
  square, asymptote, sd = map(np.concatenate, zip(*parts, strict=True))
  middle = asymptote + np.asarray(evidence.centre)[1]
  outside = (middle - np.clip(middle, 0.0, 1.0)) / sd
  least = np.min(square + outside**2)
  allowed = special.ndtri(0.5 + level / 2) ** 2 - (square - least)
  reach = sd * np.sqrt(np.maximum(allowed, 0.0))
  inside = (allowed >= 0) & (middle - reach <= 1) & (middle + reach >= 0)
  low = np.min((middle - reach)[inside])
  high = np.max((middle + reach)[inside])
  return float(np.clip(low, 0, 1)), float(np.clip(high, 0, 1))


def _falls(pass_rate: Float64[np.ndarray, "N"]) -> bool:
  """Whether the curve ends clearly below a level that it had held."""
  if len(pass_rate) < 6:
    return False
  smooth = np.convolve(pass_rate, np.ones(3) / 3, mode="valid")
  noise = np.median(np.abs(np.diff(pass_rate))) / 0.6745 / np.sqrt(2.0)
  drop = smooth.max() - smooth[-1]
  return bool(drop > max(5.0 * noise / np.sqrt(3.0), 0.2 * np.ptp(smooth)))


def reasons_unidentified(
  *,
  params: Parameters,
  least: Parameters,
  shape: Float64[np.ndarray, "2"],
  bounds: tuple[np.ndarray, np.ndarray],
  profile: tuple[float, float],
  rise: Float64[np.ndarray, "M"],
  residual: float,
  last_compute: float,
  pass_rate: Float64[np.ndarray, "N"],
  effective: float,
) -> tuple[str, ...]:
  """Why the asymptote cannot be known from these points; () when it can.

  Args:
    params: the posterior's medians.
    least: the least-squares law.
    shape: (ln B, ln C_mid from the last point) of least squares.
    bounds: the box of `shape`.
    profile: 90 % profile interval of A.
    rise: draws of law(last compute) − R_0.
    residual: sd of noise and misfit together.
    last_compute: where the data end.
    pass_rate: the points in order of compute.
    effective: number of independent draws that the posterior is worth.

  Returns:
    One clause a reason, the weightiest first.
  """
  reasons = []
  seen = float(np.median(rise))
  if seen < -2.0 * residual:
    reasons.append("the curve falls")
  elif seen < 2.0 * residual or np.quantile(rise, 0.05) <= 0:
    reasons.append("the curve is flat: no rise stands out of the noise")
  elif _falls(pass_rate):
    reasons.append("the curve falls after a peak, which no such law describes")
  if params.midpoint > last_compute:
    reasons.append(
      f"the data end at {last_compute:.4g}, before the midpoint "
      f"{params.midpoint:.4g}"
    )
  if not _AT_BOUND < least.asymptote < 1.0 - _AT_BOUND:
    reasons.append(f"least squares puts A at its bound {least.asymptote:.0f}")
  low, high = np.asarray(bounds[0]), np.asarray(bounds[1])
  names = ("B", "C_mid")
  reasons.extend(
    f"least squares puts {names[i]} at its bound"
    for i in range(2)
    if shape[i] <= low[i] + _AT_BOUND or shape[i] >= high[i] - _AT_BOUND
  )
  if profile[1] - profile[0] > 0.5 * max(seen, 0.0):
    reasons.append(
      f"the 90 % profile interval of A, {profile[0]:.3f} to {profile[1]:.3f}, "
      f"is wider than half the observed rise of {max(seen, 0.0):.3f}"
    )
  if not effective >= _FEWEST_DRAWS:
    reasons.append("the integration over the parameters did not settle")
  return tuple(reasons)
