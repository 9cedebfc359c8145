"""What finished runs of the same task tell of a new one: a robust prior.

A mixture of three: the siblings' law, the siblings' law on another axis of
compute, and the weak priors, for a run that is like none of them. Their shares
after the fit are decided by how well each expects the curve.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from scalerl_jax.scaling import posterior as posterior_lib

if TYPE_CHECKING:
  from scalerl_jax.scaling.curve_fit import CurveFit

# Prior weights: all three parameters, without C_mid, nothing borrowed.
WEIGHTS = (0.6, 0.25, 0.15)
# What A, ln B and ln C_mid vary by between runs of a task, before any is seen;
# it counts as much as this number of runs. And the least that is believed.
BETWEEN = (0.04, 0.3, 0.3)
BETWEEN_RUNS = 2.0
LEAST = (0.01, 0.1, 0.1)


def _borrowed(values: np.ndarray, errors: np.ndarray, index: int):
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
  prior: posterior_lib.Prior,
  siblings: Sequence["CurveFit"],
  last_compute: float,
) -> list[posterior_lib.Prior]:
  """The priors of a law for a run that has finished siblings.

  Args:
    prior: the law's weak prior.
    siblings: fits of finished runs of the same task; those whose asymptote is
      not identified tell nothing and are left out.
    last_compute: of the new run's points, in the unit that they may share.

  Returns:
    `prior` alone without usable siblings; else three, whose weights sum to its.
  """
  useful = [s for s in siblings if s.identified]
  if not useful:
    return [prior]
  learnt = []
  for index in range(3):
    draws = [
      (
        s._draws.asymptote,
        s._draws.log_exponent,
        s._draws.log_midpoint + np.log(s.compute[-1]) - np.log(last_compute),
      )[index]
      for s in useful
    ]
    middles = np.array([np.median(d) for d in draws])
    learnt.append(_borrowed(middles, np.array([d.std() for d in draws]), index))
  phi = prior.phi.copy()
  phi[0] = learnt[1]
  lent = prior._replace(asymptote=((1.0, *learnt[0]),), lent=True)
  same_axis = phi.copy()
  same_axis[1] = learnt[2]
  return [
    lent._replace(phi=same_axis, weight=prior.weight * WEIGHTS[0]),
    lent._replace(phi=phi, weight=prior.weight * WEIGHTS[1]),
    prior._replace(weight=prior.weight * WEIGHTS[2]),
  ]
