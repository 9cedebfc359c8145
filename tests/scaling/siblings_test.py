import numpy as np
import pytest
from scipy import stats

from scalerl_jax.scaling import fit, posterior, siblings

COMPUTE = np.arange(0.0, 31.0)


def _run(seed, asymptote=0.8, exponent=2.0, midpoint=9.0, noise=0.006):
  rng = np.random.default_rng(seed)
  share = 1.0 / (1.0 + (midpoint / np.maximum(COMPUTE, 1e-9)) ** exponent)
  law = 0.2 + (asymptote - 0.2) * share
  return law + rng.normal(scale=noise, size=len(COMPUTE))


@pytest.fixture(scope="module")
def finished():
  return [
    fit.fit_curve(COMPUTE, _run(seed, a, b, c))
    for seed, a, b, c in (
      (0, 0.80, 2.0, 9.0),
      (1, 0.79, 2.1, 8.6),
      (2, 0.82, 1.9, 9.3),
    )
  ]


def _forecast(fitted):
  mean, low, high = (float(v) for v in fitted.predict(30.0, kind="mean"))
  return mean, high - low


def test_siblings_sharpen_a_third_of_a_run(finished):
  truth = 0.2 + 0.61 / (1.0 + (9.0 / 30.0) ** 2)
  errors, widths = [], []
  for seed in (7, 8, 9):
    part = {"compute": COMPUTE[:8], "pass_rate": _run(seed, 0.81)[:8]}
    alone = fit.fit_curve(**part)
    helped = fit.fit_curve(**part, siblings=finished)
    found = [_forecast(fitted) for fitted in (alone, helped)]
    errors.append([abs(mean - truth) for mean, _ in found])
    widths.append([width for _, width in found])
    # What they lend is not what the points know.
    assert not alone.identified
    assert not helped.identified
    assert helped.asymptote_profile == alone.asymptote_profile
  # Measured: errors .071 and .011, widths .270 and .120.
  assert np.mean(errors, 0)[1] < 0.5 * np.mean(errors, 0)[0]
  assert np.mean(widths, 0)[1] < 0.6 * np.mean(widths, 0)[0]


def test_a_run_unlike_its_siblings_escapes(finished):
  unlike = _run(7, asymptote=0.5, exponent=1.3, midpoint=5.0)
  alone = fit.fit_curve(COMPUTE, unlike)
  helped = fit.fit_curve(COMPUTE, unlike, siblings=finished)
  assert helped.params.asymptote == pytest.approx(
    alone.params.asymptote, abs=0.01
  )
  mean, width = _forecast(helped)
  assert mean == pytest.approx(_forecast(alone)[0], abs=0.01)
  assert width < 1.3 * _forecast(alone)[1]


def test_another_unit_of_compute_still_lends_the_asymptote(finished):
  part = {"compute": COMPUTE[:10] * 3600.0, "pass_rate": _run(7, 0.81)[:10]}
  alone = fit.fit_curve(**part)
  helped = fit.fit_curve(**part, siblings=finished)
  low, high = helped.intervals(0.9)["asymptote"]
  assert low < 0.81 < high
  wide = alone.intervals(0.9)["asymptote"]
  assert high - low < 0.7 * (wide[1] - wide[0])


def test_priors_are_a_mixture_that_keeps_the_weak_prior(finished):
  weak = posterior.weak_prior("sigmoid")
  own, lent = siblings.sibling_priors(weak, finished)
  assert own.weight + lent.weight == pytest.approx(1.0)
  assert not own.lent
  assert lent.lent
  np.testing.assert_array_equal(own.phi, weak.phi)
  np.testing.assert_array_equal(lent.phi[1], weak.phi[1])
  ((_, centre, sd),) = lent.asymptote
  assert centre == pytest.approx(0.803, abs=0.02)
  # Three runs .79 to .82 apart, drawn towards .04, and a new run's share.
  assert 0.02 < sd < 0.06
  half = siblings.sibling_priors(weak._replace(weight=0.5), finished)
  assert sum(p.weight for p in half) == pytest.approx(0.5)


def test_more_siblings_that_agree_lend_a_narrower_prior():
  values, errors = np.array([0.80, 0.81]), np.array([0.01, 0.01])
  _, two = siblings._learnt(values, errors, 0)
  _, eight = siblings._learnt(np.tile(values, 4), np.tile(errors, 4), 0)
  _, apart = siblings._learnt(values + np.array([0.0, 0.2]), errors, 0)
  assert 0.01 < eight < two < apart


def test_unidentified_siblings_tell_nothing_of_the_asymptote():
  unfinished = fit.fit_curve(COMPUTE[:8], _run(0)[:8])
  assert not unfinished.identified
  weak = posterior.weak_prior("sigmoid")
  assert siblings.sibling_priors(weak, [unfinished]) == [weak]
  assert siblings.sibling_priors(weak, []) == [weak]


def test_the_expected_value_is_the_siblings_own_at_their_median_end(finished):
  value = siblings.expected_value(finished)
  assert value.compute == 30.0
  ends = [float(f.predict(30.0, kind="mean")[0]) for f in finished]
  assert value.centre == np.median(ends)
  assert value.degrees == 5.0
  # Spread .01 to .02 drawn towards .03, and a new run's share.
  assert 0.015 < value.scale < 0.04
  at = np.linspace(0.5, 0.9, 7)
  expected = stats.t.pdf((at - value.centre) / value.scale, 5) / value.scale
  np.testing.assert_allclose(value.density(at), expected, rtol=1e-12)


def test_a_collapsed_sibling_does_not_move_the_expected_value(finished):
  fell = _run(3)
  fell[15:] = np.linspace(fell[15], 0.3, 16)
  collapsed = fit.fit_curve(COMPUTE, fell)
  value = siblings.expected_value(finished)
  robust = siblings.expected_value([*finished, collapsed])
  assert robust.centre == pytest.approx(value.centre, abs=0.02)
  assert robust.scale < 1.5 * value.scale


def test_borrowing_weights_draws_by_the_value(finished):
  draws, value = finished[0]._draws, siblings.Value(30.0, 0.75, 0.02, 4.0)
  curve = np.linspace(0.6, 0.9, len(draws.asymptote))
  ranked = draws._replace(asymptote=curve)  # so that draws can be told apart
  found = siblings.borrowed(ranked, curve, value)
  own, lent = siblings.WEIGHTS[2], siblings.WEIGHTS[0]
  weight = (lent * value.density(curve) + own) / (lent + own)
  mean = float(weight @ curve / weight.sum())
  assert found.asymptote.mean() == pytest.approx(mean, abs=1e-3)
  gained = found.log_evidence - draws.log_evidence
  assert gained == pytest.approx(np.log(weight.mean()))
  assert found.effective < draws.effective
  # A value that no draw has leaves everything as it was.
  far = siblings.borrowed(ranked, curve, value._replace(centre=-50.0))
  np.testing.assert_allclose(far.asymptote, curve, atol=1e-3)
