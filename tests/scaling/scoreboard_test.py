"""Means, ratios and their intervals, against numbers by hand."""

import numpy as np
import pytest

from scalerl_jax.scaling import backtest, conformal, scoreboard


def _score(name, family, method, mean, half, measured, crps=0.1, share=0.5):
  low, high = mean - half, mean + half
  clipped = np.clip([low, high], 0, 1)
  error = float(conformal.standardised_error(mean, low, high, measured))
  return backtest.Score(
    name,
    family,
    share,
    method,
    measured,
    mean,
    float(clipped[0]),
    float(clipped[1]),
    crps,
    error,
    (mean, low, high),
  )


def _board(rows):
  return backtest.Results(0.9, tuple(_score(*row) for row in rows), ())


# Errors of .02, .04 (outside), .06 and of .04, .04, .12; two families.
BY_HAND = _board(
  [
    ("x", "f", "ours", 0.52, 0.03, 0.50, 0.01),
    ("y", "f", "ours", 0.46, 0.03, 0.50, 0.03),
    ("z", "g", "ours", 0.56, 0.09, 0.50, 0.05),
    ("x", "f", "plain sigmoid", 0.54, 0.10, 0.50, 0.02),
    ("y", "f", "plain sigmoid", 0.54, 0.10, 0.50, 0.04),
    ("z", "g", "plain sigmoid", 0.62, 0.10, 0.50, 0.06),
  ]
)


def test_means_by_hand():
  ours, plain = scoreboard.summary(BY_HAND)
  assert (ours.method, ours.curves, ours.families) == ("ours", 3, 2)
  assert ours.error.value == pytest.approx(0.04)
  assert ours.rmse.value == pytest.approx(np.sqrt((4 + 16 + 36) / 3) / 100)
  assert ours.crps.value == pytest.approx(0.03)
  assert ours.coverage.value == pytest.approx(2 / 3)
  assert ours.width.value == pytest.approx((0.06 + 0.06 + 0.18) / 3)
  assert plain.coverage.value == pytest.approx(2 / 3)


def test_conformal_columns_by_hand():
  # Standardised: f has 2/3 and 4/3, g has 2/3. f is scaled by 2/3 (the one of
  # g), g by 4/3 (⌈3 · .9⌉ = 3, at most the second).
  ours = scoreboard.summary(BY_HAND)[0]
  assert ours.factor == pytest.approx((2 / 3 + 2 / 3 + 4 / 3) / 3)
  assert ours.scaled_width.value == pytest.approx((0.04 + 0.04 + 0.24) / 3)
  # x lies on the edge of its band, y beyond it, z well inside.
  assert ours.scaled_coverage.value == pytest.approx(2 / 3)


def test_ratios_by_hand():
  found = {r.quantity: r for r in scoreboard.ratios(BY_HAND)}
  assert set(found) == {"error", "crps", "width", "scaled_width"}
  assert found["error"].estimate.value == pytest.approx(0.12 / 0.20)
  assert found["crps"].estimate.value == pytest.approx(0.09 / 0.12)
  assert found["width"].estimate.value == pytest.approx(0.30 / 0.60)
  assert all(r.curves == 3 for r in found.values())
  # Families drawn again are {f, f}, {f, g} or {g, g}: .06/.08, .6, .06/.12.
  low, high = found["error"].estimate[1:]
  assert (low, high) == pytest.approx((0.5, 0.75))


def test_only_curves_that_both_forecast_are_compared():
  more = backtest.Results(
    0.9, (*BY_HAND.scores, _score("w", "g", "ours", 0.9, 0.1, 0.1)), ()
  )
  here, there = scoreboard.ratios(more), scoreboard.ratios(BY_HAND)
  assert [r.estimate.value for r in here] == pytest.approx(
    [r.estimate.value for r in there]
  )


def test_intervals_are_over_families_not_curves():
  # Nine curves in three families that agree within themselves.
  rng = np.random.default_rng(0)
  rows = [
    (f"{f}{i}", f, method, 0.5 + error, 0.2, 0.5)
    for f, error in (("f", 0.01), ("g", 0.04), ("h", 0.09))
    for i in range(3)
    for method in ("ours",)
  ]
  (row,) = scoreboard.summary(_board(rows))
  drawn = rng.choice([0.01, 0.04, 0.09], (100_000, 3)).mean(1)
  assert row.error.low == pytest.approx(np.quantile(drawn, 0.05), abs=2e-3)
  assert row.error.high == pytest.approx(np.quantile(drawn, 0.95), abs=2e-3)


def test_one_family_has_no_interval():
  rows = [("x", "f", "ours", 0.5, 0.1, 0.45), ("y", "f", "ours", 0.5, 0.1, 0.4)]
  (row,) = scoreboard.summary(_board(rows))
  assert row.error.value == pytest.approx(0.075)
  assert np.isnan([row.error.low, row.factor, row.scaled_coverage.value]).all()


def test_conformal_scaling_mends_bands_that_are_too_narrow_or_wide():
  rng = np.random.default_rng(1)
  rows = []
  for i in range(600):
    error = rng.normal(0, 0.02)
    for method, half in (("narrow", 0.01), ("wide", 0.1)):
      rows.append((f"{i}", f"{i % 20}", method, 0.5 + error, half, 0.5))
  narrow, wide = scoreboard.summary(_board(rows))
  assert narrow.coverage.value < 0.5 < 0.99 < wide.coverage.value
  for row in (narrow, wide):
    assert row.scaled_coverage.value == pytest.approx(0.9, abs=0.02)
    # 1.645 sd on either side.
    assert row.scaled_width.value == pytest.approx(2 * 1.645 * 0.02, rel=0.06)


def test_bands_are_clipped_after_they_are_scaled():
  rows = [
    ("x", "f", "ours", 0.9, 0.4, 0.85),
    ("y", "g", "ours", 0.9, 0.4, 0.7),
  ]
  (row,) = scoreboard.summary(_board(rows))
  # x by 1/2: .7 to 1 (1.1 before); y by 1/8: .85 to .95.
  assert row.scaled_width.value == pytest.approx((0.3 + 0.1) / 2)
