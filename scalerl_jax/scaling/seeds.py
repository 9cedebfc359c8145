"""A recipe over its seeds: what seeds vary by, and the mean that is meant.

From draws of each seed's posterior; of plain numbers, `compare.seed_interval`.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

# Values of τ that are looked at, at even steps of its prior's probability.
_STEPS = 2000


def between_seeds(
  values: Float64[np.ndarray, "S"],
  variances: Float64[np.ndarray, "S"],
  scale: float,
  count: int,
) -> Float64[np.ndarray, "{count}"]:
  """Quantiles of τ, the sd of a recipe's true values between its seeds.

  p(τ | x) ∝ C⁺(τ; scale) · √V · Π_s N(x_s; μ̂, v_s + τ²), with the recipe's
  mean integrated out: 1/V = Σ 1/(v_s + τ²), μ̂ = V · Σ x_s/(v_s + τ²).

  Args:
    values: x, of each seed, at least 1.
    variances: v, of the posterior of each.
    scale: of the half-Cauchy prior, above 0.
    count: how many quantiles.

  Returns:
    Equally likely values, rising.

  Reference:
    Gelman et al., Bayesian Data Analysis, 3rd edition, section 5.4.
  """
  tau = scale * np.tan(0.5 * np.pi * (np.arange(_STEPS) + 0.5) / _STEPS)
  total = variances[:, None] + tau**2
  precision = (1.0 / total).sum(0)
  centre = (values[:, None] / total).sum(0) / precision
  log_p = -0.5 * (np.log(total) + (values[:, None] - centre) ** 2 / total).sum(
    0
  )
  log_p -= 0.5 * np.log(precision)
  # τ is spaced by quantiles of its prior, which is so taken into account.
  share = np.cumsum(np.exp(log_p - log_p.max()))
  share /= share[-1]
  return tau[np.searchsorted(share, (np.arange(count) + 0.5) / count)]


def mean_over_seeds(
  draws: Sequence[np.ndarray], scale: float, rng: np.random.Generator
) -> np.ndarray:
  """Draws of a recipe's mean, from draws of each of its seeds.

  Their average over seeds, in random order, and τ/√n for the seeds not run.

  Args:
    draws: of each of the n seeds; of one seed they are returned as they are.
    scale: of τ's prior, `between_seeds`.
    rng: puts draws of different seeds together.
  """
  if len(draws) == 1:
    return draws[0]
  middles = np.array([d.mean() for d in draws])
  variances = np.array([d.var() for d in draws])
  size = min(map(len, draws))
  average = np.mean([rng.permutation(d)[:size] for d in draws], axis=0)
  tau = rng.permutation(between_seeds(middles, variances, scale, size))
  return average + rng.normal(size=size) * tau / np.sqrt(len(draws))
