import numpy as np
import pytest

from scalerl_jax.scaling import points

COMPUTE = np.arange(0.0, 12.0)
PASS_RATE = np.linspace(0.1, 0.65, 12)


def test_points_are_sorted_and_compute_zero_is_set_apart():
  order = np.random.default_rng(0).permutation(12)
  chosen = points.choose(COMPUTE[order], PASS_RATE[order])
  np.testing.assert_array_equal(chosen.compute, COMPUTE[1:])
  np.testing.assert_array_equal(chosen.pass_rate, PASS_RATE[1:])
  assert chosen.initial.measured == PASS_RATE[0]
  assert chosen.initial.measured_noise == 1.0
  assert chosen.initial_weight == 1.0


def test_evaluations_at_compute_zero_are_averaged():
  compute, pass_rate = np.append(COMPUTE, 0.0), np.append(PASS_RATE, 0.2)
  chosen = points.choose(compute, pass_rate)
  assert chosen.initial.measured == pytest.approx(0.15)
  assert chosen.initial.measured_noise == 0.5
  assert chosen.initial_weight == 2.0


def test_window_keeps_compute_zero():
  chosen = points.choose(COMPUTE, PASS_RATE, min_compute=4.0, max_compute=9.0)
  np.testing.assert_array_equal(chosen.compute, COMPUTE[4:10])
  assert chosen.initial.measured == PASS_RATE[0]


def test_given_initial_is_exact():
  chosen = points.choose(COMPUTE, PASS_RATE, initial=0.07)
  assert chosen.initial.prior == 0.07
  assert chosen.initial.prior_sd < 1e-8
  assert np.isinf(chosen.initial.measured_noise)


def test_prior_of_initial_reaches_as_far_back_as_the_first_slope():
  early = points.choose(COMPUTE[1:], PASS_RATE[1:]).initial
  # 0.05 a unit of compute, one unit back: hypot(.03, .05).
  assert early.prior == PASS_RATE[1]
  assert early.prior_sd == pytest.approx(np.hypot(0.03, 0.05))
  flat = points.choose(COMPUTE[1:], np.full(11, 0.4)).initial
  assert flat.prior_sd == pytest.approx(0.03)


def test_first_evaluation_tells_of_initial_even_when_left_out():
  chosen = points.choose(COMPUTE[1:], PASS_RATE[1:], min_compute=5.0)
  assert chosen.initial.prior == PASS_RATE[1]


def test_trials_give_binomial_noise():
  trials = np.arange(100.0, 112.0)
  chosen = points.choose(COMPUTE, PASS_RATE, trials)
  expected = (PASS_RATE * (1 - PASS_RATE) / trials)[1:]
  assert chosen.binomial
  np.testing.assert_allclose(chosen.noise, expected)
  # A sample of all or nothing still has noise.
  assert (points.choose(COMPUTE, 0.0 * COMPUTE, 7).noise > 0).all()


def test_many_points_are_averaged_with_their_neighbours():
  compute = np.arange(1.0, 2501.0)
  chosen = points.choose(compute, compute / 2500)
  assert len(chosen.compute) == 834  # Threes, and a last one alone.
  np.testing.assert_allclose(chosen.compute[0], 6.0 ** (1 / 3))
  np.testing.assert_allclose(chosen.pass_rate[0], 2 / 2500)
  np.testing.assert_allclose(chosen.noise[[0, -1]], [1 / 3, 1.0])


@pytest.mark.parametrize(
  ("compute", "enough"),
  [
    ([0, 1, 2, 3, 4, 5], True),
    ([1, 2, 3, 4, 4, 4], True),
    ([0, 0, 0, 1, 2, 3], False),
    ([1, 2, 3, 4, 5], False),
  ],
)
def test_enough(compute, enough):
  assert points.enough(np.array(compute, float)) == enough
