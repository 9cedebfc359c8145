"""Where the curves of two runs, or two sets of seeds, cross."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from scalerl_jax.scaling import draws as draws_lib
from scalerl_jax.scaling.curve_fit import CurveFit

# How far beyond budget and data a crossing is looked for, in how many places,
# and the difference below which two curves count as one.
_AHEAD, _PLACES, _SAME = 4.0, 160, 0.01
_FEWEST = 0.05  # Of draws that cross; fewer are not told.


class Crossing(NamedTuple):
  """Where two curves cross last, and the share of draws in which they do."""

  compute: float
  low: float
  high: float
  probability: float


def last_crossing(
  log_compute: Float64[np.ndarray, "K"],
  difference: Float64[np.ndarray, "K M"],
) -> Float64[np.ndarray, "M"]:
  """ln C of the last change of sign, a column a draw; NaN without one.

  Differences of less than .01 are neither: a change counts where the curves
  stand apart before and after it, and lies at the last zero in between.

  Args:
    log_compute: ln C, rising.
    difference: one curve minus the other at each of them, a column a draw.
  """
  place = np.full(difference.shape[1], np.nan)
  for m, column in enumerate(difference.T):
    apart = np.flatnonzero(np.abs(column) > _SAME)
    changes = np.flatnonzero(np.diff(np.sign(column[apart])))
    if not len(changes):
      continue
    start, end = apart[changes[-1]], apart[changes[-1] + 1]
    positive = column[start : end + 1] > 0
    k = start + int(np.flatnonzero(np.diff(positive))[-1])
    part = column[k] / (column[k] - column[k + 1])
    place[m] = log_compute[k] + part * (log_compute[k + 1] - log_compute[k])
  return place


def _mean_curve_draws(fits, compute, rng) -> np.ndarray:
  """Draws of a recipe's law; of several seeds, drawn again for each draw."""
  laws = []
  for f in fits:
    found = draws_lib.law_draws(f, compute)
    laws.append(found[:, rng.permutation(found.shape[1])])
  if len(laws) == 1:
    return laws[0]
  size = min(law.shape[1] for law in laws)
  stacked = np.stack([law[:, :size] for law in laws])  # [S, K, M]
  times = rng.multinomial(len(laws), np.full(len(laws), 1 / len(laws)), size)
  return np.einsum("skm,ms->km", stacked, times / len(laws))


def find_crossing(
  ones: Sequence[CurveFit],
  others: Sequence[CurveFit],
  budget: float,
  level: float,
  rng: np.random.Generator,
) -> Crossing | None:
  """The last crossing of two laws, up to 4 times the budget and the data.

  Args:
    ones: the fits of one run, or of the seeds of one recipe.
    others: of the other, in the same unit of compute.
    budget: compute, above 0.
    level: probability inside the interval, in (0, 1).
    rng: puts draws of different runs together, and draws seeds again.

  Returns:
    Median and interval over the draws that cross, and their share; None where
    fewer than 5 % do.
  """
  both = [*ones, *others]
  first = max(float(f.compute[0]) for f in both)
  last = max(budget, *(float(f.compute[-1]) for f in both))
  compute = np.geomspace(first, _AHEAD * last, _PLACES)
  curves = [_mean_curve_draws(fits, compute, rng) for fits in (ones, others)]
  size = min(c.shape[1] for c in curves)
  places = last_crossing(
    np.log(compute), curves[0][:, :size] - curves[1][:, :size]
  )
  found = places[np.isfinite(places)]
  share = len(found) / size
  if share < _FEWEST:
    return None
  tails = (0.5, 0.5 - level / 2, 0.5 + level / 2)
  middle, low, high = np.exp(np.quantile(found, tails))
  return Crossing(float(middle), float(low), float(high), share)
