"""What finished runs of the same task tell of a new one: a robust prior.

A mixture of three: the siblings' value at a compute that they have reached,
which binds A, B and C_mid together; their A and B alone, for runs on another
axis of compute; and the weak priors, for a run that is like none of them. Their
shares after the fit are decided by how well each expects the curve.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Float64
from scipy import special

from scalerl_jax.scaling import bands
from scalerl_jax.scaling import posterior as posterior_lib

if TYPE_CHECKING:
  from scalerl_jax.scaling.curve_fit import CurveFit

# Prior weights: the value on a shared axis, A and ln B alone, nothing borrowed.
# With .6, .25, .15 the error of forecasts from a third of 17 real curves was
# .84 of a plain sigmoid's, with these .77: A and B are told by the value.
WEIGHTS = (0.8, 0.1, 0.1)
# What A, ln B and the value vary by between runs of a task, before any is seen;
# it counts as much as this number of runs. And the least that is believed.
BETWEEN, BETWEEN_VALUE = (0.04, 0.3), 0.03
BETWEEN_RUNS = 2.0
LEAST = (0.01, 0.1)


class Value(NamedTuple):
  """A new run's pass rate at `compute`, as its siblings expect it: Student's t.

  Pass rates lie in [0, 1], so that without siblings its density is about 1.
  """

  compute: float
  centre: float
  scale: float
  degrees: float

  def density(self, pass_rate: Float64[np.ndarray, "M"]) -> np.ndarray:
    """p(pass_rate), for each."""
    n, z = self.degrees, (pass_rate - self.centre) / self.scale
    constant = special.gammaln(0.5 * (n + 1.0)) - special.gammaln(0.5 * n)
    constant -= 0.5 * np.log(n * np.pi) + np.log(self.scale)
    return np.exp(constant - 0.5 * (n + 1.0) * np.log1p(z * z / n))


def expected_value(siblings: Sequence["CurveFit"]) -> Value:
  """What the siblings say of a new run's value at their median end.

  Centre: the median m of their curves there. Scale² = τ² (1 + π/2K) + mean
  error² / K, with τ the spread between runs, 1.48 · median |v_k − m|, drawn
  towards `BETWEEN_VALUE` with the weight of `BETWEEN_RUNS` runs: a sibling that
  collapsed moves neither.

  Args:
    siblings: fits of K finished runs, in one unit of compute.
  """
  count = len(siblings)
  compute = float(np.median([s.compute[-1] for s in siblings]))
  told = [s.predict(compute, 0.6827, "mean") for s in siblings]
  values = np.array([float(mean) for mean, _, _ in told])
  errors = np.array([0.5 * float(high - low) for _, low, high in told])
  centre = float(np.median(values))
  spread = 1.4826 * float(np.median(np.abs(values - centre)))
  between = BETWEEN_RUNS * BETWEEN_VALUE**2 + (count - 1.0) * spread**2
  between /= BETWEEN_RUNS + count - 1.0
  scale = between * (1.0 + 0.5 * np.pi / count) + (errors**2).mean() / count
  return Value(compute, centre, float(np.sqrt(scale)), count + BETWEEN_RUNS)


def borrowed(
  draws: posterior_lib.Posterior,
  curve: Float64[np.ndarray, "M"],
  value: Value,
) -> posterior_lib.Posterior:
  """The posterior under the weak priors, with the siblings' value believed.

  The prior is multiplied by (w · p(value) + w_0) / (w + w_0): draws are drawn
  again with these weights, and the evidence changes by their mean.

  Args:
    draws: under the weak priors.
    curve: of each draw at `value.compute`, misfit included.
    value: what the siblings expect there.
  """
  lent, own = WEIGHTS[0], WEIGHTS[2]
  weight = (lent * value.density(curve) + own) / (lent + own)
  total = float(weight.sum())
  share = np.cumsum(weight) / total
  size = len(weight)
  index = np.searchsorted(share, (np.arange(size) + 0.5) / size)
  kept = total**2 / (weight @ weight) / size
  return posterior_lib.Posterior(
    *draws.rows(index.clip(max=size - 1)),
    effective=draws.effective * float(kept),
    log_evidence=draws.log_evidence + float(np.log(total / size)),
  )


def curve_at(
  draws: posterior_lib.Posterior,
  log_compute: Float64[np.ndarray, "N"],
  pass_rate: Float64[np.ndarray, "N"],
  noise: Float64[np.ndarray, "N"],
  wanted: float,
) -> Float64[np.ndarray, "M"]:
  """Each draw's curve at one place: law, drift and mean misfit.

  Args:
    draws: the posterior.
    log_compute: of the fitted points, measured from the last.
    pass_rate: of the fitted points.
    noise: shape of their noise variance.
    wanted: the place, as `log_compute`.
  """
  at = np.array([wanted])
  curve = bands.law(draws, at)
  if draws.log_misfit.max() > posterior_lib.NO_MISFIT:
    error = pass_rate[:, None] - bands.law(draws, log_compute)
    curve += bands.smoothed_misfit(draws, log_compute, error, noise, at)[0]
  return curve[0]


def _learnt(values: np.ndarray, errors: np.ndarray, index: int):
  """Centre and sd of a new run's parameter, given those of finished ones.

  sd² = τ² (1 + 1/K) + mean error² / K, with τ² the variance between runs,
  drawn towards `BETWEEN`² with the weight of `BETWEEN_RUNS` runs.
  """
  count = len(values)
  weight = 1.0 / (errors**2 + BETWEEN[index] ** 2)
  centre = float(weight @ values / weight.sum())
  spread = float(((values - centre) ** 2).sum())
  between = (BETWEEN_RUNS * BETWEEN[index] ** 2 + spread) / (
    BETWEEN_RUNS + count - 1.0
  )
  between = max(between, LEAST[index] ** 2)
  sd = np.sqrt(between * (1.0 + 1.0 / count) + (errors**2).mean() / count)
  return centre, float(sd)


def sibling_priors(
  prior: posterior_lib.Prior, siblings: Sequence["CurveFit"]
) -> list[posterior_lib.Prior]:
  """The priors of a law for a run that has finished siblings.

  Args:
    prior: the law's weak prior.
    siblings: fits of finished runs of the same task; for A and B those whose
      asymptote is not identified tell nothing and are left out.

  Returns:
    The weak prior, and A and ln B of the siblings where there are any; their
    weights sum to that of `prior`.
  """
  useful = [s for s in siblings if s.identified]
  if not useful:
    return [prior]
  learnt = []
  for index in range(2):
    draws = [(s._draws.asymptote, s._draws.log_exponent)[index] for s in useful]
    middles = np.array([np.median(d) for d in draws])
    learnt.append(_learnt(middles, np.array([d.std() for d in draws]), index))
  phi = prior.phi.copy()
  phi[0] = learnt[1]
  lent = prior._replace(
    asymptote=((1.0, *learnt[0]),),
    phi=phi,
    lent=True,
    weight=prior.weight * WEIGHTS[1],
  )
  return [prior._replace(weight=prior.weight * (1.0 - WEIGHTS[1])), lent]
