"""Bootstrap refits of the sigmoid: thousands of least-squares fits at once.

A check of the posterior by another road, and of where least squares is
unstable. Points are drawn as if they were independent, which evaluations of
one run are not: the spread is that of noise alone.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from scalerl_jax.scaling import intervals, least_squares
from scalerl_jax.scaling.curve_fit import CurveFit
from scalerl_jax.scaling.host import host_mesh

_ITERATIONS = 14
_UNROLLED = 6  # Points in one fused loop: sums stay in registers.


def _sums(place, pass_rate, weight, shape):
  """Weighted sums of products of 1−s, s, its slopes and y, for each refit.

  Point by point with the refits as lanes, so that everything is one loop over
  contiguous numbers.
  """
  exponent = jnp.exp(shape[0])

  def step(sums, point):
    x, y, w = point
    z = exponent * (x - shape[1])
    s = jax.nn.sigmoid(z)
    slope = s * (1.0 - s)
    left, b, m = 1.0 - s, slope * z, -slope * exponent
    products = (
      *(left * left, left * s, s * s, left * y, s * y),
      *(left * b, left * m, s * b, s * m, b * b, b * m, m * m, b * y, m * y),
      y * y,
    )
    added = [t + w * p for t, p in zip(sums, products, strict=True)]
    return added, None

  zero = [jnp.zeros(weight.shape[1])] * 15
  points = (place, pass_rate, weight)
  return jax.lax.scan(step, zero, points, unroll=_UNROLLED)[0]


def _evaluate(sums, initial, known):
  """R_0, A, loss, downhill and JᵀJ of each refit, by variable projection.

  As in `least_squares.py`, where the form is explained.
  """
  aa, ab, bb, ay, by, a2, a3, b2, b3, c22, c23, c33, y2, y3, yy = sums
  a, d = aa + known, bb + 1e-13
  p, q = ay + known * initial, by
  det = jnp.maximum(a * d - ab * ab, 1e-300)
  highest = jnp.clip((a * q - ab * p) / det, 0.0, 1.0)
  lowest = jnp.clip((p - ab * highest) / a, 0.0, 1.0)
  loss = yy + known * initial**2 - 2.0 * (lowest * p + highest * q)
  loss += lowest**2 * a + 2.0 * lowest * highest * ab + highest**2 * bb
  rise = highest - lowest
  down = [
    rise * (y2 - lowest * a2 - highest * b2),
    rise * (y3 - lowest * a3 - highest * b3),
  ]
  bounded = (highest <= 0.0) | (highest >= 1.0)
  i00 = jnp.where(bounded, 1.0 / a, d / det)
  i01 = jnp.where(bounded, 0.0, -ab / det)
  i11 = jnp.where(bounded, 0.0, a / det)

  def taken(u0, u1, v0, v1):
    return u0 * (i00 * v0 + i01 * v1) + u1 * (i01 * v0 + i11 * v1)

  square = rise * rise
  curvature = [
    square * (c22 - taken(a2, b2, a2, b2)),
    square * (c23 - taken(a2, b2, a3, b3)),
    square * (c33 - taken(a3, b3, a3, b3)),
  ]
  return lowest, highest, loss, down, curvature


@jax.jit
def refit(
  points: least_squares.Points,
  weight: Float[Array | np.ndarray, "N K"],
  start: Float[Array | np.ndarray, "2"],
) -> Float[Array, "4 K"]:
  """K least-squares fits of one curve with other weights of its points.

  Args:
    points: the curve; its own weights only say which points there are.
    weight: of each point in each refit, at least 0.
    start: (ln B, ln C_mid) from where each refit goes downhill.

  Returns:
    R_0, A, ln B and ln C_mid of each refit.
  """
  low, high = least_squares.shape_bounds(points)
  low, high = low[:, None], high[:, None]
  initial, known = points.initial, points.initial_weight

  def evaluate(shape):
    sums = _sums(points.log_compute, points.pass_rate, weight, shape)
    return _evaluate(sums, initial, known)[2:]

  def step(_, carry):
    shape, state, damping = carry
    loss, down, curvature = state
    held = ((shape <= low) & (jnp.stack(down) < 0)) | (
      (shape >= high) & (jnp.stack(down) > 0)
    )
    free = jnp.where(held, 0.0, 1.0)
    g0, g1 = down[0] * free[0], down[1] * free[1]
    a = curvature[0] * (1.0 + damping) + 1e-14
    b = curvature[1] * free[0] * free[1]
    d = curvature[2] * (1.0 + damping) + 1e-14
    move = jnp.stack([d * g0 - b * g1, a * g1 - b * g0])
    det = jnp.maximum(a * d - b * b, 1e-300)
    move = jnp.clip(move / det[None, :], -1.0, 1.0)
    proposal = jnp.clip(shape + move, low, high)
    trial = evaluate(proposal)
    better = trial[0] <= loss
    kept = jax.tree.map(
      lambda n, o: jnp.where(better, n, o),
      (proposal, trial),
      (shape, state),
    )
    damping = jnp.clip(damping * jnp.where(better, 0.2, 6.0), 1e-14, 1e6)
    return (*kept, damping)

  count = weight.shape[1]
  shape = jnp.clip(jnp.tile(jnp.asarray(start)[:, None], (1, count)), low, high)
  first = (shape, evaluate(shape), jnp.full(count, 1e-3))
  shape, _, _ = jax.lax.fori_loop(0, _ITERATIONS, step, first)
  sums = _sums(points.log_compute, points.pass_rate, weight, shape)
  lowest, highest, *_ = _evaluate(sums, initial, known)
  return jnp.stack([lowest, highest, *shape])


def bootstrap_refits(
  fit: CurveFit, count: int = 10_000, *, seed: int = 0
) -> dict[str, np.ndarray]:
  """Least-squares laws of resampled points: a distribution of each parameter.

  Each refit draws as many points as the curve has, with replacement, and goes
  downhill from the law of all points. What is known of R_0 is kept as it is.

  Args:
    fit: of the curve, whose sigmoid is refitted.
    count: number of refits, at least 1.
    seed: of the draws.

  Returns:
    `count` values of each of `Parameters`, in the unit of the fit's compute.

  Raises:
    ValueError: for a count below 1.

  Example:
    >>> import numpy as np
    >>> from scalerl_jax.scaling.fit import fit_curve
    >>> compute = np.linspace(0.0, 40.0, 21)
    >>> pass_rate = 0.2 + 0.6 / (1.0 + (8.0 / np.maximum(compute, 1e-9)) ** 2)
    >>> refits = bootstrap_refits(fit_curve(compute, pass_rate), 100)
    >>> [round(float(np.median(v)), 2) for v in refits.values()]
    [0.2, 0.8, 2.0, 8.0]

  Reference:
    Efron, 1979, doi 10.1214/aos/1176344552.
  """
  if count < 1:
    raise ValueError(f"count must be at least 1, got {count!r}.")
  number, last = len(fit.compute), float(fit.compute[-1])
  rng = np.random.default_rng(seed)
  weight = rng.multinomial(number, np.full(number, 1.0 / number), count).T
  known = fit._start
  measured = np.isfinite(known.measured_noise)
  size = max(fit.residual, 1e-9)
  points = least_squares.Points(
    np.log(fit.compute) - np.log(last),
    fit.pass_rate,
    np.ones(number),
    np.array(known.measured if measured else known.prior),
    np.array(1.0 if measured else (size / known.prior_sd) ** 2),
  )
  start = np.log(
    [fit.least_squares.exponent, fit.least_squares.midpoint / last]
  )
  with jax.enable_x64(True), jax.set_mesh(host_mesh()):
    found = np.asarray(refit(points, weight.astype(np.float64), start))
  values = intervals.Parameters(
    found[0], found[1], np.exp(found[2]), np.exp(found[3]) * last
  )
  return values._asdict()
