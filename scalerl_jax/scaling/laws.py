"""The compute-performance laws: pass rate as a function of compute.

Arrays in, arrays out. How a law is fitted to a curve is in `fit.py`; what a
fitted law says about the future is in `forecast.py`. All laws share one form,
R_0 + (A − R_0) · gain(B · ln(C / C_mid)), and reach half the gain at C_mid.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

_LOG_2 = float(np.log(2.0))
# Where the power law is cut off on its way to −∞: far below any pass rate.
_STEEPEST = 4.0


def _log_expm1(u: Any, xp: ModuleType) -> Any:
  """ln(e^u − 1) of u > 0, without overflow."""
  return u + xp.log(-xp.expm1(-u))


def gain(law: str, z: Any, log_tail: Any = 0.0, *, xp: ModuleType = jnp) -> Any:
  """The share of A − R_0 that is reached at z = B · ln(C / C_mid).

  sigmoid: 1 / (1 + e^−z); burr: 1 − (1 + (2^(1/κ) − 1) e^z)^−κ; dagum:
  (1 + (2^(1/κ) − 1) e^−z)^−κ, with κ the tail; power_law: 1 − e^−z / 2. Each
  is 1/2 at z = 0 and rises to 1, from 0 but for the power law, which has no
  beginning.

  Args:
    law: a name in `LAWS`.
    z: any real number; −∞ at compute 0.
    log_tail: ln κ, which only burr and dagum read.
    xp: the array library, `jax.numpy` or `numpy`.

  Returns:
    The share, at most 1, in the shape of `z`; at least 0 but for power_law.

  Example:
    >>> [round(float(gain(law, 0.0, 0.7)), 4) for law in LAWS]
    [0.5, 0.5, 0.5, 0.5]
  """
  if law == "sigmoid":
    return jax.nn.sigmoid(z) if xp is jnp else 0.5 * (1 + xp.tanh(0.5 * z))
  if law == "power_law":
    return 1.0 - 0.5 * xp.exp(xp.minimum(-z, _STEEPEST))
  tail = xp.exp(log_tail)
  scale = _log_expm1(_LOG_2 / tail, xp)
  if law == "burr":
    return -xp.expm1(-tail * xp.logaddexp(0.0, scale + z))
  if law == "dagum":
    return xp.exp(-tail * xp.logaddexp(0.0, scale - z))
  raise ValueError(f"law must be one of {sorted(LAWS)}, got {law!r}.")


def _law(
  name, compute, initial, asymptote, exponent, midpoint, tail: Any = 1.0
):
  """R_0 + (A − R_0) · gain, with R_0 at compute 0."""
  compute = jnp.asarray(compute)
  # The ratio keeps the digits that a difference of two logarithms loses in
  # float32; the inner `where` keeps the gradient at compute 0 finite.
  ratio = compute / midpoint
  started = ratio > 0
  z = exponent * jnp.log(jnp.where(started, ratio, 1.0))
  share = gain(name, z, jnp.log(jnp.asarray(tail, z.dtype)))
  return initial + (asymptote - initial) * jnp.where(started, share, 0.0)


def sigmoid(
  compute: Float[Array, "*N"],
  *,
  initial: float | Float[Array, ""],
  asymptote: float | Float[Array, ""],
  exponent: float | Float[Array, ""],
  midpoint: float | Float[Array, ""],
) -> Float[Array, "*N"]:
  """The sigmoidal compute-performance law of ScaleRL.

  R(C) = R_0 + (A − R_0) / (1 + (C_mid / C)^B), evaluated as
  R_0 + (A − R_0) · σ(B · ln(C / C_mid)), so that no power overflows. Half of
  the gain A − R_0 is reached at C_mid; far beyond it the law is the power law
  A − (A − R_0) · (C_mid / C)^B.

  Args:
    compute: C, in any unit that grows with work done (FLOPs, GPU-hours,
      steps), at least 0; at 0 the value is R_0.
    initial: R_0, the pass rate at compute 0, in [0, 1].
    asymptote: A, the pass rate at unlimited compute, in [0, 1].
    exponent: B, how sharply the curve rises in log-compute, above 0.
    midpoint: C_mid, in the unit of `compute`, above 0.

  Returns:
    The pass rate at each compute, without noise; not clipped to [0, 1].

  Example:
    >>> import jax.numpy as jnp
    >>> curve = sigmoid(
    ...   jnp.array([0.0, 10.0, 1e6]),
    ...   initial=0.2,
    ...   asymptote=0.6,
    ...   exponent=2.0,
    ...   midpoint=10.0,
    ... )
    >>> [round(float(r), 4) for r in curve]
    [0.2, 0.4, 0.6]

  Reference:
    Khatri et al., 2025, arXiv 2510.13786, equation 1.
  """
  return _law("sigmoid", compute, initial, asymptote, exponent, midpoint)


def burr(
  compute: Float[Array, "*N"],
  *,
  initial: float | Float[Array, ""],
  asymptote: float | Float[Array, ""],
  exponent: float | Float[Array, ""],
  midpoint: float | Float[Array, ""],
  tail: float | Float[Array, ""] = 1.0,
) -> Float[Array, "*N"]:
  """The Burr (type XII, Singh-Maddala) law: a free upper tail.

  R(C) = A − (A − R_0) · (1 + (2^(1/κ) − 1) · (C / C_mid)^B)^−κ. It starts like
  C^B and ends like A − D/C^(κB): a tail κ below 1 approaches A more slowly
  than the sigmoid, which is κ = 1.

  Args:
    compute: C, in any unit, at least 0; at 0 the value is R_0.
    initial: R_0, the pass rate at compute 0, in [0, 1].
    asymptote: A, the pass rate at unlimited compute, in [0, 1].
    exponent: B, how sharply the curve starts to rise, above 0.
    midpoint: C_mid, where half the gain is reached, above 0.
    tail: κ, above 0.

  Returns:
    The pass rate at each compute, without noise; not clipped to [0, 1].

  Example:
    >>> import jax.numpy as jnp
    >>> known = dict(initial=0.2, asymptote=0.6, exponent=2.0, midpoint=10.0)
    >>> curve = burr(jnp.array([0.0, 10.0, 100.0]), **known, tail=0.5)
    >>> [round(float(r), 4) for r in curve]
    [0.2, 0.4, 0.5769]

  Reference:
    Burr, 1942, doi 10.1214/aoms/1177731607, type XII; the factor 2^(1/κ) − 1,
    which keeps half the gain at C_mid, is ours.
  """
  return _law("burr", compute, initial, asymptote, exponent, midpoint, tail)


def dagum(
  compute: Float[Array, "*N"],
  *,
  initial: float | Float[Array, ""],
  asymptote: float | Float[Array, ""],
  exponent: float | Float[Array, ""],
  midpoint: float | Float[Array, ""],
  tail: float | Float[Array, ""] = 1.0,
) -> Float[Array, "*N"]:
  """The Dagum (Burr type III) law: a free lower tail.

  R(C) = R_0 + (A − R_0) · (1 + (2^(1/κ) − 1) · (C_mid / C)^B)^−κ. It starts
  like C^(κB) and ends like the sigmoid, A − D/C^B: a tail κ above 1 rises later
  than the sigmoid, which is κ = 1.

  Args:
    compute: C, in any unit, at least 0; at 0 the value is R_0.
    initial: R_0, the pass rate at compute 0, in [0, 1].
    asymptote: A, the pass rate at unlimited compute, in [0, 1].
    exponent: B, how sharply the curve comes to rest, above 0.
    midpoint: C_mid, where half the gain is reached, above 0.
    tail: κ, above 0.

  Returns:
    The pass rate at each compute, without noise; not clipped to [0, 1].

  Example:
    >>> import jax.numpy as jnp
    >>> known = dict(initial=0.2, asymptote=0.6, exponent=2.0, midpoint=10.0)
    >>> curve = dagum(jnp.array([0.0, 1.0, 10.0]), **known, tail=0.5)
    >>> [round(float(r), 4) for r in curve]
    [0.2, 0.2231, 0.4]

  Reference:
    Dagum, 1977; the factor 2^(1/κ) − 1, which keeps half the gain at C_mid, is
    ours.
  """
  return _law("dagum", compute, initial, asymptote, exponent, midpoint, tail)


def power_law(
  compute: Float[Array, "*N"],
  *,
  initial: float | Float[Array, ""],
  asymptote: float | Float[Array, ""],
  exponent: float | Float[Array, ""],
  midpoint: float | Float[Array, ""],
) -> Float[Array, "*N"]:
  """The saturating power law, for comparison: what the sigmoid ends with.

  R(C) = A − D/C^B with D = (A − R_0) · C_mid^B / 2: at C_mid half the way from
  R_0 to A. It has no beginning (below C_mid / 2^(1/B) it is less than R_0, and
  falls to −∞), which is why it needs a late cut.

  Args:
    compute: C, in any unit, at least 0; at 0 the value is R_0 all the same.
    initial: R_0, the pass rate at compute 0, in [0, 1].
    asymptote: A, the pass rate at unlimited compute, in [0, 1].
    exponent: B, above 0.
    midpoint: C_mid, where half the gain is reached, above 0.

  Returns:
    The pass rate at each compute, without noise; not clipped to [0, 1].

  Example:
    >>> import jax.numpy as jnp
    >>> known = dict(initial=0.2, asymptote=0.6, exponent=2.0, midpoint=10.0)
    >>> curve = power_law(jnp.array([0.0, 10.0, 100.0]), **known)
    >>> [round(float(r), 4) for r in curve]
    [0.2, 0.4, 0.598]

  Reference:
    Khatri et al., 2025, arXiv 2510.13786, section 2.5, which rejects it.
  """
  return _law("power_law", compute, initial, asymptote, exponent, midpoint)


# The laws that `fit.fit_curve` can fit, by name.
LAWS: dict[str, Callable[..., Array]] = {
  "sigmoid": sigmoid,
  "burr": burr,
  "dagum": dagum,
  "power_law": power_law,
}
NAMES = tuple(LAWS)
WITH_TAIL = ("burr", "dagum")
