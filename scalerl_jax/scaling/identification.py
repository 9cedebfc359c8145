"""When the asymptote will be known: the information of evaluations to come."""

import numpy as np
from jaxtyping import Float64

from scalerl_jax.scaling import intervals, laws
from scalerl_jax.scaling import posterior as posterior_lib

# Steps of compute, and how many times the spent compute is looked at.
_STEP = 1.05
_FARTHEST = 100.0
_QUANTILE = 1.6448536269514722  # Of the normal, for 90 %.


def _jacobian(place, params, log_midpoint, law, log_tail):
  """Slopes of the law in (R_0, A, ln B, ln C_mid), a row a point."""
  rise = params.asymptote - params.initial

  def share(log_exponent, midpoint):
    z = np.exp(log_exponent) * (place - midpoint)
    return laws.gain(law, z, log_tail, xp=np)

  b, h = np.log(params.exponent), 1e-5
  s = share(b, log_midpoint)
  slope_b = (share(b + h, log_midpoint) - share(b - h, log_midpoint)) / (2 * h)
  slope_m = (share(b, log_midpoint + h) - share(b, log_midpoint - h)) / (2 * h)
  return np.stack([1 - s, s, rise * slope_b, rise * slope_m], axis=1), s


def decided_at(
  draws: posterior_lib.Posterior,
  params: intervals.Parameters,
  compute: Float64[np.ndarray, "N"],
  noise: Float64[np.ndarray, "N"],
  start: posterior_lib.Initial,
  *,
  identified: bool,
) -> float | None:
  """The compute at which A is expected to be identified, or None.

  The rule is that of `intervals.reasons_unidentified`: beyond C_mid, and a
  90 % interval of A no wider than half the rise. The interval is that of the
  information matrix JᵀΣ⁻¹J of the law at its medians, with Σ of noise and
  Ornstein-Uhlenbeck misfit, and the priors of ln B, ln C_mid and R_0. Each
  step of compute to come stands for as many evaluations as the average spacing
  so far puts into it.

  Args:
    draws: the posterior, for the medians of noise, misfit and length.
    params: the law.
    compute: of the fitted points, rising.
    noise: shape of their noise variance.
    start: what is known of R_0.
    identified: whether the points determine A already: then the answer is the
      first of their own computes that would have done.
  """
  white = np.exp(2.0 * np.median(draws.log_noise))
  misfit = np.exp(2.0 * np.median(draws.log_misfit))
  length = np.exp(np.median(draws.log_length))
  last = compute[-1]
  if params.asymptote - params.initial <= 2.0 * np.sqrt(
    misfit + white * noise[-1]
  ):
    return None
  # Long curves are thinned: the answer is no better than its steps.
  keep = np.unique(np.linspace(0, len(compute) - 1, 128).astype(int))
  group = len(compute) / len(keep)
  seen, seen_noise = compute[keep], noise[keep] / group
  spacing = float(last - compute[0]) / (len(compute) - 1.0)
  ahead = last * _STEP ** np.arange(1, int(np.log(_FARTHEST) / np.log(_STEP)))
  number = np.diff(ahead, prepend=last) / spacing
  place = np.log(np.append(seen, ahead)) - np.log(last)
  shape = np.append(seen_noise, np.median(noise) / number)
  gap = np.abs(place[:, None] - place[None, :])
  cov = misfit * np.exp(-gap / length)
  cov += np.diag(white * shape + posterior_lib.NOISE_FLOOR**2)
  law = laws.NAMES[int(np.bincount(draws.law).argmax())]
  of = draws.law == laws.NAMES.index(law)
  log_midpoint = np.log(params.midpoint) - np.log(last)
  slopes, share = _jacobian(
    place, params, log_midpoint, law, float(np.median(draws.log_tail[of]))
  )
  rows = np.linalg.solve(np.linalg.cholesky(cov), slopes)
  information = np.cumsum(rows[:, :, None] * rows[:, None, :], axis=0)
  known = 1.0 / (white * start.measured_noise) + start.prior_sd**-2.0
  information += np.diag(
    [
      known,
      0.0,
      posterior_lib.LOG_EXPONENT[1] ** -2.0,
      posterior_lib.LOG_MIDPOINT[1] ** -2.0,
    ]
  )
  information += 1e-12 * np.eye(4)
  sd = np.sqrt(np.linalg.inv(information)[:, 1, 1])
  rise = (params.asymptote - params.initial) * share
  good = (place >= log_midpoint) & (2.0 * _QUANTILE * sd <= 0.5 * rise)
  # Nearer to 1, least squares would as likely as not put A at its bound.
  good &= params.asymptote + sd < 1.0
  if identified:
    first = np.argmax(good[: len(seen)]) if good[: len(seen)].any() else -1
    return float(seen[first])
  good[: len(seen)] = False
  if not good.any():
    return None
  return float(np.exp(place[np.argmax(good)]) * last)
