import numpy as np
import pytest

from scalerl_jax.scaling import fit, verdict

COMPUTE = np.linspace(0.0, 40.0, 41)
PASS_RATE = 0.2 + 0.6 / (1.0 + (8.0 / np.maximum(COMPUTE, 1e-9)) ** 2.0)
PASS_RATE += np.random.default_rng(0).normal(scale=0.006, size=41)


@pytest.fixture(scope="module")
def fitted():
  return fit.fit_curve(COMPUTE[:21], PASS_RATE[:21])


def test_first_line_names_the_asymptote(fitted):
  low, high = fitted.intervals(0.9)["asymptote"]
  expected = f"{fitted.params.asymptote:.3f} [{low:.3f}, {high:.3f}]"
  assert verdict.asymptote_line(fitted) == f"asymptote: {expected}"


def test_first_line_says_why_it_is_unknown():
  flat = fit.fit_curve(COMPUTE, np.full(41, 0.4))
  line = verdict.asymptote_line(flat)
  assert line.startswith("asymptote: unidentified (the curve is flat")


def test_first_line_says_when_it_will_be_known():
  early = fit.fit_curve(COMPUTE[:9], PASS_RATE[:9])
  assert not early.identified
  line = verdict.asymptote_line(early)
  assert early.decided_at > COMPUTE[8]
  assert line.endswith(
    f"; expected to be decided at compute {early.decided_at:.3g}"
  )


def test_remarks_name_outliers_and_what_hangs_on_the_start(fitted):
  assert verdict.remarks(fitted, 40.0) == []  # R_0 was measured
  rates = PASS_RATE[1:].copy()
  rates[20] -= 0.2
  odd = fit.fit_curve(COMPUTE[1:], rates)
  told = verdict.remarks(odd, 80.0)
  assert told[0].endswith("given little weight: compute 21")
  found = odd.sensitivity(80.0)
  assert [one.initial_sd for one in found] == [0.01, 0.03, 0.1]
  for line, one in zip(told[1:], found, strict=True):
    assert f"within {one.initial_sd:g}: A {one.asymptote:.3f} [" in line
    assert f"at 80 {one.mean:.3f} [" in line
