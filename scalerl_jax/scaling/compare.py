"""Which of two recipes wins: intervals over seeds, paired differences, B at A.

Numbers in, numbers out; fits of single curves are in `fit.py`. No verdict is
given here: with few seeds an interval is all that can be said.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import optimize, special

# Three equal runs of the paper end within ±0.015 of each other in A.
MARGIN = 0.02
# Below as many pairs a t-interval is told and no verdict.
VERDICT_PAIRS = 6

_LOG_EXPONENT = (-2.3, 3.0)  # as in least_squares.py: beyond any curve
_MIDPOINT_MARGINS = (-3.0, 6.0)
_STARTS = [(b, m) for b in (-0.3, 0.5, 1.3) for m in (0.3, 0.6, 0.9)]


class SeedInterval(NamedTuple):
  """A mean over seeds and its t-interval."""

  mean: float
  low: float
  high: float
  count: int


class Refit(NamedTuple):
  """A law whose R_0 and A were held; the midpoint has the unit of compute."""

  exponent: float
  midpoint: float
  residual: float  # root of the mean squared residual, in pass rate


def _checked_level(level: float) -> float:
  if not 0.0 < level < 1.0:
    raise ValueError(f"level must be in (0, 1), got {level!r}.")
  return level


def _numbers(name: str, values: npt.ArrayLike, fewest: int) -> np.ndarray:
  array = np.asarray(values, np.float64)
  if array.ndim != 1 or len(array) < fewest or not np.isfinite(array).all():
    raise ValueError(
      f"{name} must be at least {fewest} finite numbers, got {values!r}."
    )
  return array


def seed_interval(values: npt.ArrayLike, level: float = 0.9) -> SeedInterval:
  """The mean over seeds with Student's t-interval.

  x̄ ± t_{n−1}((1 + level)/2) · s / √n, with s² = Σ (x_i − x̄)² / (n − 1). It is
  an interval for the mean of all seeds, not for the next seed's value.

  Args:
    values: x, one number a seed, at least 2.
    level: probability inside, in (0, 1).

  Returns:
    Mean, ends and number of seeds.

  Raises:
    ValueError: for fewer than 2 values (one seed says nothing of the spread),
      values that are not finite, or a level outside (0, 1).

  Example:
    >>> found = seed_interval([0.94, 0.92, 0.96], level=0.9)
    >>> [round(x, 4) for x in found]  # t = 2.920, s/√n = 0.01155
    [0.94, 0.9063, 0.9737, 3]

  Reference:
    Student, 1908; the paper (arXiv 2510.13786, section 2.4) gives the range
    of 3 seeds and no interval.
  """
  x, level = _numbers("values", values, 2), _checked_level(level)
  mean, count = float(x.mean()), len(x)
  quantile = special.stdtrit(count - 1, 0.5 + level / 2)
  reach = float(quantile * x.std(ddof=1) / np.sqrt(count))
  return SeedInterval(mean, mean - reach, mean + reach, count)


def paired_difference(
  a: npt.ArrayLike, b: npt.ArrayLike, level: float = 0.9
) -> SeedInterval:
  """The mean of a − b over pairs, with its t-interval.

  `seed_interval` of d_i = a_i − b_i. What both runs of a pair have in common
  (base policy, prompts, keys) cancels, so that it is narrower than the
  difference of two means wherever seeds matter.

  Args:
    a: one number a seed, at least 2.
    b: of the same seeds in the same order.
    level: probability inside, in (0, 1).

  Returns:
    Mean difference, ends and number of pairs.

  Raises:
    ValueError: for arrays that do not match, and as `seed_interval`.

  Example:
    >>> found = paired_difference([0.94, 0.90], [0.93, 0.87], level=0.9)
    >>> [round(x, 4) for x in found]  # t = 6.314, s/√n = 0.01
    [0.02, -0.0431, 0.0831, 2]

  Reference:
    Student, 1908; arXiv 2510.13786, section 2.4, compares single runs.
  """
  x, y = _numbers("a", a, 2), _numbers("b", b, 2)
  if len(x) != len(y):
    raise ValueError(
      "a and b must hold a number for each of the same seeds, got"
      f" {len(x)} and {len(y)}."
    )
  return seed_interval(x - y, level)


def shared_asymptote(
  a: float, b: float, margin: float = MARGIN
) -> float | None:
  """The averaged asymptote of two methods, where theirs cannot be told apart.

  (A_a + A_b)/2 if |A_a − A_b| < margin; B is then compared at this A, because
  A and B of a fit trade off against each other.

  Args:
    a: asymptote A of one method, in [0, 1].
    b: asymptote of the other, in [0, 1].
    margin: what A varies by between equal runs, above 0.

  Returns:
    The average, or None where the asymptotes differ by the margin or more.

  Raises:
    ValueError: for asymptotes outside [0, 1] or a margin that is not positive.

  Example:
    >>> round(shared_asymptote(0.61, 0.60), 3), shared_asymptote(0.61, 0.52)
    (0.605, None)

  Reference:
    Khatri et al., 2025, arXiv 2510.13786, section 2.4: margin 0.02.
  """
  if not (0.0 <= a <= 1.0 and 0.0 <= b <= 1.0):
    raise ValueError(f"asymptotes must be in [0, 1], got {a!r} and {b!r}.")
  if not margin > 0.0:
    raise ValueError(f"margin must be above 0, got {margin!r}.")
  return (a + b) / 2 if abs(a - b) < margin else None


def refit_exponent(
  compute: npt.ArrayLike,
  pass_rate: npt.ArrayLike,
  *,
  initial: float,
  asymptote: float,
) -> Refit:
  """Least squares of B and C_mid with R_0 and A held fixed.

  Minimises Σ (R_0 + (A − R_0)·σ(B·ln(C/C_mid)) − y)² over (ln B, ln C_mid),
  from several starts. Points above A or below R_0 count like others: nothing
  is inverted, so that noise cannot make a point undefined.

  Args:
    compute: C of each evaluation, at least 0; points at 0 hold R_0 whatever B
      is and are left out.
    pass_rate: y of each evaluation, in [0, 1].
    initial: R_0, in [0, 1].
    asymptote: A, in [0, 1], above `initial`.

  Returns:
    B, C_mid and the size of the residuals.

  Raises:
    ValueError: for arrays that do not match, values outside their domain, an
      asymptote not above R_0, or fewer than 3 points above compute 0.

  Example:
    >>> compute = [0.0, 2.0, 4.0, 8.0, 16.0]
    >>> rates = [0.2 + 0.4 / (1 + (4.0 / max(c, 1e-9)) ** 2) for c in compute]
    >>> found = refit_exponent(compute, rates, initial=0.2, asymptote=0.6)
    >>> round(found.exponent, 4), round(found.midpoint, 4)
    (2.0, 4.0)

  Reference:
    Khatri et al., 2025, arXiv 2510.13786, section 2.4, which refits both
    methods with the averaged A, on a grid of C_mid; here nothing is on a grid.
  """
  x, y = _numbers("compute", compute, 3), _numbers("pass_rate", pass_rate, 3)
  if x.shape != y.shape:
    raise ValueError(
      "compute and pass_rate must have the same length, got"
      f" {len(x)} and {len(y)}."
    )
  if not ((x >= 0).all() and (y >= 0).all() and (y <= 1).all()):
    raise ValueError(
      "compute must be at least 0 and pass_rate in [0, 1] to refit B."
    )
  if not 0.0 <= initial < asymptote <= 1.0:
    raise ValueError(
      "initial and asymptote must be in [0, 1], asymptote the larger, got"
      f" {initial!r} and {asymptote!r}."
    )
  y, x = y[x > 0], x[x > 0]
  if len(x) < 3:
    raise ValueError(
      f"a refit needs at least 3 points above compute 0, got {len(x)}."
    )
  place = np.log(x) - np.log(x.max())  # units cannot matter
  first = float(place.min())
  low = np.array([_LOG_EXPONENT[0], first + _MIDPOINT_MARGINS[0]])
  high = np.array([_LOG_EXPONENT[1], _MIDPOINT_MARGINS[1]])

  def residuals(shape: np.ndarray) -> np.ndarray:
    gain = special.expit(np.exp(shape[0]) * (place - shape[1]))
    return initial + (asymptote - initial) * gain - y

  starts = [np.array([b, first + m * (1.0 - first)]) for b, m in _STARTS]
  found = min(
    (
      optimize.least_squares(
        residuals, start, bounds=(low, high), xtol=1e-12, ftol=1e-14, gtol=1e-12
      )
      for start in starts
    ),
    key=lambda solution: solution.cost,
  )
  return Refit(
    float(np.exp(found.x[0])),
    float(np.exp(found.x[1]) * x.max()),
    float(np.sqrt(np.mean(found.fun**2))),
  )
