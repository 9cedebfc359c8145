"""Draws, against the bands that are made of the same posterior."""

import numpy as np
import pytest

from scalerl_jax.scaling import draws
from scalerl_jax.scaling.fit import fit_curve

COMPUTE = np.linspace(0.0, 40.0, 15)


def _curve(noise=0.01, seed=0):
  rate = 0.2 + 0.5 / (1 + (9.0 / np.maximum(COMPUTE, 1e-9)) ** 1.7)
  return rate + np.random.default_rng(seed).normal(0, noise, len(COMPUTE))


@pytest.fixture(scope="module")
def fitted():
  return fit_curve(COMPUTE, _curve())


@pytest.fixture(scope="module")
def counted():
  return fit_curve(COMPUTE, _curve(), trials=3000)


@pytest.mark.parametrize("which", ["fitted", "counted"])
@pytest.mark.parametrize(
  ("kind", "evaluations"), [("mean", 1), ("observation", 1), ("observation", 3)]
)
def test_quantiles_of_the_draws_are_the_bands(
  which, kind, evaluations, request
):
  fit = request.getfixturevalue(which)
  at = [0.0, 3.0, 40.0, 90.0]
  found = draws.curve_draws(fit, at, kind, evaluations=evaluations)
  for level in (0.5, 0.9):
    mean, low, high = fit.predict(at, level, kind, evaluations=evaluations)
    tails = (0.5 - level / 2, 0.5 + level / 2)
    expected = np.quantile(found, tails, axis=1).clip(0, 1)
    np.testing.assert_allclose((low, high), expected, atol=1e-12)
  # The mean has no random part: it is the draws' but for their spread's.
  spread = found.std(1) / np.sqrt(found.shape[1])
  assert (np.abs(found.mean(1) - mean) <= 3 * spread + 1e-9).all()


def test_law_is_the_draws_without_misfit_and_noise(fitted):
  at = np.array([5.0, 60.0])
  misfit, variance = draws.misfit_moments(fitted, at)
  law = draws.law_draws(fitted, at)
  d = fitted._draws
  z = np.exp(d.log_exponent) * (np.log(at[:, None] / 40.0) - d.log_midpoint)
  of_sigmoid = d.law == 0
  expected = d.initial + (d.asymptote - d.initial) / (1 + np.exp(-z))
  z = -np.exp(d.log_exponent) * d.log_midpoint
  last = d.initial + (d.asymptote - d.initial) / (1 + np.exp(-z))
  expected[1] += d.drift * (expected[1] - last)  # beyond the data, at 40
  np.testing.assert_allclose(law[:, of_sigmoid], expected[:, of_sigmoid])
  assert (variance >= 0).all()
  assert np.abs(misfit[1]).mean() < np.abs(law[1]).mean()


def test_no_misfit_at_compute_zero(fitted):
  misfit, variance = draws.misfit_moments(fitted, [0.0, 40.0])
  assert not misfit[0].any()
  assert not variance[0].any()
  assert variance[1].all()


def test_gain_to_where_the_data_end_is_nothing(fitted):
  mean, sd = draws.gain_draws(fitted, 40.0)
  np.testing.assert_allclose(mean, 0.0, atol=1e-12)
  np.testing.assert_allclose(sd, 0.0, atol=1e-9)


def test_gain_is_that_of_simulated_misfit(fitted):
  # The misfit of one draw, simulated from its state at the data's end.
  mean, sd = draws.gain_draws(fitted, 60.0)
  d, m = fitted._draws, 17
  misfit, variance = draws.misfit_moments(fitted, [40.0, 60.0])
  law = draws.law_draws(fitted, [40.0, 60.0])[:, m]
  rng = np.random.default_rng(0)
  at_end = rng.normal(misfit[0, m], np.sqrt(variance[0, m]), 200_000)
  kept = np.exp(-np.log(1.5) / np.exp(d.log_length[m]))
  fresh = np.sqrt(1 - kept**2) * np.exp(d.log_misfit[m])
  later = kept * at_end + fresh * rng.normal(size=len(at_end))
  gain = law[1] + later - law[0] - at_end
  assert mean[m] == pytest.approx(gain.mean(), abs=5e-5)
  assert sd[m] == pytest.approx(gain.std(), rel=0.01)


@pytest.mark.parametrize(
  ("call", "named"),
  [
    (lambda f: draws.curve_draws(f, -1.0), "at least 0"),
    (lambda f: draws.curve_draws(f, [np.nan]), "finite"),
    (lambda f: draws.curve_draws(f, 1.0, "law"), "kind must be"),
    (lambda f: draws.curve_draws(f, 1.0, evaluations=0), "evaluations must"),
    (lambda f: draws.gain_draws(f, 39.0), "budget must be"),
    (lambda f: draws.gain_draws(f, np.inf), "budget must be"),
  ],
)
def test_bad_input_is_one_sentence(call, named, fitted):
  with pytest.raises(ValueError, match=named):
    call(fitted)
