"""What seeds vary by, against the hierarchical model on a fine grid."""

import numpy as np
import pytest
from scipy import integrate, stats

from scalerl_jax.scaling import seeds

VALUES = np.array([0.91, 0.94, 0.925])
VARIANCES = np.array([1e-4, 4e-4, 2e-4])


def _weights(tau, scale):
  """Prior times likelihood of τ, with μ integrated by brute force."""
  mu = np.linspace(0.6, 1.25, 6501)
  total = np.sqrt(VARIANCES[:, None] + tau**2)
  likelihood = stats.norm.pdf(VALUES[:, None], mu, total).prod(0)
  return stats.halfcauchy.pdf(tau, scale=scale) * integrate.trapezoid(
    likelihood, mu
  )


def test_tau_is_that_of_the_hierarchical_model():
  found = seeds.between_seeds(VALUES, VARIANCES, 0.015, 4000)
  assert (np.diff(found) >= 0).all()
  tau = np.concatenate(
    [np.linspace(1e-6, 0.2, 2000), np.geomspace(0.2, 5, 200)]
  )
  density = np.array([_weights(t, 0.015) for t in tau])
  share = integrate.cumulative_trapezoid(density, tau, initial=0)
  share /= share[-1]
  for quantile in (0.1, 0.5, 0.9):
    expected = np.interp(quantile, share, tau)
    assert np.quantile(found, quantile) == pytest.approx(expected, rel=0.03)


def test_one_seed_tells_nothing_of_the_spread():
  found = seeds.between_seeds(VALUES[:1], VARIANCES[:1], 0.02, 1000)
  # The prior's: half-Cauchy, whose median is its scale.
  assert np.median(found) == pytest.approx(0.02, rel=0.01)


def test_equal_seeds_vary_little_and_far_ones_much():
  equal = seeds.between_seeds(np.full(5, 0.9), np.full(5, 1e-6), 0.015, 500)
  far = seeds.between_seeds(VALUES, np.full(3, 1e-8), 0.015, 500)
  assert np.median(equal) < 0.002
  assert np.median(far) == pytest.approx(VALUES.std(ddof=1), rel=0.4)


def test_mean_over_seeds_is_that_of_the_hierarchical_model():
  rng = np.random.default_rng(0)
  own = [rng.normal(v, 0.01, 20_000) for v in VALUES]
  found = seeds.mean_over_seeds(own, 0.015, rng)
  assert found.mean() == pytest.approx(VALUES.mean(), abs=1e-3)
  # μ given τ is N(x̄, (v + τ²)/3) where all seeds have variance v.
  tau = seeds.between_seeds(VALUES, np.full(3, 1e-4), 0.015, 20_000)
  z = rng.normal(size=20_000)
  expected = VALUES.mean() + z * np.sqrt((1e-4 + rng.permutation(tau) ** 2) / 3)
  for quantile in (0.05, 0.25, 0.75, 0.95):
    assert np.quantile(found, quantile) == pytest.approx(
      np.quantile(expected, quantile), abs=2e-3
    )


def test_one_seed_stands_for_itself():
  own = np.random.default_rng(0).normal(size=7)
  found = seeds.mean_over_seeds([own], 0.015, np.random.default_rng(1))
  np.testing.assert_array_equal(found, own)
