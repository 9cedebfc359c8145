"""Comparisons of runs, against counts over simulated winners."""

import numpy as np
import pytest

from scalerl_jax.scaling import compare, contest
from scalerl_jax.scaling.fit import fit_curve

COMPUTE = np.linspace(0.0, 40.0, 21)


def _law(compute, asymptote, exponent=2.0, midpoint=8.0):
  ratio = midpoint / np.maximum(compute, 1e-9)
  return 0.2 + (asymptote - 0.2) / (1 + ratio**exponent)


def _fit(asymptote, exponent=2.0, midpoint=8.0, noise=0.008, seed=0, last=None):
  rng = np.random.default_rng(seed)
  rate = _law(COMPUTE, asymptote, exponent, midpoint)
  rate = rate + rng.normal(0, noise, len(COMPUTE))
  return fit_curve(COMPUTE, rate, max_compute=last)


@pytest.fixture(scope="module")
def fits():
  return {
    "low": _fit(0.70, seed=1),
    "high": _fit(0.80, seed=2),
    "same": _fit(0.80, exponent=1.5, seed=3),
    "early": _fit(0.72, midpoint=4.0, seed=4),
    "short": _fit(0.80, seed=5, last=10.0),
  }


def test_probability_is_a_share_of_all_pairs():
  rng = np.random.default_rng(0)
  first, second = rng.integers(0, 9, 70), rng.integers(2, 9, 50)
  above = first[:, None] > second
  ties = first[:, None] == second
  found = contest.probability_above(first.astype(float), second.astype(float))
  assert found == pytest.approx(above.mean() + ties.mean() / 2)


def test_probability_of_normals_is_the_closed_form():
  # P(X > Y) = Φ((μ_x − μ_y)/√(σ_x² + σ_y²)) = Φ(0.6) for .3, .4 and .3.
  rng = np.random.default_rng(0)
  found = contest.probability_above(
    rng.normal(0.3, 0.3, 200_000), rng.normal(0.0, 0.4, 200_000)
  )
  assert found == pytest.approx(0.72575, abs=3e-3)


def test_the_higher_run_wins(fits):
  found = contest.compare_runs({k: fits[k] for k in ("low", "high")}, 60.0)
  assert [side.name for side in found.sides] == ["high", "low"]
  (pair,) = found.pairs
  assert (pair.first, pair.second) == ("high", "low")
  assert pair.probability > 0.99
  for side, asymptote in zip(found.sides, (0.8, 0.7), strict=True):
    truth = float(_law(np.array(60.0), asymptote))
    assert side.pass_rate.low <= truth <= side.pass_rate.high
    assert side.asymptote.low <= asymptote <= side.asymptote.high
    assert side.exponent.low <= 2.0 <= side.exponent.high
    assert side.midpoint.low <= 8.0 <= side.midpoint.high
    assert (side.seeds, side.last) == (1, 40.0)
  assert pair.difference.low > 0.0
  assert pair.difference.mean == pytest.approx(
    found.sides[0].pass_rate.mean - found.sides[1].pass_rate.mean
  )


def test_a_single_runs_pass_rate_is_its_forecast(fits):
  found = contest.compare_runs(fits, 60.0, level=0.8)
  for side in found.sides:
    mean, low, high = fits[side.name].predict(60.0, 0.8, "mean")
    expected = (float(mean), float(low), float(high))
    # The mean of the predict has no random part.
    assert side.pass_rate.mean == pytest.approx(expected[0], abs=4e-3)
    assert side.pass_rate[1:] == pytest.approx(expected[1:], abs=1e-9)
    assert side.reasons == fits[side.name].reasons


def test_every_pair_is_told_once(fits):
  found = contest.compare_runs(fits, 60.0)
  named = {frozenset((p.first, p.second)) for p in found.pairs}
  assert len(named) == len(found.pairs) == 10
  assert all(pair.probability >= 0.5 for pair in found.pairs)


def test_a_run_against_itself_is_even(fits):
  found = contest.compare_runs({"a": fits["low"], "b": fits["low"]}, 60.0)
  assert found.pairs[0].probability == pytest.approx(0.5)


def test_the_winner_depends_on_the_budget(fits):
  runs = {k: fits[k] for k in ("early", "high")}
  # 0.52 (1 + 64/C²) = 0.6 (1 + 16/C²): C² = 23.68/0.08, C = 17.2.
  soon, late = (contest.compare_runs(runs, b).pairs[0] for b in (6.0, 60.0))
  assert (soon.first, late.first) == ("early", "high")
  for pair in (soon, late):
    assert pair.crossing.low <= 17.2 <= pair.crossing.high
    assert pair.crossing.probability > 0.9


def test_margin_rule_compares_exponents_at_one_asymptote(fits):
  (pair,) = contest.compare_runs(
    {k: fits[k] for k in ("high", "same")}, 60.0, margin=0.1
  ).pairs
  one, other = (fits[name] for name in (pair.first, pair.second))
  sides = contest.compare_runs(
    {k: fits[k] for k in ("high", "same")}, 60.0
  ).sides
  common = np.mean([side.asymptote.mean for side in sides])
  assert pair.shared.asymptote == pytest.approx(common, abs=1e-3)
  for found, fit in zip(pair.shared.exponents, (one, other), strict=True):
    refit = compare.refit_exponent(
      fit.compute,
      fit.pass_rate,
      initial=fit.params.initial,
      asymptote=pair.shared.asymptote,
    )
    assert found == pytest.approx(refit.exponent)
  exponents = pair.shared.exponents
  by_name = dict(zip((pair.first, pair.second), exponents, strict=True))
  assert by_name["high"] > by_name["same"]


def test_margin_rule_needs_near_and_known_asymptotes(fits):
  far = contest.compare_runs({k: fits[k] for k in ("low", "high")}, 60.0)
  assert far.pairs[0].shared is None
  assert not fits["short"].identified
  runs = {k: fits[k] for k in ("high", "short")}
  assert contest.compare_runs(runs, 60.0, margin=1.0).pairs[0].shared is None


def test_what_seeds_vary_by_is_in_the_probability():
  ends = (0.74, 0.80, 0.68, 0.77)
  alone = {"a": _fit(0.75, noise=0.002), "b": _fit(0.72, noise=0.002)}
  several = {
    "a": [_fit(a, noise=0.002, seed=i) for i, a in enumerate(ends)],
    "b": [_fit(a - 0.03, noise=0.002, seed=i) for i, a in enumerate(ends)],
  }
  sure = contest.compare_runs(alone, 60.0)
  unsure = contest.compare_runs(several, 60.0)
  assert sure.pairs[0].probability > 0.99
  assert 0.6 < unsure.pairs[0].probability < 0.93
  side = next(s for s in unsure.sides if s.name == "a")
  assert side.seeds == 4
  # As wide as the t-interval of plain numbers, a little narrower for its prior.
  plain = compare.seed_interval([float(_law(60.0, a)) for a in ends])
  width = side.pass_rate.high - side.pass_rate.low
  assert 0.6 < width / (plain.high - plain.low) < 1.1
  assert side.pass_rate.mean == pytest.approx(plain.mean, abs=0.01)


def test_equal_seeds_make_a_recipe_surer():
  several = [_fit(0.75, noise=0.01, seed=i) for i in range(4)]
  found = contest.compare_runs({"one": several[0], "four": several}, 60.0)
  widths = {s.name: s.pass_rate.high - s.pass_rate.low for s in found.sides}
  assert widths["four"] < widths["one"]


def test_words_hold_the_numbers(fits):
  found = contest.compare_runs({k: fits[k] for k in ("early", "high")}, 60.0)
  lines = contest.in_words(found, "FLOPs")
  (pair,) = found.pairs
  rates = [f"{s.pass_rate.mean:.3f}".removeprefix("0") for s in found.sides]
  assert lines[0].startswith("high beats early at 60 FLOPs with probability")
  assert f"({rates[0]} against {rates[1]})" in lines[0]
  assert f"cross at {pair.crossing.compute:.3g} FLOPs" in lines[0]
  assert "before it early leads" in lines[0]
  assert any("another seed" in line for line in lines)


def test_words_say_what_would_make_it_surer(fits):
  found = contest.compare_runs({k: fits[k] for k in ("high", "short")}, 60.0)
  told = "\n".join(contest.in_words(found))
  assert "the asymptote of short is unidentified" in told
  assert found.pairs[0].probability < contest.SURE
  assert "too close to call" in told
  assert "train on towards the budget, or run more seeds" in told
  here = contest.compare_runs({"a": fits["low"], "b": fits["low"]}, 40.0)
  told_here = "\n".join(contest.in_words(here))
  assert "%; run more seeds" in told_here
  late = contest.compare_runs({k: fits[k] for k in ("early", "high")}, 6.0)
  told = "\n".join(contest.in_words(late))
  assert "early beats high at 6 with probability" in told
  assert "beyond it high leads" in told


def test_words_of_one_asymptote_tell_who_rises_more_sharply(fits):
  found = contest.compare_runs(
    {k: fits[k] for k in ("high", "same")}, 60.0, margin=0.1
  )
  assert "high rises more sharply" in "\n".join(contest.in_words(found))


def test_the_same_seed_gives_the_same_answer(fits):
  runs = {"a": [fits["low"], fits["high"]], "b": fits["early"]}
  assert contest.compare_runs(runs, 60.0) == contest.compare_runs(runs, 60.0)


@pytest.mark.parametrize(
  ("runs", "budget", "options", "named"),
  [
    (("low",), 60.0, {}, "at least two"),
    (("low", "high"), 0.0, {}, "budget must be"),
    (("low", "high"), np.inf, {}, "budget must be"),
    (("low", "high"), 60.0, {"level": 1.0}, "level must be"),
    (("low", "high"), 60.0, {"margin": 0.0}, "margin must be"),
  ],
)
def test_bad_input_is_one_sentence(runs, budget, options, named, fits):
  with pytest.raises(ValueError, match=named):
    contest.compare_runs({k: fits[k] for k in runs}, budget, **options)


def test_a_recipe_without_runs_is_one_sentence(fits):
  with pytest.raises(ValueError, match="got none of b"):
    contest.compare_runs({"a": fits["low"], "b": []}, 60.0)
