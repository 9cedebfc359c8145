"""Decisions, against the law in closed form and against simulation."""

import numpy as np
import pytest

from scalerl_jax.scaling import decisions, draws
from scalerl_jax.scaling.fit import fit_curve

COMPUTE = np.linspace(0.0, 40.0, 21)


def _law(compute, asymptote=0.8, exponent=2.0):
  ratio = 8.0 / np.maximum(compute, 1e-9)
  return 0.2 + (asymptote - 0.2) / (1 + ratio**exponent)


@pytest.fixture(scope="module")
def exact():
  return fit_curve(COMPUTE, _law(COMPUTE), law="sigmoid", misfit=False)


@pytest.fixture(scope="module")
def noisy():
  noise = np.random.default_rng(0).normal(0, 0.015, len(COMPUTE))
  return fit_curve(COMPUTE, _law(COMPUTE) + noise)


@pytest.mark.parametrize("target", [0.3, 0.5, 0.75, 0.79])
def test_compute_to_reach_is_the_inverse_of_the_law(exact, target):
  expected = 8.0 * ((target - 0.2) / (0.8 - target)) ** 0.5
  found = decisions.compute_to_reach(exact, target)
  assert found.compute == pytest.approx(expected, rel=0.01)
  assert found.low <= found.compute <= found.high
  assert found.never == 0.0


def test_pass_rates_below_the_start_are_reached_at_once(exact):
  assert decisions.compute_to_reach(exact, 0.1)[1:] == (0.0, 0.0, 0.0, 0.0)


def test_pass_rates_above_the_asymptote_are_never_reached(exact):
  found = decisions.compute_to_reach(exact, 0.85)
  assert found.never == 1.0
  assert np.isinf([found.compute, found.low, found.high]).all()


def test_never_is_the_share_of_lower_asymptotes(noisy):
  low, high = noisy.intervals(0.8)["asymptote"]
  for share, target in ((0.1, low), (0.9, high)):
    found = decisions.compute_to_reach(noisy, target)
    assert found.never == pytest.approx(share, abs=0.02)
    # An end is infinite where never is likelier than the tail beyond it.
    assert np.isinf(found.high) == (found.never > 0.05)
    assert np.isinf(found.compute) == (share > 0.5)


def test_reach_agrees_with_the_law(noisy):
  # At the median compute half of the laws are above, at the ends 5 and 95 %.
  found = decisions.compute_to_reach(noisy, 0.72, 0.9)
  for compute, share in (
    (found.compute, 0.5),
    (found.low, 0.05),
    (found.high, 0.95),
  ):
    above = draws.law_draws(noisy, compute) >= 0.72
    assert above.mean() == pytest.approx(share, abs=0.005)


def test_gain_per_doubling_is_the_laws(exact):
  at = np.array([[0.0, 4.0, 8.0], [16.0, 40.0, 400.0]])
  mean, low, high = decisions.gain_per_doubling(exact, at)
  np.testing.assert_allclose(mean, _law(2 * at) - _law(at), atol=2e-3)
  assert mean.shape == low.shape == high.shape == at.shape
  assert ((low <= mean) & (mean <= high)).all()


def test_stop_probability_is_a_share_of_simulated_gains(noisy):
  mean, sd = draws.gain_draws(noisy, 80.0)
  rng = np.random.default_rng(1)
  gains = rng.normal(mean, sd, (500, len(mean))).ravel()
  for gain in (0.0, 0.01, 0.03):
    found = decisions.stop_probability(noisy, 80.0, gain)
    assert found == pytest.approx((gains < gain).mean(), abs=0.005)
  found = decisions.early_stop(noisy, 80.0, 0.03, level=0.8)
  np.testing.assert_allclose(
    found.gain,
    [gains.mean(), *np.quantile(gains, [0.1, 0.9])],
    atol=5e-4,
  )


def test_a_run_is_stopped_when_nothing_is_left(exact):
  left = _law(np.array(80.0)) - _law(np.array(40.0))  # 0.0172
  go_on = decisions.early_stop(exact, 80.0, 0.5 * left)
  stop = decisions.early_stop(exact, 80.0, 2.0 * left)
  assert (go_on.stop, stop.stop) == (False, True)
  assert go_on.probability < 0.05 < 0.95 <= stop.probability
  assert go_on.gain.mean == pytest.approx(left, abs=1e-3)


def test_a_run_that_is_not_known_goes_on():
  # The first fifth of the curve: where it will end is anybody's guess.
  compute = np.linspace(0.0, 8.0, 9)
  noise = np.random.default_rng(2).normal(0, 0.01, len(compute))
  fit = fit_curve(compute, _law(compute) + noise)
  assert not fit.identified
  found = decisions.early_stop(fit, 40.0, 0.05)
  assert not found.stop
  assert found.gain.high - found.gain.low > 0.1


@pytest.mark.parametrize(
  ("call", "named"),
  [
    (lambda f: decisions.compute_to_reach(f, 1.2), "pass_rate must be"),
    (lambda f: decisions.compute_to_reach(f, 0.5, 0.0), "level must be"),
    (lambda f: decisions.gain_per_doubling(f, -1.0), "at least 0"),
    (lambda f: decisions.gain_per_doubling(f, 1.0, 1.0), "level must be"),
    (lambda f: decisions.stop_probability(f, 80.0, np.nan), "gain must be"),
    (lambda f: decisions.stop_probability(f, 1.0, 0.1), "budget must be"),
    (lambda f: decisions.early_stop(f, 80.0, 0.1, 0.0), "confidence must"),
    (lambda f: decisions.early_stop(f, 80.0, 0.1, level=2.0), "level must"),
  ],
)
def test_bad_input_is_one_sentence(call, named, exact):
  with pytest.raises(ValueError, match=named):
    call(exact)
