"""The door of studies and its worker: what they refuse and what they leave."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from experiments import quickstart, study
from experiments.studies import worker
from experiments.studies.axes import NAMES, Study, load_study
from experiments.studies.runner import WORKER, Outcome
from scalerl_jax import config as config_lib
from scalerl_jax.run import train, warm_start
from scalerl_jax.run.metrics import AXES, CURVE_COLUMNS
from tests.runs import TINY


@pytest.fixture
def runs(monkeypatch):
  """Runs that end at once; gives what `run_jobs` was asked for."""
  asked = []

  def run_jobs(jobs, **settings):
    asked.append(([job.name for job in jobs if not job.done], settings))
    for job in jobs:
      job.folder.mkdir(parents=True, exist_ok=True)
      (job.folder / worker.DONE).write_text("{}")
    return Outcome({}, False)

  monkeypatch.setattr(study, "run_jobs", run_jobs)
  monkeypatch.setattr(study, "_conclude", lambda *_: None)
  return asked


def _call(folder, name="loss_type", seeds=1, **options):
  told = []
  code = study.run_study(name, seeds, str(folder), tell=told.append, **options)
  return code, told


def test_seeds_are_outermost_so_that_pairs_are_whole_early(tmp_path, runs):
  code, told = _call(tmp_path / "d", seeds=2)
  assert code == 0
  ((names, settings),) = runs
  assert names == [
    f"{variant}, seed {seed}"
    for seed in (0, 1)
    for variant in ("cispo", "dapo", "gspo")
  ]
  assert not settings["reuse"]
  assert told[0].startswith("study loss_type: 6 runs, 0 done; ")


def test_more_seeds_may_be_asked_for_later(tmp_path, runs):
  _call(tmp_path / "d", seeds=1)
  _, told = _call(tmp_path / "d", seeds=2)
  assert told[0].startswith("study loss_type: 6 runs, 3 done; ")
  assert runs[1][0] == [f"{v}, seed 1" for v in ("cispo", "dapo", "gspo")]


def test_smoke_is_one_seed_of_tiny_runs(tmp_path, runs):
  _call(tmp_path / "d", seeds=3, smoke=True)
  ((names, settings),) = runs
  assert len(names) == 3
  assert settings["reuse"]
  jobs = study.make_jobs(load_study("loss_type"), 1, tmp_path, smoke=True)
  assert {job.config.run.steps for job in jobs} == {6}


def test_a_run_is_its_variant_with_its_seed(tmp_path):
  jobs = study.make_jobs(load_study("loss_type"), 2, tmp_path, smoke=False)
  for job in jobs:
    variant = load_study("loss_type").variants[job.variant]
    assert job.config == config_lib.override(variant, {"run.seed": job.seed})
    assert job.folder == tmp_path / job.variant / f"seed_{job.seed}"


def test_bad_input_is_one_sentence_and_leaves_nothing(tmp_path, runs):
  folder = tmp_path / "d"
  with pytest.raises(ValueError, match=r"must be one of loss_type, .*'lr'"):
    _call(folder, name="lr")
  with pytest.raises(ValueError, match="--seeds must be 1 or more, got 0"):
    _call(folder, seeds=0)
  assert not folder.exists()
  assert not runs


def test_a_folder_of_something_else_is_refused(tmp_path, runs, monkeypatch):
  folder = tmp_path / "d"
  folder.mkdir()
  (folder / "notes.txt").write_text("mine")
  with pytest.raises(ValueError, match="holds other files"):
    _call(folder)
  with pytest.raises(ValueError, match="is a file"):
    _call(folder / "notes.txt")
  (folder / "notes.txt").unlink()
  _call(folder)
  with pytest.raises(
    ValueError, match="belongs to --study=loss_type, not to --study=precision"
  ):
    _call(folder, name="precision")
  with pytest.raises(ValueError, match="not to --study=loss_type --smoke"):
    _call(folder, smoke=True)
  other = Study(axis=(), variants={"cispo": TINY})
  monkeypatch.setattr(study, "load_study", lambda _: other)
  with pytest.raises(ValueError, match="other configs than today's"):
    _call(folder)
  (folder / "study.json").write_text("[1]")
  with pytest.raises(ValueError, match="cannot be read"):
    _call(folder)
  assert len(runs) == 1


def test_two_processes_do_not_share_a_study(tmp_path, runs):
  folder = tmp_path / "d"
  _call(folder)
  with (
    study._alone(folder),
    pytest.raises(ValueError, match="another process works on the study"),
  ):
    _call(folder)
  assert _call(folder)[0] == 0


def test_failed_and_stopped_runs_are_the_exit_code(tmp_path, runs, monkeypatch):
  for outcome, code in (
    (Outcome({"cispo, seed 0": "ValueError: no"}, False), 1),
    (Outcome({}, True), 130),
  ):
    monkeypatch.setattr(study, "run_jobs", lambda *_, o=outcome, **__: o)
    assert _call(tmp_path / str(code))[0] == code


def test_the_door_is_an_experiment_file():
  assert study.get_config() == quickstart.get_config()
  told = study.__doc__.split()
  assert [name for name in NAMES if name not in told] == []


class _Run:
  """Stands for a run: its curve ends at `last`, as if it had trained so far."""

  last = 2

  def __init__(self, config, workdir):
    assert config == TINY
    self.task, self.workdir = None, workdir

  def train(self):
    self.workdir.mkdir()
    rows = [
      f"{step},t,{','.join('0' * len(AXES))},{0.25 * step},7,4"
      for step in range(0, self.last + 1, 2)
    ]
    text = "\n".join([",".join(CURVE_COLUMNS), *rows]) + "\n"
    (self.workdir / "curve.csv").write_text(text)
    return self

  def lines(self):
    return ["how it went"]


@pytest.fixture
def fake_run(monkeypatch, tmp_path):
  monkeypatch.setenv("SCALERL_CACHE", str(tmp_path / "cache"))
  monkeypatch.setattr(train, "Run", _Run)
  monkeypatch.setattr(train, "enable_compilation_cache", lambda: None)
  bases = []
  monkeypatch.setattr(
    warm_start, "base_policy", lambda *_, **settings: bases.append(settings)
  )
  return bases


def test_a_worker_says_how_the_run_ended(tmp_path, fake_run, monkeypatch):
  monkeypatch.setattr(_Run, "last", TINY.run.steps)
  workdir = tmp_path / "seed_0"
  answer = worker.train(config_lib.to_dict(TINY), workdir)
  # Evaluations at steps 0, 2, 4, 6; the end is the mean of the last three.
  assert answer["state"] == "done"
  assert answer["pass_rate"] == {"t": 1.0}
  assert json.loads((workdir / worker.DONE).read_text()) == answer
  (base,) = fake_run
  assert base["supervised"] == TINY.supervised


def test_a_run_that_was_stopped_is_not_done(tmp_path, fake_run, monkeypatch):
  monkeypatch.setattr(_Run, "last", TINY.run.steps - 2)
  workdir = tmp_path / "seed_0"
  answer = worker.train(config_lib.to_dict(TINY), workdir)
  assert answer == {"state": "stopped"}
  assert not (workdir / worker.DONE).exists()


def test_a_worker_logs_why_a_run_failed_and_takes_the_next(tmp_path):
  def line(name, config):
    workdir = str(tmp_path / name)
    return json.dumps(
      {"config": config, "workdir": workdir, "log": f"{workdir}.log"}
    )

  lines = [line("a", {"nose": {}}), line("b", {"run": {"steps": -1}})]
  done = subprocess.run(
    [*WORKER, "0"],
    input="\n".join(lines) + "\n",
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0
  answers = [json.loads(answer) for answer in done.stdout.splitlines()]
  assert answers == [{"state": "failed"}] * 2
  last = [
    (tmp_path / f"{name}.log").read_text().splitlines()[-1] for name in "ab"
  ]
  assert last[0].startswith("ValueError: a config section must be run, ")
  assert last[1].startswith("ValueError: run.steps must be above 0")


def test_a_lock_lets_one_in(tmp_path):
  # flock counts open files, so one process can stand for two.
  import fcntl

  path = tmp_path / "locks" / "a.lock"
  with worker.alone(path), path.open() as other, pytest.raises(BlockingIOError):
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
  with worker.alone(path):
    pass


def _door(folder, name, *rest):
  return [
    *(sys.executable, "-m", "experiments.study", f"--study={name}"),
    *(f"--workdir={folder}", "--smoke", *rest),
  ]


def test_the_command_refuses_in_one_line(tmp_path):
  done = subprocess.run(
    _door(tmp_path / "d", "nothing"),
    capture_output=True,
    text=True,
    stdin=subprocess.DEVNULL,
    check=False,
  )
  assert done.returncode == 2
  (line,) = done.stderr.strip().splitlines()
  assert line.startswith("error: --study must be one of loss_type, ")


@pytest.mark.slow
def test_a_study_goes_on_where_it_was_stopped(tmp_path):
  folder = tmp_path / "d"
  first = subprocess.Popen(
    _door(folder, "loss_type"), stdout=subprocess.PIPE, text=True
  )
  assert first.stdout is not None
  for line in first.stdout:
    if re.match(r"\w+, seed 0: \d+ s", line):
      break
  started = time.monotonic()
  first.send_signal(signal.SIGTERM)
  rest = first.communicate()[0]
  assert time.monotonic() - started < 30
  assert first.returncode == 130
  assert "the same command goes on from here" in rest
  done = {path: path.stat().st_mtime for path in folder.glob("*/*/done.json")}
  assert done
  again = subprocess.run(
    _door(folder, "loss_type"), capture_output=True, text=True, check=False
  )
  assert again.returncode == 0, again.stdout + again.stderr
  assert f"3 runs, {len(done)} done" in again.stdout
  assert all(path.stat().st_mtime == when for path, when in done.items())
  assert (folder / "figure.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_study_runs_as_smoke(name, tmp_path):
  done = subprocess.run(
    _door(tmp_path / "d", name),
    capture_output=True,
    text=True,
    env=os.environ | {"SCALERL_CACHE": str(tmp_path / "cache")},
    check=False,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  record = json.loads((tmp_path / "d" / "table.json").read_text())
  for section in record["sections"]:
    assert section["axis"] in load_study(name).compute
  tabulated = {v for s in record["sections"] for v in s["variants"]}
  assert tabulated == set(load_study(name).variants)
  assert record["missing"] == {}
