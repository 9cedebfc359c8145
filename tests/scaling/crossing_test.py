"""Crossings, against those of laws in closed form."""

import numpy as np
import pytest

from scalerl_jax.scaling import crossing
from scalerl_jax.scaling.fit import fit_curve

COMPUTE = np.linspace(0.0, 40.0, 21)


def _law(compute, asymptote, midpoint):
  ratio = midpoint / np.maximum(compute, 1e-9)
  return 0.2 + (asymptote - 0.2) / (1 + ratio**2)


def _fit(asymptote, midpoint):
  return fit_curve(COMPUTE, _law(COMPUTE, asymptote, midpoint))


@pytest.fixture(scope="module")
def early_and_late():
  return _fit(0.6, 5.0), _fit(0.8, 12.0)


def _found(one, other, budget=40.0, seed=0):
  rng = np.random.default_rng(seed)
  return crossing.find_crossing(one, other, budget, 0.9, rng)


def test_last_of_the_changes_counts_and_small_ones_do_not():
  x = np.arange(7.0)
  columns = np.array(
    [
      [0.1, -0.1, -0.1, 0.1, 0.1, 0.3, 0.3],  # Twice: the last is at 2.5.
      [0.1, 0.1, 0.1, 0.3, 0.3, 0.3, 0.3],  # Never.
      [0.004, -0.004, 0.004, 0.2, 0.2, 0.2, 0.2],  # Noise at the start.
      [0.1, 0.005, -0.005, -0.3, -0.3, -0.3, -0.3],  # Slowly: at 1.5.
      [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    ]
  ).T
  found = crossing.last_crossing(x, columns)
  np.testing.assert_allclose(found, [2.5, np.nan, np.nan, 1.5, np.nan])


def test_crossing_of_two_laws(early_and_late):
  one, other = early_and_late
  # 0.4 (1 + 144/C²) = 0.6 (1 + 25/C²): C² = (57.6 − 15)/0.2 = 213.
  found = _found([one], [other])
  assert found.compute == pytest.approx(np.sqrt(213.0), rel=0.02)
  assert found.low <= found.compute <= found.high
  assert found.probability > 0.95


def test_order_does_not_matter(early_and_late):
  one, other = early_and_late
  there, back = _found([one], [other]), _found([other], [one], seed=1)
  assert there.compute == pytest.approx(back.compute, rel=0.01)


def test_parallel_curves_do_not_cross():
  assert _found([_fit(0.6, 8.0)], [_fit(0.8, 8.0)]) is None


def test_crossings_beyond_the_budget_are_looked_for():
  # 0.6 (1 + 1600/C²) = 0.65 (1 + 64/C²): C² = 918.4/0.05, C = 135.5.
  ones, others = [_fit(0.8, 8.0)], [_fit(0.85, 40.0)]
  found = _found(ones, others, budget=60.0)
  assert found is not None
  assert found.high > 60.0
  assert found.high <= 240.0 * 1.001


def test_seeds_that_differ_widen_the_crossing(early_and_late):
  one, other = early_and_late
  alone = _found([one], [other])
  several = _found([one, _fit(0.65, 5.0), _fit(0.55, 5.0)], [other])
  assert several.high - several.low > 3 * (alone.high - alone.low)
  assert several.low < np.sqrt(213.0) < several.high
