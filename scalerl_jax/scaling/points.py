"""The points of a curve as the fitter takes them: checked and windowed.

What a curve tells about R_0 is decided here; reading files is `curves.py`.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64

from scalerl_jax.scaling import posterior

FEWEST_POINTS = 6
FEWEST_COMPUTES = 4
MOST_POINTS = 1024
# R_0's prior sd about the first evaluation, when compute 0 was not evaluated.
_INITIAL_SD = 0.03
# The sd that stands for "given exactly", and for "measured, so prior is moot".
_EXACT_SD, _MOOT_SD = 1e-9, 1.0
# Weight of a given R_0 in least squares, in points.
_EXACT_WEIGHT = 1e12


class Chosen(NamedTuple):
  """The points to fit, in order of compute, and what is known of R_0."""

  compute: Float64[np.ndarray, "N"]  # Above 0.
  pass_rate: Float64[np.ndarray, "N"]
  noise: Float64[np.ndarray, "N"]  # Shape of the noise variance.
  initial: posterior.Initial
  initial_weight: float | None  # In points; None for a prior only.
  binomial: bool  # Whether `noise` is p(1−p)/trials.


def bernoulli(pass_rate: npt.ArrayLike) -> np.ndarray:
  """p(1−p), kept away from 0 where a finite sample shows 0 or 1."""
  p = np.clip(pass_rate, 0.02, 0.98)
  return p * (1.0 - p)


def enough(compute: Float64[np.ndarray, "N"]) -> bool:
  """Whether a fit can be made: 6 points, at 4 values of compute above 0."""
  different = len(np.unique(compute[compute > 0]))
  return len(compute) >= FEWEST_POINTS and different >= FEWEST_COMPUTES


def _checked(compute, pass_rate, trials):
  """The three as float64 arrays in order of compute, or one sentence."""
  x, y = np.asarray(compute, np.float64), np.asarray(pass_rate, np.float64)
  if x.ndim != 1 or x.shape != y.shape:
    raise ValueError(
      "compute and pass_rate must be two lists of the same length, got "
      f"shapes {x.shape} and {y.shape}."
    )
  for name, values, rule, good in (
    ("compute", x, "finite and at least 0", np.isfinite(x) & (x >= 0)),
    ("pass_rate", y, "in [0, 1]", (y >= 0) & (y <= 1)),
  ):
    if not good.all():
      first = int(np.argmin(good))
      raise ValueError(
        f"{name} must be {rule}, got {values[first]} at index {first}; drop "
        "such points, and divide percents by 100."
      )
  n = np.full_like(x, np.nan)
  if trials is not None:
    n = np.asarray(trials, np.float64)
    if n.ndim > 1 or (n.ndim and n.shape != x.shape) or not (n >= 1).all():
      raise ValueError(
        "trials must be one number of samples, or one for each point, at "
        f"least 1, got {trials!r}."
      )
    n = np.broadcast_to(n, x.shape)
  order = np.argsort(x, kind="stable")
  return x[order], y[order], n[order]


def _thinned(x, y, noise):
  """Neighbours averaged until at most `MOST_POINTS` points are left."""
  size = -(-len(x) // MOST_POINTS)
  if size == 1:
    return x, y, noise
  starts = np.arange(0, len(x), size)
  count = np.diff(np.append(starts, len(x)))

  def mean(values):
    return np.add.reduceat(values, starts) / count

  return np.exp(mean(np.log(x))), mean(y), mean(noise) / count


def _what_is_known(x, y, first_pass_rate, at_zero, zero_noise, initial):
  """R_0's prior and measurement, and the latter's weight in points."""
  if initial is not None:
    known = posterior.Initial(initial, _EXACT_SD, initial, np.inf)
    return known, _EXACT_WEIGHT
  if len(at_zero):
    value = float(at_zero.mean())
    noise = float(zero_noise.mean()) / len(at_zero)
    known = posterior.Initial(value, _MOOT_SD, value, noise)
    return known, float(len(at_zero))
  # The first evaluation may already stand above R_0: as far as the line
  # through the first two points falls back to compute 0.
  step = max(x[1] - x[0], 1e-9 * x[0])
  back = min(abs(y[1] - y[0]) * x[0] / step, first_pass_rate)
  sd = float(np.hypot(_INITIAL_SD, back))
  return posterior.Initial(first_pass_rate, sd, 0.0, np.inf), None


def choose(
  compute: npt.ArrayLike,
  pass_rate: npt.ArrayLike,
  trials: npt.ArrayLike | None = None,
  *,
  initial: float | None = None,
  min_compute: float = 0.0,
  max_compute: float | None = None,
) -> Chosen:
  """Checks a curve and takes the points to fit.

  Args:
    compute: of each evaluation, at least 0, in any unit and order.
    pass_rate: of each evaluation, in [0, 1].
    trials: samples behind each evaluation (one number, or one a point).
    initial: R_0 when known exactly; None to infer it.
    min_compute: points below it are left out, except at compute 0.
    max_compute: points above it are left out; None for no limit.

  Returns:
    The points above compute 0, at most 1,024 (neighbours are averaged beyond
    that), and R_0's prior and measurement.

  Raises:
    ValueError: for arrays that do not match, values outside their domain, or
      fewer than 6 usable points.
  """
  if initial is not None and not 0.0 <= initial <= 1.0:
    raise ValueError(f"initial must be in [0, 1] or None, got {initial!r}.")
  x, y, n = _checked(compute, pass_rate, trials)
  most = np.inf if max_compute is None else max_compute
  keep = (x == 0) | ((x >= min_compute) & (x <= most))
  if not enough(x[keep]):
    raise ValueError(
      f"a fit needs at least {FEWEST_POINTS} points, at {FEWEST_COMPUTES} or "
      f"more values of compute above 0, got {int(keep.sum())} of {len(x)} "
      f"between min_compute {min_compute:g} and max_compute {most:g}."
    )
  first_pass_rate = float(y[0])
  x, y, n = x[keep], y[keep], n[keep]
  binomial = trials is not None
  noise = bernoulli(y) / n if binomial else np.ones_like(y)
  zero = x == 0
  known, weight = _what_is_known(
    x[~zero], y[~zero], first_pass_rate, y[zero], noise[zero], initial
  )
  thinned = _thinned(x[~zero], y[~zero], noise[~zero])
  return Chosen(*thinned, known, weight, binomial)
