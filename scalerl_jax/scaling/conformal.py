"""Bands widened (or narrowed) until they cover on other families of curves.

A family is what is not independent: curves of one task, base policy or paper.
"""

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64

_THINNEST = 1e-9  # Half-width of a band that is a point.


def standardised_error(
  mean: npt.ArrayLike,
  low: npt.ArrayLike,
  high: npt.ArrayLike,
  measured: npt.ArrayLike,
) -> np.ndarray:
  """Errors in half-widths of their own band: at most 1 inside it.

  (y − m)/(high − m) above the mean m, (m − y)/(m − low) below it.

  Args:
    mean: m of each forecast.
    low: lower ends of the bands.
    high: upper ends.
    measured: y.

  Returns:
    Numbers of at least 0.
  """
  m, y = np.asarray(mean, np.float64), np.asarray(measured, np.float64)
  above = y >= m
  half = np.where(above, np.asarray(high) - m, m - np.asarray(low))
  return np.asarray(np.abs(y - m) / np.maximum(half, _THINNEST))


def conformal_factor(errors: npt.ArrayLike, level: float = 0.9) -> float:
  """The factor of half-widths that holds `level` of the errors inside.

  The ⌈(n + 1) · level⌉-th smallest of n standardised errors (the largest where
  that is more than n): a new exchangeable error is inside with at least
  `level`.

  Args:
    errors: of other families, `standardised_error`, at least one.
    level: in (0, 1).

  Returns:
    The factor, at least 0.

  Raises:
    ValueError: without errors, or for a level outside (0, 1).

  Example:
    >>> conformal_factor([0.1, 0.2, 0.3, 0.5, 0.8, 1.5], 0.7)
    0.8

  Reference:
    Vovk, Gammerman & Shafer, 2005; Lei et al., 2018, arXiv 1604.04173.
  """
  values = np.sort(np.asarray(errors, np.float64).ravel())
  if not len(values):
    raise ValueError("errors must hold at least one number, got none.")
  if not 0.0 < level < 1.0:
    raise ValueError(f"level must be in (0, 1), got {level!r}.")
  rank = int(np.ceil((len(values) + 1) * level - 1e-9))
  return float(values[min(rank, len(values)) - 1])


def leave_one_family_out(
  errors: Float64[np.ndarray, "N"],
  families: npt.ArrayLike,
  level: float = 0.9,
) -> Float64[np.ndarray, "N"]:
  """Each curve's factor, from the errors of all other families.

  Args:
    errors: `standardised_error` of each curve.
    families: the label of each curve's family.
    level: in (0, 1).

  Returns:
    `conformal_factor` for each curve; NaN where there is one family alone.
  """
  labels = np.asarray(families)
  factors = np.full(len(errors), np.nan)
  for label in np.unique(labels):
    own = labels == label
    if not own.all():
      factors[own] = conformal_factor(errors[~own], level)
  return factors


def scaled(
  mean: npt.ArrayLike,
  low: npt.ArrayLike,
  high: npt.ArrayLike,
  factor: npt.ArrayLike,
) -> tuple[np.ndarray, np.ndarray]:
  """Bands with their half-widths multiplied, m − f (m − low) and above.

  Args:
    mean: m of each forecast.
    low: lower ends.
    high: upper ends.
    factor: f, at least 0.

  Returns:
    Low and high, not clipped.
  """
  m, f = np.asarray(mean, np.float64), np.asarray(factor, np.float64)
  return m - f * (m - np.asarray(low)), m + f * (np.asarray(high) - m)
