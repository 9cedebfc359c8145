"""Scores, against numerical integration of their definition."""

import numpy as np
import pytest
from scipy import integrate, stats

from scalerl_jax.scaling import scores


def _integrated(cdf, measured, low=-np.inf, high=np.inf):
  below, _ = integrate.quad(lambda x: cdf(x) ** 2, low, measured, limit=200)
  above, _ = integrate.quad(
    lambda x: (1 - cdf(x)) ** 2, measured, high, limit=200
  )
  return below + above


@pytest.mark.parametrize("measured", [-2.5, 0.1, 0.3, 4.0])
def test_normal(measured):
  expected = _integrated(stats.norm(0.3, 0.7).cdf, measured)
  assert scores.crps_normal(0.3, 0.7, measured) == pytest.approx(expected)


@pytest.mark.parametrize("degrees", [1.5, 3, 17])
@pytest.mark.parametrize("measured", [-2.5, 0.1, 0.3, 4.0])
def test_student(degrees, measured):
  expected = _integrated(stats.t(degrees, 0.3, 0.7).cdf, measured)
  found = scores.crps_student(0.3, 0.7, degrees, measured)
  assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("measured", [-1.0, 0.2, 0.25, 0.6, 2.0])
def test_sample_is_its_step_function(measured):
  sample = np.array([0.5, 0.2, 0.9, 0.2, 0.7])
  x = np.linspace(-2.0, 3.0, 500_001)
  cdf = (sample[:, None] <= x).mean(0)
  expected = integrate.trapezoid((cdf - (x >= measured)) ** 2, x)
  assert scores.crps_sample(sample, measured) == pytest.approx(
    expected, abs=2e-5
  )


def test_sample_of_one_is_the_absolute_error():
  assert scores.crps_sample([0.4], 0.7) == pytest.approx(0.3)


@pytest.mark.parametrize("degrees", [3, 8, 1e9])
@pytest.mark.parametrize("z", [0.0, 0.8, -2.0])
def test_quantiles_stand_for_the_student(degrees, z):
  sample = scores.student_sample(0.3, 0.7, degrees)
  found = scores.crps_sample(sample, 0.3 + 0.7 * z)
  expected = scores.crps_student(0.3, 0.7, degrees, 0.3 + 0.7 * z)
  assert found == pytest.approx(expected, rel=0.02)
  assert np.median(sample) == pytest.approx(0.3)
  assert (sample <= stats.t(degrees, 0.3, 0.7).ppf(0.95)).mean() == (
    pytest.approx(0.95, abs=1e-3)
  )


def test_clipped_sample_is_the_censored_students_score():
  sample = scores.student_sample(0.9, 0.2, 5).clip(0, 1)
  cdf = stats.t(5, 0.9, 0.2).cdf
  expected = _integrated(cdf, 0.95, 0.0, 1.0)
  found = scores.crps_sample(sample, 0.95)
  assert found == pytest.approx(expected, rel=0.01)
  assert found < scores.crps_student(0.9, 0.2, 5, 0.95)


def test_an_honest_spread_is_best():
  # The score is proper: over draws of a normal, its own sd has the least mean.
  rng = np.random.default_rng(0)
  drawn = rng.normal(0.0, 1.0, 4000)
  means = [
    np.mean([scores.crps_normal(0.0, sd, y) for y in drawn])
    for sd in (0.5, 1.0, 2.0)
  ]
  assert means[1] < min(means[0], means[2])


@pytest.mark.parametrize(
  ("call", "named"),
  [
    (lambda: scores.crps_sample([], 0.5), "sample must be"),
    (lambda: scores.crps_sample([np.nan], 0.5), "sample must be"),
    (lambda: scores.crps_normal(0.0, 0.0, 0.5), "sd must be"),
    (lambda: scores.crps_student(0.0, -1.0, 3, 0.5), "scale must be"),
    (lambda: scores.crps_student(0.0, 1.0, 1, 0.5), "degrees must be"),
  ],
)
def test_bad_input_is_one_sentence(call, named):
  with pytest.raises(ValueError, match=named):
    call()
