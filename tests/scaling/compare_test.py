"""Intervals and refits, against hand-computed numbers and scipy."""

import numpy as np
import pytest
from scipy import optimize, stats

from scalerl_jax.scaling import compare

SEEDS = np.array([0.942, 0.944, 0.969, 0.931, 0.957])
OTHERS = np.array([0.935, 0.946, 0.951, 0.920, 0.949])


def _law(compute, initial, asymptote, exponent, midpoint):
  return initial + (asymptote - initial) / (
    1 + (midpoint / compute) ** exponent
  )


def test_interval_by_hand():
  # x̄ = 2, s² = (1 + 0 + 1)/2, t₂(0.95) = 2.9200: reach 2.92/√3 = 1.6859.
  found = compare.seed_interval([1.0, 2.0, 3.0], 0.9)
  np.testing.assert_allclose(found, (2.0, 0.3141, 3.6859, 3), atol=1e-4)


@pytest.mark.parametrize("level", [0.5, 0.9, 0.99])
def test_interval_is_scipys(level):
  found = compare.seed_interval(SEEDS, level)
  low, high = stats.t.interval(
    level, len(SEEDS) - 1, loc=SEEDS.mean(), scale=stats.sem(SEEDS)
  )
  np.testing.assert_allclose(found, (SEEDS.mean(), low, high, 5), rtol=1e-12)


def test_interval_covers_as_often_as_it_says():
  rng = np.random.default_rng(0)
  inside = 0
  for _ in range(2000):
    found = compare.seed_interval(rng.normal(0.3, 2.0, 4), 0.9)
    inside += found.low < 0.3 < found.high
  assert abs(inside / 2000 - 0.9) < 0.02


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_paired_difference_is_the_paired_t_test(level):
  found = compare.paired_difference(SEEDS, OTHERS, level)
  expected = stats.ttest_rel(SEEDS, OTHERS).confidence_interval(level)
  np.testing.assert_allclose(found[1:3], expected, rtol=1e-10)
  assert found.mean == pytest.approx(SEEDS.mean() - OTHERS.mean())
  assert found.count == len(SEEDS)


def test_what_a_pair_has_in_common_cancels():
  shift = np.array([0.0, 3.0, -5.0, 7.0, 11.0])
  found = compare.paired_difference(SEEDS + shift, OTHERS + shift)
  np.testing.assert_allclose(found, compare.paired_difference(SEEDS, OTHERS))
  assert found.high - found.low < 0.02


def test_asymptotes_are_shared_within_the_margin_only():
  # The paper's Table 1 against its margin of 0.02.
  assert compare.MARGIN == 0.02
  assert compare.shared_asymptote(0.610, 0.595) == pytest.approx(0.6025)
  assert compare.shared_asymptote(0.595, 0.610) == pytest.approx(0.6025)
  assert compare.shared_asymptote(0.610, 0.585) is None
  assert compare.shared_asymptote(0.5, 0.75, margin=0.25) is None
  assert compare.shared_asymptote(0.5, 0.75, margin=0.26) == 0.625


@pytest.mark.parametrize("unit", [1.0, 3e11, 1e-6])
@pytest.mark.parametrize(("exponent", "midpoint"), [(0.7, 30.0), (4.5, 3.0)])
def test_refit_recovers_a_law_in_any_unit(unit, exponent, midpoint):
  compute = np.linspace(1.0, 40.0, 23)
  pass_rate = _law(compute, 0.15, 0.92, exponent, midpoint)
  found = compare.refit_exponent(
    compute * unit, pass_rate, initial=0.15, asymptote=0.92
  )
  np.testing.assert_allclose(
    (found.exponent, found.midpoint / unit), (exponent, midpoint), rtol=1e-6
  )
  assert found.residual < 1e-8


def test_refit_of_noisy_points_is_scipys():
  compute = np.geomspace(1.0, 60.0, 31)
  rng = np.random.default_rng(1)
  pass_rate = _law(compute, 0.15, 0.9, 2.0, 9.0) + rng.normal(0, 0.01, 31)
  held = {"initial": 0.14, "asymptote": 0.91}
  found = compare.refit_exponent(compute, pass_rate, **held)
  (exponent, midpoint), _ = optimize.curve_fit(
    lambda c, b, m: _law(c, 0.14, 0.91, b, m), compute, pass_rate, p0=(1.0, 5.0)
  )
  np.testing.assert_allclose(found[:2], (exponent, midpoint), rtol=1e-4)
  error = _law(compute, 0.14, 0.91, exponent, midpoint) - pass_rate
  assert found.residual == pytest.approx(np.sqrt(np.mean(error**2)), rel=1e-6)


def test_a_higher_asymptote_takes_a_lower_exponent():
  # Why B is compared at one A: of the same points, B falls as A is raised.
  compute = np.linspace(1.0, 30.0, 40)
  pass_rate = _law(compute, 0.2, 0.8, 2.0, 8.0)
  exponents = [
    compare.refit_exponent(
      compute, pass_rate, initial=0.2, asymptote=asymptote
    ).exponent
    for asymptote in (0.78, 0.8, 0.82)
  ]
  assert exponents[0] > exponents[1] > exponents[2]
  assert exponents[1] == pytest.approx(2.0, rel=1e-6)


def test_order_and_points_at_compute_zero_do_not_matter():
  compute = np.linspace(1.0, 30.0, 12)
  pass_rate = _law(compute, 0.2, 0.8, 1.5, 8.0)
  order = np.random.default_rng(2).permutation(12)
  again = compare.refit_exponent(
    np.append(compute[order], [0.0, 0.0]),
    np.append(pass_rate[order], [0.9, 0.1]),
    initial=0.2,
    asymptote=0.8,
  )
  np.testing.assert_allclose(again[:2], (1.5, 8.0), rtol=1e-6)


def test_points_outside_the_law_are_no_harm():
  # Inverting the law instead would take the logarithm of a negative number.
  compute = np.linspace(1.0, 30.0, 12)
  pass_rate = _law(compute, 0.2, 0.8, 1.5, 8.0)
  pass_rate[0], pass_rate[-1] = 0.19, 0.81
  found = compare.refit_exponent(compute, pass_rate, initial=0.2, asymptote=0.7)
  assert all(np.isfinite(found))


RATES = [0.2, 0.3, 0.4, 0.5]


@pytest.mark.parametrize(
  ("call", "named"),
  [
    (lambda: compare.seed_interval([0.5]), "at least 2 finite"),
    (lambda: compare.seed_interval([0.5, np.nan]), "at least 2 finite"),
    (lambda: compare.seed_interval([[0.5, 0.6]]), "values must be"),
    (lambda: compare.seed_interval([0.5, 0.6], 1.0), "level must be"),
    (lambda: compare.paired_difference([1, 2, 3], [1, 2]), "same seeds"),
    (lambda: compare.shared_asymptote(0.5, 1.2), r"in \[0, 1\]"),
    (lambda: compare.shared_asymptote(0.5, 0.6, margin=0.0), "margin"),
    (
      lambda: compare.refit_exponent(
        [1, 2, 3], RATES, initial=0.1, asymptote=0.9
      ),
      "same length",
    ),
    (
      lambda: compare.refit_exponent(
        [0, 0, 1, 2], RATES, initial=0.1, asymptote=0.9
      ),
      "3 points above compute 0",
    ),
    (
      lambda: compare.refit_exponent(
        [-1, 0, 1, 2], RATES, initial=0.1, asymptote=0.9
      ),
      "at least 0",
    ),
    (
      lambda: compare.refit_exponent(
        [1, 2, 3, 4], RATES, initial=0.6, asymptote=0.6
      ),
      "asymptote the larger",
    ),
  ],
)
def test_bad_input_is_one_sentence(call, named):
  with pytest.raises(ValueError, match=named):
    call()
