import numpy as np
import pytest

from scalerl_jax.scaling import fit, outliers

COMPUTE = np.arange(0.0, 21.0)


def _curve(seed, scale=0.008):
  rng = np.random.default_rng(seed)
  law = 0.2 + 0.6 / (1.0 + (6.0 / np.maximum(COMPUTE, 1e-9)) ** 1.8)
  return law + rng.normal(scale=scale, size=len(COMPUTE))


@pytest.mark.parametrize("off", [0.2, -0.2])
@pytest.mark.parametrize("index", [0, 1, 2, 7, 14, 19, 20])
def test_one_evaluation_hardly_moves_the_forecast(index, off):
  clean = _curve(index)
  spoilt = clean.copy()
  spoilt[index] = np.clip(spoilt[index] + off, 0.0, 1.0)
  mean, low, high = fit.fit_curve(COMPUTE, clean).predict(40.0)
  fitted = fit.fit_curve(COMPUTE, spoilt)
  moved, _, _ = fitted.predict(40.0)
  sd = (high - low) / (2 * 1.645)
  assert abs(moved - mean) < sd
  assert fitted.outliers == (float(index),)


def test_an_outlier_first_does_not_become_initial():
  clean = _curve(3)[1:]
  spoilt = clean.copy()
  spoilt[0] += 0.25
  one, other = (fit.fit_curve(COMPUTE[1:], y) for y in (clean, spoilt))
  mean, low, high = one.predict(40.0)
  assert abs(other.predict(40.0)[0] - mean) < (high - low) / 3.29
  assert abs(other.params.initial - one.params.initial) < 0.05


@pytest.mark.parametrize("seed", range(6))
def test_ordinary_curves_have_none(seed):
  assert fit.fit_curve(COMPUTE, _curve(seed)).outliers == ()
  assert fit.fit_curve(COMPUTE, _curve(seed, 0.03).clip(0, 1)).outliers == ()


def test_a_collapse_is_no_outlier():
  pass_rate = _curve(0)
  pass_rate[-3:] -= 0.25
  fitted = fit.fit_curve(COMPUTE, pass_rate)
  assert fitted.outliers == ()
  assert any("falls" in reason for reason in fitted.reasons)


def test_a_steep_rise_is_no_outlier():
  pass_rate = np.where(COMPUTE < 9.5, 0.2, 0.8) + _curve(0) - _curve(0, 0.0)
  assert fit.fit_curve(COMPUTE, pass_rate).outliers == ()


def test_inflation_is_the_squared_distance_of_those_who_stand_alone():
  values = np.full(9, 0.5)
  values[4] = 0.9
  values[:2] = 0.1

  def residuals(weight):
    return values - np.average(values, weights=weight)

  found = outliers.inflation(values, residuals)
  assert (found[np.arange(9) != 4] == 1.0).all()
  # Spread is at its floor; the robust mean stays near 0.5.
  assert found[4] == pytest.approx((0.4 / 0.004) ** 2, rel=0.1)


def test_steady_curves_are_not_fitted_at_all():
  def residuals(weight):
    raise AssertionError("fitted")

  rising = np.linspace(0.2, 0.6, 12)
  np.testing.assert_array_equal(outliers.inflation(rising, residuals), 1.0)
  np.testing.assert_array_equal(outliers.inflation(rising[:4], residuals), 1.0)
