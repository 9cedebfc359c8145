"""Backtests, against forecasts made one at a time."""

import numpy as np
import pytest

from scalerl_jax.scaling import backtest, baselines, forecast, scores
from scalerl_jax.scaling.fit import fit_curve

COMPUTE = np.linspace(0.0, 40.0, 31)
SHARES = (0.1, 1 / 3, 0.5)


def _case(name, asymptote, family="a", seed=0):
  rng = np.random.default_rng(seed)
  ratio = 7.0 / np.maximum(COMPUTE, 1e-9)
  rate = 0.2 + (asymptote - 0.2) / (1 + ratio**2)
  rate = rate + rng.normal(0, 0.006, len(COMPUTE))
  return backtest.Case(name, family, COMPUTE, rate, group=family)


CASES = [
  _case("one", 0.80, "a", 1),
  _case("two", 0.78, "a", 2),
  _case("three", 0.50, "b", 3),
]


@pytest.fixture(scope="module")
def found():
  return backtest.backtest(CASES, SHARES, siblings=True)


def _one(found, name, share, method):
  (score,) = [
    s
    for s in found.scores
    if (s.name, s.share, s.method) == (name, share, method)
  ]
  return score


def test_every_forecast_is_scored_or_named(found):
  told = {(s.name, s.share, s.method) for s in found.scores}
  left = {(s.name, s.share, s.method) for s in found.skipped}
  # At a tenth there are four evaluations; "three" is alone of its task.
  assert {n for n, share, m in left if (share, m) == (0.1, "all")} == {
    "one",
    "two",
    "three",
  }
  methods = {backtest.OURS, backtest.WITH_SIBLINGS, *baselines.BASELINES}
  for case in CASES:
    for share in SHARES[1:]:
      for method in methods:
        alone = (case.name, method) == ("three", backtest.WITH_SIBLINGS)
        expected = left if alone else told
        assert (case.name, share, method) in expected


def test_ours_is_the_fits_own_forecast(found):
  for case in CASES:
    part = forecast.first_part(case.compute, case.pass_rate, 0.5)
    score = _one(found, case.name, 0.5, backtest.OURS)
    assert score.mean == pytest.approx(part.forecast.mean)
    assert (score.low, score.high) == pytest.approx(
      (part.forecast.low, part.forecast.high)
    )
    assert score.measured == pytest.approx(part.measured)
    assert score.error == pytest.approx(part.error)
    assert score.inside == part.inside


def test_baselines_see_the_same_points(found):
  part = forecast.split(COMPUTE, CASES[0].pass_rate, 0.5)
  expected = baselines.plain_sigmoid(part.compute, part.pass_rate, part.end, 3)
  score = _one(found, "one", 0.5, "plain sigmoid")
  assert score.mean == pytest.approx(expected.mean)
  assert score.unclipped == pytest.approx((expected.mean, *expected.band()))
  assert score.crps == pytest.approx(
    scores.crps_sample(expected.sample.clip(0, 1), part.measured)
  )
  assert len(part.compute) == 16
  assert part.end == pytest.approx(COMPUTE[-3:].mean())


def test_siblings_are_the_finished_runs_of_the_group(found):
  part = forecast.split(COMPUTE, CASES[0].pass_rate, 1 / 3)
  sibling = fit_curve(COMPUTE, CASES[1].pass_rate)
  fit = fit_curve(part.compute, part.pass_rate, siblings=[sibling])
  score = _one(found, "one", 1 / 3, backtest.WITH_SIBLINGS)
  expected = fit.predict(part.end, evaluations=3)
  assert (score.mean, score.low, score.high) == pytest.approx(
    tuple(float(v) for v in expected)
  )
  alone = _one(found, "one", 1 / 3, backtest.OURS)
  assert score.high - score.low < alone.high - alone.low


def test_forecasts_are_clipped_before_they_are_scored():
  part = forecast.Part(COMPUTE, COMPUTE / 50, None, 45.0, 0.95)
  wide = baselines.Predictive(1.1, scores.student_sample(1.1, 0.5, 5))
  score = backtest.score(CASES[0], part, 0.5, "wide", wide, 0.9)
  assert (score.mean, score.high) == (1.0, 1.0)
  assert score.unclipped[2] > 1.5
  assert score.crps < scores.crps_sample(wide.sample, 0.95)
  _, low, high = score.unclipped
  assert score.standardised == pytest.approx((1.1 - 0.95) / (1.1 - low))
  assert high > 1.0


@pytest.mark.parametrize(
  ("call", "named"),
  [
    (lambda: backtest.backtest([]), "at least one run"),
    (lambda: backtest.backtest([CASES[0]] * 2), "its own name"),
    (lambda: backtest.backtest(CASES, (0.0,)), "share must be"),
    (lambda: backtest.backtest(CASES, level=1.0), "level must be"),
  ],
)
def test_bad_input_is_one_sentence(call, named):
  with pytest.raises(ValueError, match=named):
    call()
