"""Bounded multi-start least squares of a law without tail, jitted.

R_0 and A enter the law linearly, so they are solved exactly inside and only
(ln B, ln C_mid) are searched. Everything here runs in float64 and on
log-compute measured from the last point, so that units cannot matter.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from scalerl_jax.scaling import laws

# ln B, and ln C_mid measured from the first and from the last point, are kept
# inside: far beyond what a curve can show, so that a bound means "unknown".
LOG_EXPONENT_BOUNDS = (-2.3, 3.0)
MIDPOINT_MARGINS = (-3.0, 6.0)

_ITERATIONS = 40
# (ln B, share of the way from the first point to a little beyond the last).
_STARTS = np.array(
  [(b, m) for b in (-0.3, 0.5, 1.3) for m in (0.3, 0.6, 0.8, 1.0)]
)


class Points(NamedTuple):
  """A curve as the fitter sees it, padded to a bucket of N points.

  `log_compute` is measured from the last point (thus at most 0). Points of
  weight 0 are padding. `initial` is what is known of R_0: a value with the
  weight of `initial_weight` points.
  """

  log_compute: Float[Array | np.ndarray, "N"]
  pass_rate: Float[Array | np.ndarray, "N"]
  weight: Float[Array | np.ndarray, "N"]
  initial: Float[Array | np.ndarray, ""]
  initial_weight: Float[Array | np.ndarray, ""]


class Solution(NamedTuple):
  """The least-squares law; `curvature` is JᵀJ in (ln B, ln C_mid)."""

  initial: Float[Array, ""]
  asymptote: Float[Array, ""]
  shape: Float[Array, "2"]
  loss: Float[Array, ""]
  curvature: Float[Array, "2 2"]


def _evaluate(points: Points, shape, law):
  """R_0, A, loss, gradient/2 and JᵀJ at one (ln B, ln C_mid).

  One matrix product of five columns (1−s, s and the two slopes of s, and y)
  gives every inner product that variable projection needs.
  """
  x = points.log_compute
  exponent = jnp.exp(shape[0])
  z = exponent * (x - shape[1])
  s, slope = jax.jvp(lambda z: laws.gain(law, z), (z,), (jnp.ones_like(z),))
  columns = jnp.stack(
    [1.0 - s, s, slope * z, -slope * exponent, points.pass_rate]
  )
  gram = (columns * points.weight[None, :]) @ columns.T
  known = points.initial_weight
  # The ridge decides only where nothing of the rise has been seen.
  a, b, d = gram[0, 0] + known, gram[0, 1], gram[1, 1] + 1e-13
  p, q = gram[0, 4] + known * points.initial, gram[1, 4]
  det = jnp.maximum(a * d - b * b, 1e-300)
  asymptote = jnp.clip((a * q - b * p) / det, 0.0, 1.0)
  initial = jnp.clip((p - b * asymptote) / jnp.maximum(a, 1e-300), 0.0, 1.0)
  error = points.pass_rate - initial * columns[0] - asymptote * columns[1]
  loss = jnp.sum(points.weight * error * error)
  loss += known * (points.initial - initial) ** 2
  rise = asymptote - initial
  # Kaufman's form of the projected Jacobian: slopes of s, scaled by the rise,
  # minus what R_0 and A would take up. On its bound A takes up nothing.
  bounded = (asymptote <= 0.0) | (asymptote >= 1.0)
  u = gram[0:2, 2:4]
  inverse = jnp.stack([jnp.stack([d, -b]), jnp.stack([-b, a])]) / det
  alone = jnp.stack([1.0 / jnp.maximum(a, 1e-300), 0.0, 0.0, 0.0])
  inverse = jnp.where(bounded, alone.reshape(2, 2), inverse)
  curvature = rise * rise * (gram[2:4, 2:4] - u.T @ (inverse @ u))
  downhill = (columns[2:4] * points.weight[None, :]) @ error * rise
  return initial, asymptote, loss, downhill, curvature


def shape_bounds(points: Points) -> tuple[Array, Array]:
  """The box of (ln B, ln C_mid)."""
  first = jnp.min(jnp.where(points.weight > 0, points.log_compute, jnp.inf))
  low = jnp.stack(
    [jnp.asarray(LOG_EXPONENT_BOUNDS[0]), first + MIDPOINT_MARGINS[0]]
  )
  return low, jnp.array([LOG_EXPONENT_BOUNDS[1], MIDPOINT_MARGINS[1]])


def _descend(points: Points, shape, low, high, law):
  """Levenberg-Marquardt from one start, kept in the box."""

  def step(_, carry):
    shape, loss, downhill, curvature, damping = carry
    # A coordinate that sits on its bound and wants out is held.
    held = ((shape <= low) & (downhill < 0)) | (
      (shape >= high) & (downhill > 0)
    )
    free = jnp.where(held, 0.0, 1.0)
    down = downhill * free
    a = curvature[0, 0] * (1.0 + damping) + 1e-14
    b = curvature[0, 1] * free[0] * free[1]
    d = curvature[1, 1] * (1.0 + damping) + 1e-14
    move = jnp.stack([d * down[0] - b * down[1], a * down[1] - b * down[0]])
    move = jnp.clip(move / jnp.maximum(a * d - b * b, 1e-300), -1.0, 1.0)
    proposal = jnp.clip(shape + move, low, high)
    _, _, trial, *slopes = _evaluate(points, proposal, law)
    better = trial <= loss
    old, new = (shape, loss, downhill, curvature), (proposal, trial, *slopes)
    kept = jax.tree.map(lambda n, o: jnp.where(better, n, o), new, old)
    damping = jnp.clip(damping * jnp.where(better, 0.2, 6.0), 1e-14, 1e6)
    return (*kept, damping)

  # The first step always counts: an infinite loss loses to any proposal.
  start = (
    shape,
    jnp.asarray(jnp.inf),
    jnp.zeros(2),
    jnp.eye(2),
    jnp.asarray(1e-2),
  )
  shape, loss, *_ = jax.lax.fori_loop(0, _ITERATIONS, step, start)
  return shape, loss


def solve(points: Points, law: str = "sigmoid") -> Solution:
  """Weighted least squares of a law, the best of several starts.

  Args:
    points: the curve.
    law: a name in `laws.LAWS`; one with a tail is taken at tail 1.
  """
  low, high = shape_bounds(points)
  first = low[1] - MIDPOINT_MARGINS[0]
  starts = jnp.stack(
    [jnp.asarray(_STARTS[:, 0]), first + _STARTS[:, 1] * (1.0 - first)], axis=1
  )
  shapes, losses = jax.vmap(lambda s: _descend(points, s, low, high, law))(
    starts
  )
  best = jnp.argmin(losses)
  initial, asymptote, loss, _, curvature = _evaluate(points, shapes[best], law)
  return Solution(initial, asymptote, shapes[best], loss, curvature)
