"""The efficiency plot: a line of slope B, and masked where it has no value."""

import numpy as np
import pytest

from scalerl_jax.scaling import compare, efficiency
from scalerl_jax.scaling.fit import fit_curve

COMPUTE = np.linspace(1.0, 40.0, 13)


def _law(compute, asymptote=0.8, exponent=2.0, midpoint=8.0):
  return 0.2 + (asymptote - 0.2) / (1 + (midpoint / compute) ** exponent)


@pytest.mark.parametrize("unit", [1.0, 3e11])
def test_on_the_law_efficiency_is_compute_to_the_exponent(unit):
  # F = C^B: at 3e11 and B = 40 the power itself would overflow.
  for exponent in (0.7, 2.0, 40.0):
    near = unit * np.linspace(7.0, 9.0, 5)
    found = efficiency.log_efficiency(
      _law(near, exponent=exponent, midpoint=8.0 * unit),
      initial=0.2,
      asymptote=0.8,
      exponent=exponent,
      midpoint=8.0 * unit,
    )
    np.testing.assert_allclose(found, exponent * np.log(near), rtol=1e-9)


def test_it_is_the_papers_formula():
  rate, known = 0.55, {"initial": 0.2, "asymptote": 0.6}
  found = efficiency.log_efficiency(rate, exponent=1.3, midpoint=9.0, **known)
  expected = 9.0**1.3 / ((0.6 - 0.2) / (0.55 - 0.2) - 1.0)
  assert float(np.exp(found)) == pytest.approx(expected)


def test_points_outside_the_law_are_masked():
  rates = [0.1, 0.2, 0.21, 0.5, 0.6, 0.7]
  found = efficiency.log_efficiency(
    rates, initial=0.2, asymptote=0.6, exponent=2.0, midpoint=3.0
  )
  assert np.isnan(found).tolist() == [True, True, False, False, True, True]


def test_lines_have_the_slopes_of_their_refits():
  fits = {
    "fast": fit_curve(COMPUTE, _law(COMPUTE, 0.78, 2.5), initial=0.2),
    "slow": fit_curve(COMPUTE, _law(COMPUTE, 0.82, 1.5), initial=0.2),
  }
  lines = efficiency.efficiency_lines(fits)
  common = np.mean([f.params.asymptote for f in fits.values()])
  for name, line in lines.items():
    assert line.asymptote == pytest.approx(common)
    refit = compare.refit_exponent(
      COMPUTE, fits[name].pass_rate, initial=0.2, asymptote=common
    )
    assert line.exponent == pytest.approx(refit.exponent)
    assert line.midpoint == pytest.approx(refit.midpoint)
    assert (line.defined == np.isfinite(line.log_efficiency)).all()
  assert lines["fast"].exponent > lines["slow"].exponent


def test_a_common_asymptote_of_its_own_gives_straight_lines():
  fit = fit_curve(COMPUTE, _law(COMPUTE), initial=0.2)
  line = efficiency.efficiency_lines({"run": fit}, 0.8)["run"]
  assert line.defined.all()
  slope, intercept = np.polyfit(line.log_compute, line.log_efficiency, 1)
  assert (slope, intercept) == pytest.approx((2.0, 0.0), abs=1e-4)


def test_noise_above_a_low_asymptote_is_no_harm():
  fit = fit_curve(COMPUTE, _law(COMPUTE), initial=0.2)
  line = efficiency.efficiency_lines({"run": fit}, 0.7)["run"]
  assert not line.defined.all()
  assert (line.defined == (fit.pass_rate < 0.7)).all()


@pytest.mark.parametrize(
  ("change", "named"),
  [
    ({"initial": 0.6}, "asymptote the larger"),
    ({"asymptote": 1.1}, r"in \[0, 1\]"),
    ({"exponent": 0.0}, "above 0"),
    ({"midpoint": np.inf}, "finite"),
  ],
)
def test_bad_parameters_are_one_sentence(change, named):
  good = {"initial": 0.2, "asymptote": 0.6, "exponent": 2.0, "midpoint": 3.0}
  with pytest.raises(ValueError, match=named):
    efficiency.log_efficiency(0.4, **(good | change))


def test_bad_runs_are_one_sentence():
  with pytest.raises(ValueError, match="at least one run"):
    efficiency.efficiency_lines({})
  fit = fit_curve(COMPUTE, _law(COMPUTE), initial=0.2)
  with pytest.raises(ValueError, match="above R_0"):
    efficiency.efficiency_lines({"run": fit}, 0.1)
