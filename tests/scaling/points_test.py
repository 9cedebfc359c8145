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


def test_initial_sd_is_the_prior_that_is_asked_for():
  about_first = points.choose(COMPUTE[1:], PASS_RATE[1:], initial_sd=0.01)
  assert about_first.initial.prior == PASS_RATE[1]
  assert about_first.initial.prior_sd == 0.01
  assert about_first.initial_weight is None
  about = points.choose(
    COMPUTE[1:], PASS_RATE[1:], initial=0.07, initial_sd=0.1
  )
  assert about.initial[:2] == (0.07, 0.1)
  assert about.initial_weight is None
  # A measurement counts beside a prior that is given, and without it alone.
  both = points.choose(COMPUTE, PASS_RATE, initial=0.07, initial_sd=0.1)
  assert both.initial == (0.07, 0.1, PASS_RATE[0], 1.0)
  alone = points.choose(COMPUTE, PASS_RATE, initial_sd=0.1)
  assert alone.initial == points.choose(COMPUTE, PASS_RATE).initial


def _counts(prompts=5, samples=8, seed=0):
  """Correct of each evaluation and prompt, and their pass rates."""
  rng = np.random.default_rng(seed)
  chance = np.clip(PASS_RATE[:, None] + rng.normal(0, 0.3, prompts), 0.05, 0.95)
  correct = rng.binomial(samples, chance)
  return correct, correct.mean(1) / samples


def test_counts_give_the_noise_within_prompts():
  correct, pass_rate = _counts()
  chosen = points.choose(COMPUTE, pass_rate, counts=(correct, 8))
  for i, row in enumerate(correct[1:]):
    p = row / 8
    expected = sum(v * (1 - v) / 7 for v in p) / 5**2
    assert chosen.noise[i] == pytest.approx(expected)
  binomial = points.choose(COMPUTE, pass_rate, 40)
  # How prompts differ is no noise: less than the binomial of the mean.
  assert chosen.noise.mean() < binomial.noise.mean()
  assert chosen.noise_prior != binomial.noise_prior


def test_counts_of_all_or_nothing_leave_some_noise():
  correct = np.repeat([0, 8], 6)[:, None] * np.ones(5)
  pass_rate = correct.mean(1) / 8
  chosen = points.choose(COMPUTE, pass_rate, counts=(correct, 8))
  assert (chosen.noise > 0).all()


def test_counts_follow_the_order_of_compute():
  correct, pass_rate = _counts()
  order = np.random.default_rng(1).permutation(12)
  one = points.choose(COMPUTE, pass_rate, counts=(correct, np.full((12, 5), 8)))
  other = points.choose(
    COMPUTE[order], pass_rate[order], counts=(correct[order], 8)
  )
  np.testing.assert_array_equal(one.noise, other.noise)


@pytest.mark.parametrize(
  ("change", "rule"),
  [
    ({"counts": (np.ones((11, 5)), 8)}, "a row for each evaluation"),
    ({"counts": (np.ones(12), 8)}, "a row for each evaluation"),
    ({"counts": (np.ones((12, 5)), np.ones(3))}, "correct and samples"),
    ({"counts": (np.ones((12, 5)), 1)}, "2 or more samples"),
    ({"counts": (np.full((12, 5), 9), 8)}, "2 or more samples"),
    ({"counts": (np.ones((12, 5)), 8)}, "mean over prompts"),
    ({"counts": (np.ones((12, 5)), 8), "trials": 40}, "both given"),
    ({"initial_sd": 0.0}, "initial_sd must be"),
    ({"initial_sd": 1.5}, "initial_sd must be"),
  ],
)
def test_refuses_in_one_sentence(change, rule):
  with pytest.raises(ValueError, match=rule):
    points.choose(COMPUTE, PASS_RATE, change.pop("trials", None), **change)
