"""The paper's procedure: a grid of A and C_mid, and B by least squares.

Kept exactly, for comparison and for the numbers of the paper; `fit.fit_curve`
is what forecasts are made with.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Float
from scipy import special

from scalerl_jax.scaling import bands, integration, intervals, laws
from scalerl_jax.scaling import points as points_lib
from scalerl_jax.scaling import posterior as posterior_lib
from scalerl_jax.scaling.curve_fit import CurveFit
from scalerl_jax.scaling.host import host_mesh

# The paper's grid, in pass rate and GPU-hours, and its first compute.
ASYMPTOTES = np.linspace(0.45, 0.8, 71)
MIDPOINTS = np.linspace(100.0, 40000.0, 100)
MIN_COMPUTE = 1500.0

_ITERATIONS = 40
_EXPONENTS = (1e-3, 1e2)
_FIRST_EXPONENT = 1.0  # What SciPy's curve_fit starts from.


@jax.jit
def best_exponents(
  log_compute: Float[Array | np.ndarray, "N"],
  pass_rate: Float[Array | np.ndarray, "N"],
  initial: Float[Array | np.ndarray, ""],
  asymptote: Float[Array | np.ndarray, "K"],
  log_midpoint: Float[Array | np.ndarray, "K"],
) -> tuple[Float[Array, "K"], Float[Array, "K"], Float[Array, "K"]]:
  """B of least squares for each pair (A, C_mid), by Levenberg-Marquardt.

  Args:
    log_compute: ln C of the points.
    pass_rate: of the points.
    initial: R_0.
    asymptote: A of each pair.
    log_midpoint: ln C_mid of each pair.

  Returns:
    B, the sum of squared residuals, and JᵀJ, for each pair.
  """
  place = log_compute[:, None] - log_midpoint[None, :]
  rise = asymptote - initial

  def evaluate(exponent):
    s = jax.nn.sigmoid(exponent[None, :] * place)
    error = pass_rate[:, None] - initial - rise[None, :] * s
    slope = rise[None, :] * s * (1.0 - s) * place
    return (
      jnp.sum(error * error, 0),
      jnp.sum(slope * error, 0),
      jnp.sum(slope * slope, 0),
    )

  def step(_, carry):
    exponent, loss, downhill, curvature, damping = carry
    move = downhill / (curvature * (1.0 + damping) + 1e-14)
    proposal = jnp.clip(exponent + jnp.clip(move, -1.0, 1.0), *_EXPONENTS)
    new = evaluate(proposal)
    better = new[0] <= loss
    damping = jnp.clip(damping * jnp.where(better, 0.2, 6.0), 1e-12, 1e6)
    return (
      jnp.where(better, proposal, exponent),
      *(
        jnp.where(better, n, o)
        for n, o in zip(new, (loss, downhill, curvature), strict=True)
      ),
      damping,
    )

  first = jnp.full_like(asymptote, _FIRST_EXPONENT)
  start = (first, *evaluate(first), jnp.full_like(asymptote, 1e-2))
  exponent, loss, _, curvature, _ = jax.lax.fori_loop(
    0, _ITERATIONS, step, start
  )
  return exponent, loss, curvature


def _axis(name: str, values: npt.ArrayLike, rule: str, low, high) -> np.ndarray:
  array = np.asarray(values, np.float64)
  good = array.ndim == 1 and array.size and (array > low) & (array <= high)
  if not np.all(good):
    raise ValueError(
      f"{name} must be a list of numbers {rule}, got {values!r}."
    )
  return np.unique(array)


def _sampled(count, initial, pairs, exponent, loss, curvature):
  """Draws of (A, C_mid, B, noise), with flat priors on grid, B and ln noise."""
  log_weight = -0.5 * (count - 1) * np.log(np.maximum(loss, 1e-14))
  log_weight -= 0.5 * np.log(np.maximum(curvature, 1e-14))
  weight = np.exp(log_weight - log_weight.max())
  share = np.cumsum(weight) / weight.sum()
  size = integration.DRAWS
  index = np.searchsorted(share, (np.arange(size) + 0.5) / size)
  u = integration.uniforms(size, 2, 0)
  variance = loss[index] / special.chdtri(count - 1.0, u[:, 0]) + 1e-14
  sd = np.sqrt(variance / np.maximum(curvature[index], 1e-14))
  b = np.clip(exponent[index] + special.ndtri(u[:, 1]) * sd, *_EXPONENTS)
  flat = np.zeros(size)
  return posterior_lib.Posterior(
    initial=flat + initial,
    asymptote=pairs[0][index],
    log_exponent=np.log(b),
    log_midpoint=pairs[1][index],
    log_noise=0.5 * np.log(variance),
    log_misfit=flat + posterior_lib.NO_MISFIT,
    log_length=flat,
    log_tail=flat,
    drift=flat,
    law=np.full(size, laws.NAMES.index("sigmoid")),
    effective=float(size),
    log_evidence=0.0,
  )


def _reasons_of_grid(best: intervals.Parameters, grid) -> list[str]:
  """Where the best pair lies on an edge of the grid."""
  names = {"A": best.asymptote, "C_mid": best.midpoint}
  return [
    f"the best {name} is the grid's edge {value:g}"
    for (name, value), axis in zip(names.items(), grid, strict=True)
    if len(axis) > 1 and value in (axis[0], axis[-1])
  ]


def fit_grid(
  compute: npt.ArrayLike,
  pass_rate: npt.ArrayLike,
  *,
  initial: float,
  min_compute: float = MIN_COMPUTE,
  asymptotes: npt.ArrayLike = ASYMPTOTES,
  midpoints: npt.ArrayLike = MIDPOINTS,
) -> CurveFit:
  """The paper's fit: the pair (A, C_mid) of a grid with the least squares.

  For each pair, B minimises Σ (R_0 + (A − R_0)/(1 + (C_mid/C)^B) − y)² from
  B = 1; the pair with the least sum is the answer, R_0 being given. Intervals
  and bands are those of independent noise of unknown size with flat priors on
  the grid: on real curves, whose residuals are correlated, too narrow.

  Args:
    compute: of each evaluation, at least 0, in the unit of `midpoints`.
    pass_rate: of each evaluation, in [0, 1].
    initial: R_0, held. A error of .02 in it moves A by .015 to .03 on the
      paper's own curve.
    min_compute: points below it are left out; the paper's 1,500 GPU-hours.
    asymptotes: the grid of A, in (0, 1]; the paper's .450, .455, ... .800.
    midpoints: the grid of C_mid, above 0; the paper's 100 values from 100 to
      40,000 GPU-hours.

  Returns:
    The fit; `params` and `least_squares` are the best pair and its B.

  Raises:
    ValueError: for arrays that do not match, values outside their domain, or
      fewer than 6 usable points.

  Example:
    >>> import numpy as np
    >>> compute = np.linspace(1.0, 40.0, 21)
    >>> pass_rate = 0.2 + 0.42 / (1.0 + (8.0 / compute) ** 2)
    >>> fit = fit_grid(
    ...   compute,
    ...   pass_rate,
    ...   initial=0.2,
    ...   min_compute=2.0,
    ...   midpoints=np.linspace(1, 20, 39),
    ... )
    >>> [round(p, 3) for p in fit.params]
    [0.2, 0.62, 2.0, 8.0]

  Reference:
    Khatri et al., 2025, arXiv 2510.13786, section 2.3 and appendix.
  """
  if initial is None:
    raise ValueError(
      "initial must be given to the paper's procedure, got None."
    )
  grid = (
    _axis("asymptotes", asymptotes, "in (0, 1]", 0.0, 1.0),
    _axis("midpoints", midpoints, "above 0 and finite", 0.0, 1e300),
  )
  chosen = points_lib.choose(
    compute, pass_rate, initial=initial, min_compute=min_compute
  )
  x, y, last = chosen.compute, chosen.pass_rate, float(chosen.compute[-1])
  place, count = np.log(x) - np.log(last), len(x)
  pairs = tuple(
    axis.ravel()
    for axis in np.meshgrid(grid[0], np.log(grid[1] / last), indexing="ij")
  )
  with jax.enable_x64(True), jax.set_mesh(host_mesh()):
    found = best_exponents(place, y, np.array(float(initial)), *pairs)
    exponent, loss, curvature = map(np.asarray, found)
  best = int(np.argmin(loss))
  params = intervals.Parameters(
    float(initial),
    float(pairs[0][best]),
    float(exponent[best]),
    float(grid[1][best % len(grid[1])]),
  )
  draws = _sampled(count, initial, pairs, exponent, loss, curvature)
  # The F(1, n − 3) quantile is the square of Student's t.
  allowed = special.stdtrit(count - 3, 0.95) ** 2 / (count - 3)
  least = loss.reshape(len(grid[0]), -1).min(1)
  inside = grid[0][least <= max(loss[best], 1e-14) * (1.0 + allowed)]
  profile = (float(inside[0]), float(inside[-1]))
  residual = float(np.sqrt(loss[best] / (count - 3)))
  unbounded = np.full(2, np.inf)
  reasons = intervals.reasons_unidentified(
    params=params,
    least=params,
    shape=np.zeros(2),
    bounds=(-unbounded, unbounded),
    profile=profile,
    rise=bands.law(draws, np.zeros(1))[0] - draws.initial,
    residual=residual,
    last_compute=last,
    pass_rate=y,
    effective=draws.effective,
  )
  reasons = (*_reasons_of_grid(params, grid), *reasons)
  return CurveFit(
    params=params,
    law="sigmoid",
    weights={"sigmoid": 1.0},
    identified=not reasons,
    reasons=reasons,
    least_squares=params,
    asymptote_profile=profile,
    compute=x,
    pass_rate=y,
    residual=residual,
    outliers=(),
    _draws=draws,
    _noise=chosen.noise,
    _unit=1.0,
    _binomial=False,
    _start=chosen.initial,
    _again=None,
  )
