"""The backtest over real runs: what it reads, what it says, what it writes."""

import json

import numpy as np
import pytest

from benchmarks import forecasts
from scalerl_jax.scaling import backtest, baselines, scoreboard

HEADER = "step,task,flops_full,pass_rate,prompts,samples_per_prompt\n"


def _workdir(folder, seed, asymptote):
  folder.mkdir(parents=True)
  config = {"config": {"task": {"name": "chain", "seed": seed}}}
  (folder / "config.json").write_text(json.dumps(config))
  rng = np.random.default_rng(seed)
  lines = [HEADER]
  for step in range(0, 310, 10):
    ratio = 60.0 / max(step, 1e-9)
    rate = 0.2 + (asymptote - 0.2) / (1 + ratio**2) + rng.normal(0, 0.004)
    lines.append(f"{step},chain,{step * 1e9},{rate},768,4\n")
  (folder / "curve.csv").write_text("".join(lines))


@pytest.fixture
def runs(tmp_path):
  for seed, asymptote in ((0, 0.7), (1, 0.8)):
    for name in ("a", "b"):
      _workdir(tmp_path / "runs" / name / f"seed_{seed}", seed, asymptote)
  (tmp_path / "runs" / "stray").mkdir()
  (tmp_path / "runs" / "stray" / "curve.csv").write_text(HEADER)
  return tmp_path / "runs"


def test_workdirs_are_found_with_their_families(runs):
  cases = list(forecasts.cases_of_runs(runs, ["task.seed"], None))
  assert [case.name for case in cases] == [
    f"runs/{name}/seed_{seed}" for name in "ab" for seed in range(2)
  ]
  assert [case.family for case in cases] == [
    f"task.seed={seed}" for seed in range(2)
  ] * 2
  assert cases[0].group == cases[2].group != cases[1].group
  assert (cases[0].trials == 768 * 4).all()
  assert cases[0].compute[-1] == 300e9


def test_family_must_be_of_the_config(runs):
  with pytest.raises(ValueError, match=r"--family must name"):
    list(forecasts.cases_of_runs(runs, ["task.sead"], None))


def test_files_are_of_the_family_before_the_underscore():
  folder = "tests/fixtures/curves"
  paths = [f"{folder}/n_cispo_s0.csv", f"{folder}/n_np16_s0.csv"]
  cases = list(forecasts.cases_of_files(paths, None))
  assert [case.family for case in cases] == ["n", "n"]
  assert [case.name for case in cases] == ["n_cispo_s0", "n_np16_s0"]


def test_report_is_printed_and_written(runs, tmp_path, capsys, monkeypatch):
  out = tmp_path / "out.json"
  monkeypatch.delitem(baselines.BASELINES, "paper's grid")  # A second each.
  words = [f"--runs={runs}", "--shares=1/3,1/2", f"--out={out}", "--siblings"]
  forecasts.main(words)
  told = capsys.readouterr().out
  assert "from 50%: 4 curves, 2 families" in told
  record = json.loads(out.read_text())
  assert len(record["scores"]) == 4 * 2 * 5
  assert not record["skipped"]
  assert len(record["aims"]) == len(forecasts.AIMS)
  for aim in record["aims"]:
    value = aim["measured"]["value"]
    assert aim["hit"] == (aim["least"] <= value <= aim["most"])
    line = next(
      line
      for line in told.splitlines()
      if line.lstrip().startswith(f"{aim['share']:.0%} {aim['method']:<15} ")
      and f" {aim['quantity']} " in line
    )
    assert line.endswith(" hit" if aim["hit"] else " miss")
    assert f"{value:.3f}" in line


def test_aims_that_were_not_measured_are_left_out():
  row = scoreboard.Row(
    0.5,
    backtest.OURS,
    3,
    2,
    *[scoreboard.Estimate(0.8, 0.7, 0.9)] * 5,
    1.0,
    *[scoreboard.Estimate(0.97, 0.9, 1.0)] * 2,
  )
  told = forecasts.reached([row], [])
  assert [(aim.quantity, hit) for aim, _, hit in told] == [
    ("coverage", True),
    ("scaled_coverage", False),
  ]


def test_nothing_to_score_is_one_sentence():
  with pytest.raises(ValueError, match="must name finished runs"):
    forecasts.main([])
