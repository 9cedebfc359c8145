import pathlib

import numpy as np
import pytest

from scalerl_jax.scaling import curves, fit, forecast, points

CURVES = pathlib.Path(__file__).parents[1] / "fixtures" / "curves"
LAPTOP = ("n_cispo_s0", "n_cispo_s1", "n_np16_s0")


def _laptop(name):
  return curves.read_curve(CURVES / f"{name}.csv")


def test_first_half_of_laptop_runs_forecasts_their_end():
  parts = []
  for name in LAPTOP:
    curve = _laptop(name)
    part = forecast.first_part(curve.compute, curve.pass_rate)
    assert abs(part.error) <= 0.04
    assert part.forecast.high - part.forecast.low <= 0.12
    parts.append(part)
  # Measured: +.011, +.003, −.024; widths .064, .070, .058; all inside.
  assert sum(part.inside for part in parts) >= 2


def test_first_third_of_laptop_runs_is_wider():
  for name in LAPTOP:
    curve = _laptop(name)
    third = forecast.first_part(curve.compute, curve.pass_rate, 1 / 3)
    half = forecast.first_part(curve.compute, curve.pass_rate, 1 / 2)
    assert abs(third.error) <= 0.05
    width = third.forecast.high - third.forecast.low
    assert width > half.forecast.high - half.forecast.low


def test_split_is_by_compute_and_end_is_the_mean_of_three():
  curve = _laptop("n_cispo_s0")
  part = forecast.first_part(curve.compute, curve.pass_rate)
  assert part.fit.compute[-1] <= curve.compute[-1] / 2
  assert part.measured == pytest.approx(np.mean(curve.pass_rate[-3:]))
  assert part.forecast.compute == pytest.approx(np.mean(curve.compute[-3:]))
  assert part.error == part.forecast.mean - part.measured


def test_figure_one_of_the_paper_forecasts_its_extension():
  rows = np.genfromtxt(
    CURVES / "scalerl_fig1_dense.csv",
    delimiter=",",
    names=True,
    dtype=None,
    encoding="utf-8",
  )
  compute = rows["compute_gpu_hours"].astype(float)
  pass_rate, train = rows["pass_rate"], rows["split"] == "train"
  fitted = fit.fit_curve(compute[train], pass_rate[train])
  assert fitted.identified
  # The authors' drawn curve: A .645, B 1.68, C_mid 10.9k.
  assert fitted.params.asymptote == pytest.approx(0.645, abs=0.01)
  assert fitted.params.exponent == pytest.approx(1.68, abs=0.2)
  assert fitted.params.midpoint == pytest.approx(10.9e3, rel=0.1)
  mean, low, high = fitted.predict(compute[~train])
  truth = pass_rate[~train]
  assert np.sqrt(np.mean((mean - truth) ** 2)) <= 0.009
  assert np.mean((low <= truth) & (truth <= high)) >= 0.9
  assert np.mean(high - low) <= 0.035


def test_forecast_of_a_run_sharpens():
  curve = _laptop("n_cispo_s0")
  end = float(curve.compute[-1])
  widths = []
  for count in (3, 5, 14, 21, 41):
    assert points.enough(curve.compute[:count]) == (count > 5)
    if count > 5:
      part = fit.fit_curve(curve.compute[:count], curve.pass_rate[:count])
      found = forecast.forecast_from(part, end)
      widths.append(found.high - found.low)
      assert found.identified == (not found.reasons)
  assert widths[0] > widths[1] > widths[2]


def test_parts_that_are_too_short_are_none():
  compute = np.arange(8.0)
  assert forecast.first_part(compute, compute / 10) is None
  with pytest.raises(ValueError, match="share must be"):
    forecast.first_part(compute, compute / 10, 1.0)


def test_forecast_is_of_the_mean_of_three_evaluations():
  curve = _laptop("n_cispo_s0")
  fitted = fit.fit_curve(curve.compute, curve.pass_rate)
  found = forecast.forecast_from(fitted, 5e12, 0.8)
  expected = fitted.predict(5e12, 0.8, evaluations=3)
  assert (found.mean, found.low, found.high) == tuple(map(float, expected))
  assert found.compute == 5e12


def test_split_is_what_first_part_fits():
  curve = _laptop("n_cispo_s0")
  order = np.random.default_rng(0).permutation(len(curve.compute))
  trials = np.arange(1.0, len(order) + 1)
  part = forecast.split(
    curve.compute[order], curve.pass_rate[order], 1 / 3, trials=trials[order]
  )
  seen = curve.compute <= curve.compute[-1] / 3
  np.testing.assert_array_equal(part.compute, curve.compute[seen])
  np.testing.assert_array_equal(part.pass_rate, curve.pass_rate[seen])
  np.testing.assert_array_equal(part.trials, trials[seen])
  assert part.end == pytest.approx(np.mean(curve.compute[-3:]))
  assert part.measured == pytest.approx(np.mean(curve.pass_rate[-3:]))
  again = forecast.first_part(curve.compute, curve.pass_rate, 1 / 3)
  assert again.measured == part.measured
  np.testing.assert_array_equal(again.fit.compute, part.compute[1:])
