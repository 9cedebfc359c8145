"""Simple forecasts, against scipy and statistics by hand."""

import numpy as np
import pytest
from scipy import optimize, stats

from scalerl_jax.scaling import baselines
from scalerl_jax.scaling.grid import fit_grid

COMPUTE = np.linspace(0.0, 40.0, 15)
END = 80.0


def _law(compute, initial, asymptote, exponent, midpoint):
  ratio = midpoint / np.maximum(compute, 1e-12)
  return initial + (asymptote - initial) / (1 + ratio**exponent)


@pytest.fixture(scope="module")
def curve():
  rng = np.random.default_rng(0)
  return _law(COMPUTE, 0.2, 0.7, 1.8, 9.0) + rng.normal(0, 0.01, len(COMPUTE))


def test_last_value_by_hand():
  # Steps of +.1, +.3, −.1: s² = .11/3; 30 to 50 are 2 steps of 10 ahead.
  compute, rate = np.arange(4) * 10.0, np.array([0.1, 0.2, 0.5, 0.4])
  found = baselines.last_value(compute, rate, 50.0, 3)
  assert found.mean == 0.4
  reach = stats.t(3).ppf(0.95) * np.sqrt(0.11 / 3 * 2)
  assert found.band(0.9) == pytest.approx((0.4 - reach, 0.4 + reach), rel=0.02)


def test_log_linear_is_the_regressions_prediction_interval(curve):
  found = baselines.log_linear(COMPUTE, curve, END, 3)
  x, y = np.log(COMPUTE[1:]), curve[1:]
  line = stats.linregress(x, y)
  mean = line.intercept + line.slope * np.log(END)
  assert found.mean == pytest.approx(mean)
  n = len(x)
  s = np.sqrt(((y - line.intercept - line.slope * x) ** 2).sum() / (n - 2))
  leverage = (np.log(END) - x.mean()) ** 2 / ((x - x.mean()) ** 2).sum()
  reach = stats.t(n - 2).ppf(0.95) * s * np.sqrt(1 / 3 + 1 / n + leverage)
  assert found.band(0.9) == pytest.approx(
    (mean - reach, mean + reach), rel=2e-3
  )


def test_plain_sigmoid_is_scipys_fit_and_delta_method(curve):
  found = baselines.plain_sigmoid(COMPUTE, curve, END, 3)
  theta, cov = optimize.curve_fit(
    _law, COMPUTE, curve, p0=(0.2, 0.7, 1.5, 9.0), xtol=1e-12, ftol=1e-12
  )
  mean = _law(END, *theta)
  assert found.mean == pytest.approx(mean, abs=1e-6)
  step = 1e-6
  slope = [
    (_law(END, *(theta + h)) - _law(END, *(theta - h))) / (2 * step)
    for h in step * np.eye(4)
  ]
  degrees = len(COMPUTE) - 4
  noise = ((curve - _law(COMPUTE, *theta)) ** 2).sum() / degrees
  sd = np.sqrt(noise / 3 + slope @ cov @ slope)
  expected = mean + sd * stats.t(degrees).ppf([0.05, 0.95])
  assert found.band(0.9) == pytest.approx(expected, rel=2e-3)


def test_plain_sigmoid_stays_in_the_unit_interval():
  # A straight rise: the best sigmoid would go on for ever.
  compute = np.linspace(1.0, 10.0, 12)
  found = baselines.plain_sigmoid(compute, 0.1 * compute - 0.05, 200.0, 3)
  assert found.mean <= 1.0


@pytest.mark.parametrize("unit", [1e-6, 3e11])
def test_units_of_compute_do_not_matter(curve, unit):
  for name, forecaster in baselines.BASELINES.items():
    one = forecaster(COMPUTE, curve, END, 3)
    other = forecaster(COMPUTE * unit, curve, END * unit, 3)
    assert other.mean == pytest.approx(one.mean, rel=1e-5), name
    np.testing.assert_allclose(other.band(), one.band(), rtol=1e-3)


def test_paper_grid_is_the_papers_procedure(curve):
  # A window of 50,000 GPU-hours has the paper's own grid of C_mid and cut.
  compute = COMPUTE * 1250.0
  found = baselines.paper_grid(compute, curve, 100_000.0, 3)
  fit = fit_grid(
    compute,
    curve,
    initial=float(curve[0]),
    min_compute=1500.0,
    asymptotes=np.linspace(0.05, 1.0, 191),
    midpoints=np.linspace(100.0, 40000.0, 100),
  )
  assert found.mean == pytest.approx(_law(100_000.0, *fit.params))
  assert found.band() == pytest.approx(
    [float(v) for v in fit.predict(100_000.0, evaluations=3)[1:]], abs=1e-6
  )


def test_paper_grid_refuses_too_few_points():
  compute = np.concatenate([np.linspace(0.1, 1.0, 6), [90.0, 100.0]])
  with pytest.raises(ValueError, match="at least 6 points"):
    baselines.paper_grid(compute, np.linspace(0.2, 0.4, 8), 200.0, 3)


def test_bands_are_the_samples_quantiles():
  found = baselines.Predictive(0.5, np.linspace(0.0, 1.0, 101))
  assert found.band(0.5) == pytest.approx((0.25, 0.75))
