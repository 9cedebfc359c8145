"""What to do next with a run: how much compute, what it buys, when to stop.

Every answer is a probability or an interval of the fit's posterior; nothing
here changes a run.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from scalerl_jax.scaling import draws as draws_lib
from scalerl_jax.scaling.curve_fit import CurveFit

# Where compute is looked at: from below the first point to as far as "never",
# both as multiples; dense to where a run may reasonably go.
_BEFORE, _DENSE, _NEVER = 1e-3, 1e2, 1e12
_STEPS = (400, 200)

# The default of the early-stop rule: how sure it must be.
CONFIDENCE = 0.95


class Reach(NamedTuple):
  """The compute at which a pass rate is reached; infinite where it never is."""

  pass_rate: float
  compute: float  # The median.
  low: float
  high: float
  never: float  # Probability.


class Gain(NamedTuple):
  """A difference of pass rates with its band."""

  mean: float
  low: float
  high: float


class EarlyStop(NamedTuple):
  """What an early-stop rule would do, and the probability that it acts on."""

  stop: bool
  probability: float  # That what is left gains less than was asked for.
  gain: Gain


def _check_level(level: float) -> None:
  if not 0.0 < level < 1.0:
    raise ValueError(f"level must be in (0, 1), got {level!r}.")


def _weighted_quantile(values: np.ndarray, share: float) -> float:
  """The smallest value that `share` of the values do not exceed."""
  rank = max(int(np.ceil(share * len(values))) - 1, 0)
  return float(np.partition(values, rank)[rank])


def compute_to_reach(
  fit: CurveFit, pass_rate: float, level: float = 0.9
) -> Reach:
  """The compute at which the law reaches a pass rate.

  For each draw of the posterior the C with R(C) = p; where A lies at or below
  p there is none, and the share of such draws is the probability of never. It
  is the law's: a misfit, which comes and goes, reaches nothing for good.

  Args:
    fit: the fit.
    pass_rate: p, in [0, 1].
    level: probability inside the interval, in (0, 1).

  Returns:
    Median and equal-tailed interval of the compute, an end being infinite
    where "never" is likelier than its tail; and the probability of never,
    which includes more than 10¹² times the compute that was spent.

  Raises:
    ValueError: for a pass rate outside [0, 1] or a level outside (0, 1).

  Example:
    >>> import numpy as np
    >>> from scalerl_jax.scaling.fit import fit_curve
    >>> compute = np.linspace(0.0, 40.0, 21)
    >>> pass_rate = 0.2 + 0.6 / (1.0 + (8.0 / np.maximum(compute, 1e-9)) ** 2)
    >>> fit = fit_curve(compute, pass_rate)
    >>> found = compute_to_reach(fit, 0.5)
    >>> round(found.compute, 1), found.never, compute_to_reach(fit, 0.9).never
    (8.0, 0.0, 1.0)
  """
  _check_level(level)
  if not 0.0 <= pass_rate <= 1.0:
    raise ValueError(f"pass_rate must be in [0, 1], got {pass_rate!r}.")
  first, last = float(fit.compute[0]), float(fit.compute[-1])
  grid = np.concatenate(
    [
      np.geomspace(_BEFORE * first, _DENSE * last, _STEPS[0], endpoint=False),
      np.geomspace(_DENSE * last, _NEVER * last, _STEPS[1]),
    ]
  )
  curve = draws_lib.law_draws(fit, grid)
  above = curve >= pass_rate
  index = above.argmax(0)
  column = np.arange(curve.shape[1])
  before = np.maximum(index - 1, 0)
  start, end = curve[before, column], curve[index, column]
  rise = np.where(index > 0, end - start, 1.0)
  part = ((pass_rate - start) / rise).clip(0.0, 1.0)
  places = np.log(grid)
  reached = np.exp(places[before] + part * (places[index] - places[before]))
  reached[index == 0] = 0.0
  reached[~above.any(0)] = np.inf
  tails = (0.5, 0.5 - level / 2, 0.5 + level / 2)
  compute, low, high = (_weighted_quantile(reached, t) for t in tails)
  never = float(np.isinf(reached).mean())
  return Reach(float(pass_rate), compute, low, high, never)


def gain_per_doubling(
  fit: CurveFit, compute: npt.ArrayLike, level: float = 0.9
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """What the law gains when compute is doubled: R(2C) − R(C).

  Args:
    fit: the fit.
    compute: C, at least 0.
    level: probability inside the band, in (0, 1).

  Returns:
    Mean, low and high, each in the shape of `compute`.

  Raises:
    ValueError: for compute below 0 or not finite, or a level outside (0, 1).
  """
  _check_level(level)
  at = np.asarray(compute, np.float64)
  flat = at.ravel()
  gain = draws_lib.law_draws(fit, 2.0 * flat) - draws_lib.law_draws(fit, flat)
  tails = (0.5 - level / 2, 0.5 + level / 2)
  low, high = np.quantile(gain, tails, axis=1)
  mean, low, high = (v.reshape(at.shape) for v in (gain.mean(1), low, high))
  return mean, low, high


def _gain_quantile(mean: np.ndarray, sd: np.ndarray, share: float) -> float:
  """Quantile of an equal mixture of normals, by bisection."""
  low, high = (mean - 10.0 * sd).min() - 1e-9, (mean + 10.0 * sd).max() + 1e-9
  for _ in range(60):
    middle = 0.5 * (low + high)
    below = special.ndtr((middle - mean) / np.maximum(sd, 1e-12)).mean()
    low, high = (middle, high) if below < share else (low, middle)
  return float(0.5 * (low + high))


def stop_probability(fit: CurveFit, budget: float, gain: float) -> float:
  """The probability that the rest of a run gains less than `gain`.

  P(R(budget) − R(last) < gain), misfit included: of the curve itself, not of
  two noisy evaluations.

  Args:
    fit: of the run so far.
    budget: compute at the run's planned end, at least the last fitted one.
    gain: pass rate that would be worth going on for.

  Returns:
    A probability.

  Raises:
    ValueError: for a budget below the last fitted compute, or a gain that is
      not finite.
  """
  if not np.isfinite(gain):
    raise ValueError(f"gain must be a finite pass rate, got {gain!r}.")
  mean, sd = draws_lib.gain_draws(fit, budget)
  return float(special.ndtr((gain - mean) / np.maximum(sd, 1e-12)).mean())


def early_stop(
  fit: CurveFit,
  budget: float,
  gain: float,
  confidence: float = CONFIDENCE,
  level: float = 0.9,
) -> EarlyStop:
  """Whether to stop a run, at its last evaluation.

  Stop where P(R(budget) − R(last) < gain) ≥ confidence. An asymptote that is
  not identified widens the gain's posterior and so argues for going on.

  Args:
    fit: of the run so far.
    budget: compute at the run's planned end, at least the last fitted one.
    gain: pass rate that would be worth going on for.
    confidence: in (0, 1].
    level: probability inside the gain's band, in (0, 1).

  Returns:
    The decision, the probability it acts on, and the gain that is expected.

  Raises:
    ValueError: as `stop_probability`, or for a confidence outside (0, 1].
  """
  _check_level(level)
  if not 0.0 < confidence <= 1.0:
    raise ValueError(f"confidence must be in (0, 1], got {confidence!r}.")
  probability = stop_probability(fit, budget, gain)
  mean, sd = draws_lib.gain_draws(fit, budget)
  low, high = (
    _gain_quantile(mean, sd, share)
    for share in (0.5 - level / 2, 0.5 + level / 2)
  )
  return EarlyStop(
    probability >= confidence, probability, Gain(float(mean.mean()), low, high)
  )
