"""How good a forecast was: the continuous ranked probability score (CRPS).

CRPS(F, y) = ∫ (F(x) − 1{x ≥ y})² dx, in the unit of y: the absolute error of a
point, and less for a spread that is honest. Smaller is better.
"""

import numpy as np
import numpy.typing as npt
from scipy import special

# Equally likely values that stand for a distribution in closed form.
SAMPLES = 999


def crps_sample(sample: npt.ArrayLike, measured: float) -> float:
  """CRPS of equally likely values.

  E|X − y| − E|X − X'|/2; by sorting, the latter is Σ_i (2i − n − 1) x_(i) / n².

  Args:
    sample: x, any order, at least one.
    measured: y.

  Returns:
    The score of the sample's own step function, exactly.

  Raises:
    ValueError: for an empty sample or one that is not finite.

  Example:
    >>> crps_sample([0.0, 1.0], 0.5)  # 1/2 − 1/4
    0.25

  Reference:
    Gneiting & Raftery, 2007, doi 10.1198/016214506000001437, equation 21.
  """
  x = np.sort(np.asarray(sample, np.float64).ravel())
  n = len(x)
  if not n or not np.isfinite(x).all():
    raise ValueError(f"sample must be finite numbers, at least one, got {n}.")
  rank = 2.0 * np.arange(1, n + 1) - n - 1.0
  return float(np.abs(x - measured).mean() - (rank @ x) / n**2)


def crps_normal(centre: float, sd: float, measured: float) -> float:
  """CRPS of a normal: σ (z (2Φ(z) − 1) + 2φ(z) − 1/√π), z = (y − μ)/σ.

  Args:
    centre: μ.
    sd: σ, above 0.
    measured: y.

  Returns:
    The score.

  Raises:
    ValueError: for an sd that is not positive.

  Example:
    >>> round(crps_normal(0.0, 1.0, 0.0), 4)
    0.2337

  Reference:
    Gneiting & Raftery, 2007, doi 10.1198/016214506000001437, section 4.2.
  """
  if not 0.0 < sd < np.inf:
    raise ValueError(f"sd must be finite and above 0, got {sd!r}.")
  z = (measured - centre) / sd
  density = np.exp(-0.5 * z * z) / np.sqrt(2.0 * np.pi)
  found = z * (2.0 * special.ndtr(z) - 1.0) + 2.0 * density
  return float(sd * (found - 1.0 / np.sqrt(np.pi)))


def crps_student(
  centre: float, scale: float, degrees: float, measured: float
) -> float:
  """CRPS of Student's t, for more than one degree of freedom.

  σ (z (2F(z) − 1) + 2f(z) (ν + z²)/(ν − 1) − c), with z = (y − μ)/σ and
  c = 2√ν B(½, ν − ½)/((ν − 1) B(½, ν/2)²), B being the beta function.

  Args:
    centre: μ.
    scale: σ, above 0; not the standard deviation.
    degrees: ν, above 1 (below, the score is infinite).
    measured: y.

  Returns:
    The score.

  Raises:
    ValueError: for a scale or degrees outside their domain.

  Example:
    >>> round(crps_student(0.0, 1.0, 1e6, 0.0), 4)  # A normal.
    0.2337

  Reference:
    Jordan, Krüger & Lerch, 2019, doi 10.18637/jss.v090.i12, appendix A.
  """
  if not 0.0 < scale < np.inf:
    raise ValueError(f"scale must be finite and above 0, got {scale!r}.")
  if not degrees > 1.0:
    raise ValueError(f"degrees must be above 1, got {degrees!r}.")
  z, v = (measured - centre) / scale, degrees
  log_beta = special.betaln(0.5, 0.5 * v)
  density = np.exp(
    -0.5 * (v + 1.0) * np.log1p(z * z / v) - log_beta - 0.5 * np.log(v)
  )
  inside = z * (2.0 * special.stdtr(v, z) - 1.0)
  inside += 2.0 * density * (v + z * z) / (v - 1.0)
  inside -= (
    2.0
    * np.sqrt(v)
    / (v - 1.0)
    * np.exp(special.betaln(0.5, v - 0.5) - 2.0 * log_beta)
  )
  return float(scale * inside)


def student_sample(
  centre: float, scale: float, degrees: float, count: int = SAMPLES
) -> np.ndarray:
  """Quantiles of Student's t at (i − ½)/n: equally likely values for it.

  Args:
    centre: μ.
    scale: σ, at least 0.
    degrees: ν, above 0.
    count: n.

  Returns:
    The values, rising. Their CRPS is that of the t within 2 % for a y inside
    its bulk, from 3 degrees on; they can be clipped to [0, 1], it cannot.
  """
  at = (np.arange(count) + 0.5) / count
  return centre + scale * special.stdtrit(degrees, at)
