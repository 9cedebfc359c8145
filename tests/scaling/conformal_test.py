"""Conformal factors, against counts by hand and exchangeable errors."""

import numpy as np
import pytest

from scalerl_jax.scaling import conformal


def test_errors_are_in_half_widths_of_their_side():
  found = conformal.standardised_error(
    [0.5, 0.5, 0.5, 0.5], [0.4] * 4, [0.7] * 4, [0.6, 0.7, 0.45, 0.3]
  )
  np.testing.assert_allclose(found, [0.5, 1.0, 0.5, 2.0])


def test_a_band_that_is_a_point_is_missed_by_far():
  found = conformal.standardised_error([0.5], [0.5], [0.5], [0.6])
  assert found[0] > 1e6


@pytest.mark.parametrize(
  ("level", "expected"), [(0.9, 9.0), (0.5, 5.0), (0.8, 8.0), (0.95, 9.0)]
)
def test_factor_is_the_rank_by_hand(level, expected):
  # Nine errors: ⌈10 · level⌉, at most the ninth.
  errors = np.random.default_rng(0).permutation(np.arange(1.0, 10.0))
  assert conformal.conformal_factor(errors, level) == expected


def test_new_errors_are_inside_as_often_as_promised():
  rng = np.random.default_rng(0)
  inside = []
  for _ in range(4000):
    errors = rng.exponential(size=20)  # ⌈20 · 0.9⌉ of 19: the 18th.
    inside.append(errors[0] <= conformal.conformal_factor(errors[1:], 0.9))
  assert np.mean(inside) == pytest.approx(0.9, abs=0.015)


def test_own_family_is_left_out():
  errors = np.array([9.0, 8.0, 1.0, 2.0, 3.0])
  families = ["a", "a", "b", "b", "c"]
  found = conformal.leave_one_family_out(errors, families, 0.5)
  # Of {1, 2, 3}: the 2nd; of {3, 8, 9}: the 2nd; of {1, 2, 8, 9}: the 3rd.
  np.testing.assert_array_equal(found, [2.0, 2.0, 8.0, 8.0, 8.0])


def test_one_family_has_nothing_to_learn_from():
  found = conformal.leave_one_family_out(np.ones(3), ["a"] * 3)
  assert np.isnan(found).all()


def test_scaled_bands_hold_the_errors_that_the_factor_was_made_of():
  rng = np.random.default_rng(1)
  mean = rng.uniform(0.4, 0.6, 30)
  low, high = (
    mean - rng.uniform(0.01, 0.1, 30),
    mean + rng.uniform(0.01, 0.1, 30),
  )
  measured = mean + rng.normal(0, 0.1, 30)
  errors = conformal.standardised_error(mean, low, high, measured)
  factor = conformal.conformal_factor(errors, 0.8)
  new_low, new_high = conformal.scaled(mean, low, high, factor)
  inside = (new_low <= measured + 1e-12) & (measured - 1e-12 <= new_high)
  assert inside.sum() == 25  # ⌈31 · 0.8⌉
  np.testing.assert_allclose(new_high - mean, factor * (high - mean))
  np.testing.assert_allclose(mean - new_low, factor * (mean - low))


def test_bad_input_is_one_sentence():
  with pytest.raises(ValueError, match="at least one"):
    conformal.conformal_factor([])
  with pytest.raises(ValueError, match="level must be"):
    conformal.conformal_factor([1.0], 1.0)
