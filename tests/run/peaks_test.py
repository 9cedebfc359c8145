"""Peaks: the best seen, measured again before a rate is called impossible."""

import itertools

import jax
import pytest

from scalerl_jax.models import operands
from scalerl_jax.run import peaks
from scalerl_jax.run.meshes import make_meshes
from scalerl_jax.run.peaks import Peak
from tests.runs import TINY, vary


def _counting(*rates):
  """A measurement that returns these, and how often it was asked."""
  asked = []

  def measure():
    asked.append(None)
    return rates[len(asked) - 1]

  return measure, asked


def test_a_share_is_of_the_rate_measured():
  measure, asked = _counting()
  peak = Peak(80.0, measure, slack=1.5)
  assert peak.share("x", 20.0) == 0.25
  assert peak.share("x", 80.0) == 1.0
  assert not asked


def test_a_rate_above_the_peak_has_it_measured_again():
  measure, asked = _counting(160.0)
  peak = Peak(80.0, measure, slack=1.0)
  assert peak.share("x", 120.0) == 0.75
  assert peak.share("x", 80.0) == 0.5
  assert len(asked) == 1


def test_within_the_slack_the_rate_itself_is_the_peak_from_then_on():
  measure, asked = _counting(70.0, 100.0)
  peak = Peak(80.0, measure, slack=1.5)
  assert peak.share("x", 119.0) == 1.0
  assert peak.rate == 119.0
  assert peak.share("x", 59.5) == 0.5
  # No ladder: what is believed hangs on measurements and on rates seen.
  assert peak.share("x", 120.0) == 1.0
  assert len(asked) == 2


def test_above_the_slack_the_count_is_wrong():
  measure, _ = _counting(70.0)
  peak = Peak(80.0, measure, slack=1.5)
  with pytest.raises(ValueError, match=r"MFU must be a share in \[0, 1\]"):
    peak.share("MFU", 121.0)


def test_a_measurement_is_the_fastest_run_without_the_first(monkeypatch):
  clock = itertools.accumulate([0.0, 0.05, 0.0, 0.02, 0.0, 0.09])
  monkeypatch.setattr(peaks.time, "perf_counter", lambda: next(clock))
  runs = []

  def run():
    runs.append(None)
    return jax.numpy.zeros(())

  assert peaks._best_seconds(run) == pytest.approx(0.02)
  assert len(runs) == 4  # the first, and three until the time is spent


def test_rates_are_work_over_the_seconds_of_a_run(monkeypatch):
  device = jax.devices()[0]
  ran = []

  def best(run):
    ran.append(run())
    return 0.5

  monkeypatch.setattr(peaks, "_best_seconds", best)
  assert peaks.matmul_rate(device, "bfloat16", side=7) == 2 * 7**3 / 0.5
  assert ran[0].shape == (7, 7)
  assert ran[0].dtype == "float32"  # sums of products of two bfloat16
  monkeypatch.setitem(peaks._MOVED, "cpu", 3 * 8 * 2**18)
  # Each time through is read and written; a small array is taken larger.
  assert peaks.copy_rate(device, 12) == 3 * 2 * 2**20 / 0.5
  assert ran[1].nbytes == 2**20
  assert float(ran[1][5]) == 3.0


def test_equal_devices_are_measured_once_a_process(monkeypatch):
  asked = []

  def matmul(device, what):
    asked.append(what)
    return 10.0

  def copy(device, what):
    asked.append(what)
    return 100.0

  monkeypatch.setattr(peaks, "matmul_rate", matmul)
  monkeypatch.setattr(peaks, "copy_rate", copy)
  config = vary(TINY, pipeline={"generator_devices": 1, "fsdp": 4})
  meshes = make_meshes(config)
  found = [peaks.measure_peaks(config, meshes, 18) for _ in range(2)][1]
  assert found.learner_matmul.rate == 10.0 * 4
  assert found.sampler_matmul.rate == 10.0
  assert found.sampler_copy.rate == 100.0
  assert len(asked) == 2
  assert asked[0] == "float32"


@pytest.mark.parametrize("units", [True, False])
def test_products_are_measured_as_they_are_multiplied(monkeypatch, units):
  """A CPU that would emulate bfloat16 multiplies float32."""
  monkeypatch.setattr(operands, "cpu_has_bfloat16_units", lambda: units)
  asked = []
  monkeypatch.setattr(
    peaks, "_rate_of_kind", lambda measure, kind, what: asked.append(what) or 1
  )
  config = vary(TINY, model={"dot_dtype": "bfloat16"})
  peaks.measure_peaks(config, make_meshes(config), 18)
  assert asked[:2] == ["bfloat16" if units else "float32"] * 2
