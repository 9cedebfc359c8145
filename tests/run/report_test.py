import base64
import csv
import json
import pathlib
import re

import numpy as np
import pytest

from scalerl_jax import config
from scalerl_jax.run import report
from scalerl_jax.run.metrics import AXES, MetricsWriter
from scalerl_jax.scaling import forecast

CURVE = pathlib.Path(__file__).parents[1] / "fixtures/curves/n_cispo_s0.csv"
PROMPTS, SAMPLES = 768, 4
PNG = b"\x89PNG\r\n\x1a\n"


def write_run(folder, evaluations, *, tasks=("chain",)):
  """A workdir as a run leaves it, its curve measured once upon a time."""
  writer = MetricsWriter(folder, resume_step=None)
  with CURVE.open() as file:
    rows = list(csv.DictReader(file))[:evaluations]
  for row in rows:
    step, flops = int(row["step"]), float(row["compute_flops"])
    axes = dict.fromkeys(AXES, step) | {"flops_full": flops}
    for number, task in enumerate(tasks):
      right = round(float(row["pass_rate"]) * PROMPTS * SAMPLES) >> number
      correct = np.full(PROMPTS, right // PROMPTS)
      correct[: right % PROMPTS] += 1
      writer.evaluation(
        step,
        task,
        axes,
        correct,
        np.full(PROMPTS, SAMPLES),
        np.full(PROMPTS, 8.0),
        np.zeros(PROMPTS, int),
      )
    writer.step(
      step + 1,
      {
        "staleness": [30, 15, 3],
        "sampler_occupancy": 0.83,
        "generated_tokens": 6290 * (step + 1),
        "time/sampler_tokens_per_second": 1000.0 * (step + 1),
        "time/wall_seconds": 0.25 * (step + 1),
      },
    )
  writer.close()


def make(folder, **changes):
  arguments = {
    "title": "chain & <arithmetic>",
    "config": config.to_dict(config.Config()),
    "level": 0.9,
    "axis": "flops_full",
  }
  return report.write_report(folder, **(arguments | changes))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """A finished run's folder, page and summary."""
  folder = tmp_path_factory.mktemp("whole")
  write_run(folder, 99)
  samples = [
    {
      "prompt": "3 + 4 <",
      "answer": "7",
      "before": {"text": "9 & 9", "correct": False},
      "after": {"text": "7", "correct": True},
    },
    {
      "prompt": "5 - 5",
      "answer": "0",
      "before": {"text": "0", "correct": True},
    },
  ]
  (folder / "samples.json").write_text(json.dumps(samples))
  provenance = {"commit": "c0ffee", "versions": {"jax": "0.10.2"}}
  (folder / "config.json").write_text(json.dumps({"provenance": provenance}))
  summary = make(folder)
  return folder, (folder / "report.html").read_text(), summary


def images(page):
  found = re.findall(r'src="([^"]*)"', page)
  start = "data:image/png;base64,"
  assert all(source.startswith(start) for source in found)
  return [base64.b64decode(source[len(start) :]) for source in found]


def test_summary_is_the_forecast_of_the_first_half(whole):
  folder, _, summary = whole
  with CURVE.open() as file:
    rows = list(csv.DictReader(file))
  rates = [
    round(float(r["pass_rate"]) * PROMPTS * SAMPLES) / PROMPTS / SAMPLES
    for r in rows
  ]
  part = forecast.first_part(
    [float(row["compute_flops"]) for row in rows],
    rates,
    trials=PROMPTS * SAMPLES,
  )
  assert summary.start == rates[0]
  assert summary.end == pytest.approx(np.mean(rates[-3:]))
  assert summary.forecast == part.forecast
  assert summary.error == pytest.approx(part.forecast.mean - summary.end)
  low, high = part.forecast.low, part.forecast.high
  assert summary.inside == (low <= summary.end <= high)
  assert summary.report == str(folder / "report.html")


def test_lines_say_start_end_forecast_difference_and_path(whole):
  folder, _, summary = whole
  rise, told, path = summary.lines()
  assert f"{summary.start:.3f} -> {summary.end:.3f}" in rise
  for words in (
    f"{summary.forecast.mean:.3f} [{summary.forecast.low:.3f}, "
    f"{summary.forecast.high:.3f}]",
    f"measured: {summary.end:.3f}",
    f"difference {summary.error:+.3f}",
    "inside the 90% band" if summary.inside else "outside the 90% band",
  ):
    assert words in told
  assert path == f"report: {folder / 'report.html'}"


def test_page_stands_alone(whole):
  folder, page, _ = whole
  assert "://" not in page
  assert page.count("<script") == 2  # the data, and what draws them
  assert "<link" not in page
  curve, throughput, staleness = images(page)
  assert all(i.startswith(PNG) for i in (curve, throughput, staleness))
  assert (folder / "curve.png").read_bytes() == curve


def test_page_holds_every_section(whole):
  _, page, summary = whole
  text = re.sub(r"<[^>]*>", " ", page)
  for words in (
    "chain &amp; &lt;arithmetic&gt;",
    f"{summary.start:.3f} → {summary.end:.3f}",
    f"90% band {summary.forecast.low:.3f} to {summary.forecast.high:.3f}",
    f"{summary.error:+.3f}",
    "The law, from the first half",
    "The law, from the whole run",
    "asymptote: 0.9",
    "C_mid, compute at half the gain",
    "tokens generated a second",
    "sampler slots occupied   83%",
    "loss.clip_max   4.0",
    "commit   c0ffee",
    "versions.jax   0.10.2",
  ):
    assert re.sub(r"\s+", " ", words) in re.sub(r"\s+", " ", text)


def test_staleness_is_summed_over_all_steps(whole):
  # 41 batches of 30, 15 and 3 groups at staleness 0, 1 and 2.
  _, page, _ = whole
  assert "1968 groups of 41 batches; mean 0.44, most 2, allowed 2." in page


def test_completions_stand_before_and_after(whole):
  _, page, _ = whole
  assert '<span class="wrong">✗</span> 9 &amp; 9</td>' in page
  assert '<span class="right">✓</span> 7</td>' in page
  assert "3 + 4 &lt;" in page
  # Stopped before its second evaluation: nothing after.
  assert '✓</span> 0</td><td class="text"></td></tr>' in page


def test_unidentified_asymptote_is_said_with_its_reasons(tmp_path):
  write_run(tmp_path, 13)  # ends before the curve bends
  summary = make(tmp_path)
  assert not summary.forecast.identified
  page = (tmp_path / "report.html").read_text()
  assert "asymptote: unidentified (" in page


@pytest.mark.parametrize("evaluations", [0, 1, 8])
def test_a_run_stopped_early_gets_a_report(tmp_path, evaluations):
  write_run(tmp_path, evaluations)
  summary = make(tmp_path)
  page = (tmp_path / "report.html").read_text()
  assert summary.forecast is summary.error is summary.inside is None
  assert summary.evaluations == evaluations
  assert "too few evaluations" in page
  assert "<h2>Completions" not in page
  assert (tmp_path / "curve.png").exists() == bool(evaluations)
  assert ("The law, from the whole run" in page) == (evaluations == 8)
  assert ("Fitted on all evaluations" in page) == (evaluations == 8)
  if evaluations:
    assert f"({evaluations} evaluations)" in summary.lines()[0]
    assert "none, there are too few evaluations" in summary.lines()[1]
  else:
    assert summary.start is summary.end is None
    assert summary.lines()[0] == "held-out pass rate: not evaluated"


def test_all_sets_are_told_and_the_first_is_forecast(tmp_path):
  write_run(tmp_path, 3, tasks=("chain", "hard"))
  summary = make(tmp_path)
  page = (tmp_path / "report.html").read_text()
  assert f"<td>chain</td><td>{summary.start:.3f}</td>" in page
  assert "<td>hard</td>" in page


def test_every_axis_has_a_unit(tmp_path):
  assert set(report.UNITS) == set(config.COMPUTE_AXES)
  # A column of integers too makes a curve.
  write_run(tmp_path, 3)
  assert make(tmp_path, axis="trained_tokens").evaluations == 3


def test_an_unknown_axis_is_refused(tmp_path):
  with pytest.raises(ValueError, match="axis must be one of step, "):
    make(tmp_path, axis="hours")
