"""The compute-performance law: pass rate as a function of compute.

Arrays in, arrays out. How a law is fitted to a curve is in `fit.py`; what a
fitted law says about the future is in `forecast.py`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


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
  compute = jnp.asarray(compute)
  # The ratio keeps the digits that a difference of two logarithms loses in
  # float32; the inner `where` keeps the gradient at compute 0 finite.
  ratio = compute / midpoint
  started = ratio > 0
  gain = jax.nn.sigmoid(exponent * jnp.log(jnp.where(started, ratio, 1.0)))
  return initial + (asymptote - initial) * jnp.where(started, gain, 0.0)


# The laws that `fit.fit_curve` can fit, by name.
LAWS: dict[str, Callable[..., Array]] = {"sigmoid": sigmoid}
