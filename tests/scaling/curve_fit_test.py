import numpy as np
import pytest

from scalerl_jax.scaling import bands, curve_fit, fit

COMPUTE = np.arange(1.0, 31.0)


def _curve(scale=0.005):
  rng = np.random.default_rng(0)
  law = 0.2 + 0.5 / (1.0 + (7.0 / COMPUTE) ** 1.7)
  return law + rng.normal(scale=scale, size=30)


def test_sensitivity_refits_with_each_prior_of_initial():
  fitted = fit.fit_curve(COMPUTE, _curve())
  found = fitted.sensitivity(60.0)
  assert tuple(s.initial_sd for s in found) == curve_fit.INITIAL_SDS
  for s in found:
    again = fit.fit_curve(COMPUTE, _curve(), initial_sd=s.initial_sd)
    assert s.asymptote == again.params.asymptote
    assert (s.mean, s.low, s.high) == tuple(map(float, again.predict(60.0)))
    assert s.low < s.mean < s.high
    assert s.asymptote_low < s.asymptote < s.asymptote_high
    assert s.identified == again.identified
  assert len({s.asymptote for s in found}) == 3


def test_sensitivity_keeps_the_other_options():
  options = {"min_compute": 4.0, "max_compute": 25.0, "law": "sigmoid"}
  fitted = fit.fit_curve(COMPUTE, _curve(), **options)
  (found,) = fitted.sensitivity(60.0, 0.8, [0.05])
  again = fit.fit_curve(COMPUTE, _curve(), initial_sd=0.05, **options)
  assert (found.mean, found.low) == tuple(map(float, again.predict(60.0, 0.8)))[
    :2
  ]


def test_nothing_depends_on_the_prior_where_initial_is_known():
  measured = fit.fit_curve(np.append(0.0, COMPUTE), np.append(0.2, _curve()))
  given = fit.fit_curve(COMPUTE, _curve(), initial=0.2)
  assert measured.sensitivity(60.0) == given.sensitivity(60.0) == ()


def test_weights_of_the_laws_sum_to_one():
  fitted = fit.fit_curve(COMPUTE, _curve())
  assert set(fitted.weights) == set(fit.AVERAGED)
  assert sum(fitted.weights.values()) == pytest.approx(1.0)
  assert fitted.law == max(
    fitted.weights, key=lambda name: fitted.weights[name]
  )
  # A third of the curve hardly tells them apart.
  early = fit.fit_curve(COMPUTE[:10], _curve()[:10])
  for name, believed in fit.AVERAGED.items():
    assert early.weights[name] == pytest.approx(believed, abs=0.05)
  alone = fit.fit_curve(COMPUTE, _curve(), law="dagum")
  assert alone.weights == {"dagum": pytest.approx(1.0)}
  assert alone.law == "dagum"


def test_observation_band_is_the_noise_about_the_mean():
  """Without misfit, its variance is the curve's and the noise's."""
  fitted = fit.fit_curve(COMPUTE, _curve(), law="sigmoid", misfit=False)
  _, low, high = fitted.predict(12.0, 0.9, kind="mean")
  _, low_new, high_new = fitted.predict(12.0, 0.9)
  noise = np.exp(np.median(fitted._draws.log_noise))
  wide = np.hypot(high - low, 2 * 1.645 * noise)
  assert high_new - low_new == pytest.approx(wide, rel=0.05)
  assert fitted.residual == pytest.approx(noise, rel=0.02)
  assert fitted.residual == pytest.approx(0.005, rel=0.3)


def test_forecasts_near_the_data_follow_them_and_far_ones_the_law():
  """A stretch above the law at the end: misfit, which is forgotten."""
  pass_rate = _curve(0.002) + np.where(COMPUTE > 27.0, 0.03, 0.0)
  fitted = fit.fit_curve(COMPUTE, pass_rate, law="sigmoid")
  at = np.array([30.0, 3e5])
  law = bands.law(fitted._draws, np.log(at / 30.0)).mean(1)
  mean, low, high = fitted.predict(at, kind="mean")
  assert mean[0] - law[0] > 0.003
  assert abs(mean[0] - pass_rate[-1]) < abs(law[0] - pass_rate[-1])
  assert mean[1] == pytest.approx(law[1], abs=1e-3)
  # The misfit of a time to come is unknown again: its size comes on top.
  far = bands.law(fitted._draws, np.log(at / 30.0))[1]
  fresh = np.random.default_rng(0).normal(size=(200, len(far)))
  sample = far + np.exp(fitted._draws.log_misfit) * fresh
  wide = np.ptp(np.quantile(sample, [0.05, 0.95]))
  assert high[1] - low[1] == pytest.approx(wide, rel=0.03)
