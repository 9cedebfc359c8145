import numpy as np
import pytest

from scalerl_jax.scaling import fit, identification

COMPUTE = np.arange(0.0, 201.0)


def _curve(midpoint=30.0, noise=0.006, seed=0, asymptote=0.75):
  rng = np.random.default_rng(seed)
  share = 1.0 / (1.0 + (midpoint / np.maximum(COMPUTE, 1e-9)) ** 1.9)
  law = 0.2 + (asymptote - 0.2) * share
  return law + rng.normal(scale=noise, size=len(COMPUTE))


def _until(end, pass_rate):
  seen = end >= COMPUTE
  return fit.fit_curve(COMPUTE[seen], pass_rate[seen])


def test_an_early_curve_is_told_when_it_will_be_decided():
  """The forecast of the compute, against when the run itself decides it."""
  pass_rate = _curve()
  early = _until(20.0, pass_rate)
  assert not early.identified
  ends = np.arange(30.0, 201.0, 5.0)
  decided = next(e for e in ends if _until(e, pass_rate).identified)
  assert 20.0 < early.decided_at < np.inf
  assert decided / 2.0 <= early.decided_at <= 2.0 * decided


def test_it_lies_beyond_the_midpoint():
  early = _until(20.0, _curve(midpoint=40.0))
  assert early.decided_at >= early.params.midpoint


def test_what_is_not_decided_is_decided_later():
  """Also where something else than the width is missing."""
  fitted = _until(200.0, _curve())
  assert fitted.decided_at < 200.0
  later = identification.decided_at(
    fitted._draws,
    fitted.params,
    fitted.compute,
    fitted._noise,
    fitted._start,
    identified=False,
  )
  assert later > 200.0


def test_an_identified_curve_was_decided_within_its_points():
  fitted = _until(200.0, _curve())
  assert fitted.identified
  assert fitted.params.midpoint * 0.99 <= fitted.decided_at <= 200.0


def test_denser_evaluations_decide_earlier():
  share = 1.0 / (1.0 + (30.0 / np.maximum(COMPUTE, 1e-9)) ** 1.9)
  law, seen = 0.2 + 0.55 * share, COMPUTE <= 45.0
  rng = np.random.default_rng(0)
  noisy = law + rng.normal(scale=0.02, size=len(law))
  dense = fit.fit_curve(COMPUTE[seen], noisy[seen], misfit=False)
  sparse = fit.fit_curve(COMPUTE[seen][::3], noisy[seen][::3], misfit=False)
  assert not dense.identified
  assert dense.decided_at < sparse.decided_at


@pytest.mark.parametrize("slope", [0.0, -0.002])
def test_flat_and_falling_curves_name_no_compute(slope):
  rng = np.random.default_rng(0)
  pass_rate = 0.6 + slope * COMPUTE[:41] + rng.normal(scale=0.006, size=41)
  fitted = fit.fit_curve(COMPUTE[:41], pass_rate)
  assert not fitted.identified
  assert fitted.decided_at is None


def test_the_unit_of_compute_does_not_matter():
  pass_rate, seen = _curve(), COMPUTE <= 20.0
  steps = fit.fit_curve(COMPUTE[seen], pass_rate[seen])
  flops = fit.fit_curve(COMPUTE[seen] * 3e11, pass_rate[seen])
  assert flops.decided_at == pytest.approx(3e11 * steps.decided_at, rel=1e-6)
