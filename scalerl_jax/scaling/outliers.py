"""Evaluations that stand alone: found by a robust fit, and given little weight.

A single evaluation far from its neighbours is a failed or mixed-up evaluation
and tells nothing of the law. Two in a row are the curve.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float64

# In robust standard deviations: from where an evaluation is an outlier.
_FAR = 6.0
# What evaluations may be off by at least before anything is an outlier.
_LEAST_SD = 0.004
# From where the robust fit turns down the weight, and its rounds.
_NEAR = 2.5
_ROUNDS = 5
# A fit without the point that stands out most is believed if its residuals are
# smaller by this factor: near an end, a fit would else bend to the point.
_BETTER = 0.6

Residuals = Callable[[np.ndarray], np.ndarray]


def _alone(values: Float64[np.ndarray, "N"]) -> Float64[np.ndarray, "N"]:
  """Each value's distance from the range of the two on either side of it.

  0 where the value lies within: an outlier stands out of all of its neighbours.
  """
  count = len(values)
  place = np.arange(count)[:, None] + np.array([-2, -1, 1, 2])
  there = (place >= 0) & (place < count)
  beside = values[place.clip(0, count - 1)]
  above = values - np.where(there, beside, -np.inf).max(1)
  below = np.where(there, beside, np.inf).min(1) - values
  return np.maximum(np.maximum(above, below), 0.0)


def _spread(values: np.ndarray) -> float:
  """Standard deviation by the median of the absolute values."""
  return max(float(np.median(np.abs(values))) / 0.6745, _LEAST_SD)


def _robust(residuals: Residuals, weight: np.ndarray):
  """Residuals of a fit that turns down the far ones, round by round."""
  for _ in range(_ROUNDS):
    error = residuals(weight)
    far = np.abs(error) / (_NEAR * _spread(error))
    weight = 1.0 / np.maximum(far, 1.0) ** 2
  return error


def inflation(
  pass_rate: Float64[np.ndarray, "N"], residuals: Residuals
) -> Float64[np.ndarray, "N"]:
  """How much larger each evaluation's noise variance is to be taken.

  1 for all but outliers: those further than 6 robust standard deviations from
  a robust fit *and* from each of the four evaluations around them, once the
  fitted law is taken off. Theirs is the square of their distance in standard
  deviations.

  Args:
    pass_rate: in order of compute; the first may be that at compute 0.
    residuals: from weights of the points to the residuals of a weighted fit.

  Returns:
    1 or more for each point.
  """
  none = np.ones_like(pass_rate)
  if len(pass_rate) < 5:
    return none
  # No fit where no evaluation stands out of its neighbours at all: any curve
  # that rises steadily.
  jump = _spread(np.diff(pass_rate))
  if _alone(pass_rate).max() <= max(jump, _FAR * _LEAST_SD):
    return none
  stands_out = int(np.argmax(_alone(pass_rate)))
  without = none.copy()
  without[stands_out] = 1e-3
  error = _robust(residuals, none)
  other = _robust(residuals, without)
  rest, bent = (np.delete(e, stands_out) for e in (other, error))
  if np.sqrt(np.mean(rest**2)) < _BETTER * np.sqrt(np.mean(bent**2)):
    error = other
  size = _spread(error)
  found = (np.abs(error) > _FAR * size) & (_alone(error) > _FAR * size)
  return np.where(found, (error / size) ** 2, 1.0)
