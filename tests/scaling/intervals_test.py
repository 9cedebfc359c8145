import numpy as np
import pytest

from scalerl_jax.scaling import fit, intervals

COMPUTE = np.arange(0.0, 41.0)
TRUTH = intervals.Parameters(0.2, 0.75, 1.9, 9.0)


def _law(compute, p):
  return p[0] + (p[1] - p[0]) / (
    1.0 + (p[3] / np.maximum(compute, 1e-9)) ** p[2]
  )


def _noise(scale=0.006, seed=0, count=41):
  return np.random.default_rng(seed).normal(scale=scale, size=count)


def test_profile_covers_the_truth_and_widens_with_the_level():
  fitted = fit.fit_curve(COMPUTE, _law(COMPUTE, TRUTH) + _noise())
  low, high = fitted.asymptote_profile
  assert low < TRUTH.asymptote < high
  assert 0.0 < high - low < 0.2


def test_profile_agrees_with_the_posterior_when_the_curve_is_clear():
  fitted = fit.fit_curve(COMPUTE, _law(COMPUTE, TRUTH) + _noise())
  posterior = fitted.intervals(0.9)["asymptote"]
  width = posterior[1] - posterior[0]
  np.testing.assert_allclose(
    fitted.asymptote_profile, posterior, atol=0.35 * width
  )


def test_intervals_nest_and_cover():
  fitted = fit.fit_curve(COMPUTE, _law(COMPUTE, TRUTH) + _noise())
  wide, narrow = fitted.intervals(0.95), fitted.intervals(0.5)
  for name, truth in TRUTH._asdict().items():
    assert wide[name][0] < narrow[name][0] < narrow[name][1] < wide[name][1]
    assert wide[name][0] < truth < wide[name][1]


def _reasons(compute, pass_rate):
  fitted = fit.fit_curve(compute, pass_rate.clip(0, 1))
  assert fitted.identified == (not fitted.reasons)
  return "; ".join(fitted.reasons)


def test_clear_curve_is_identified():
  assert not _reasons(COMPUTE, _law(COMPUTE, TRUTH) + _noise())


def test_data_that_end_before_the_midpoint():
  late = TRUTH._replace(midpoint=90.0)
  assert "before the midpoint" in _reasons(
    COMPUTE, _law(COMPUTE, late) + _noise()
  )


@pytest.mark.parametrize("seed", range(3))
def test_flat_curve(seed):
  assert "flat" in _reasons(COMPUTE, 0.4 + _noise(seed=seed))


def test_constant_curve():
  assert "flat" in _reasons(COMPUTE, np.full(41, 0.4))


def test_falling_curve():
  falling = TRUTH._replace(initial=0.6, asymptote=0.2)
  assert "falls" in _reasons(COMPUTE, _law(COMPUTE, falling) + _noise())


def test_curve_that_falls_after_a_peak():
  peak = _law(COMPUTE, TRUTH) - 0.012 * np.maximum(COMPUTE - 24.0, 0.0)
  assert "falls after a peak" in _reasons(COMPUTE, peak + _noise())


def test_asymptote_at_its_bound():
  over = TRUTH._replace(asymptote=1.3, midpoint=30.0)
  assert "A at its bound 1" in _reasons(COMPUTE, _law(COMPUTE, over))


def test_wide_profile():
  wide = _law(COMPUTE, TRUTH._replace(midpoint=33.0, exponent=1.2))
  assert "profile interval of A" in _reasons(COMPUTE, wide + _noise(0.01))


def test_unsettled_integration_is_said():
  step = np.where(COMPUTE > 15.0, 0.7, 0.2)
  assert "did not settle" in _reasons(COMPUTE, step)
