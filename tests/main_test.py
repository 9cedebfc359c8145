"""The door: what a person types, sees and is left with."""

import json
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from absl import app, flags, logging
from absl.testing import flagsaver

from scalerl_jax import config as config_lib
from scalerl_jax import main
from scalerl_jax.flags import define_run_flags
from scalerl_jax.run import host
from tests.runs import TINY, as_file, curve, metrics, shared_cache, vary

# Evaluated at every step: enough points for a forecast from the first half.
RUN = vary(TINY, run={"steps": 12}, evaluation={"every": 1})


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory):
  with shared_cache(tmp_path_factory) as folder:
    yield folder


@pytest.fixture
def door(monkeypatch):
  """`door(config, workdir, *rest)` is the command, in this process."""
  if "workdir" not in flags.FLAGS:
    define_run_flags()
  level = logging.get_verbosity()

  def call(config, workdir, *rest):
    line = ["main", f"--config={config}", f"--workdir={workdir}", *rest]
    with flagsaver.flagsaver():
      main.main(flags.FLAGS(line))

  yield call
  logging.set_verbosity(level)


@pytest.fixture
def tiny(tmp_path):
  return as_file(RUN, tmp_path / "tiny.py")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """(what the command gave back, its workdir), in a process of its own."""
  folder = tmp_path_factory.mktemp("main")
  path = as_file(TINY, folder / "tiny.py")
  done = subprocess.run(
    [
      *(sys.executable, "-m", "scalerl_jax.main"),
      f"--config={path}",
      f"--workdir={folder / 'run'}",
      *("--set", "run.steps=12", "--set=evaluation.every=1"),
    ],
    capture_output=True,
    text=True,
    stdin=subprocess.DEVNULL,
    check=False,
  )
  return done, folder / "run"


def test_a_run_ends_by_saying_how_it_went(finished):
  done, workdir = finished
  assert done.returncode == 0, done.stderr
  rise, forecast, report = done.stdout.splitlines()[-3:]
  rates = [float(row["pass_rate"]) for row in curve(workdir)]
  end = np.mean(rates[-3:])
  assert rise == (
    f"held-out pass rate: {rates[0]:.3f} -> {end:.3f}"
    " (mean of the last 3 evaluations)"
  )
  told = re.fullmatch(
    r"forecast from the first half of the run: ([\d.]+) \[([\d.]+), ([\d.]+)\];"
    r" measured: ([\d.]+); difference ([+-][\d.]+), (inside|outside) the 90%"
    r" band",
    forecast,
  )
  mean, low, high, measured, error = map(float, told.groups()[:5])
  assert low <= mean <= high
  assert measured == pytest.approx(end, abs=5.1e-4)
  assert error == pytest.approx(mean - measured, abs=1.1e-3)
  assert (told[6] == "inside") == (low <= measured <= high)
  assert report == f"report: {workdir / 'report.html'}"


def test_a_plan_needs_no_workdir_and_writes_nothing(door, tiny, capsys):
  before = set(tiny.parent.iterdir())
  door(tiny, "", "--plan", "--device_memory_gib=2")
  told = capsys.readouterr().out
  for words in (
    "trainer: ",
    "optimiser",
    "KV cache",
    "FLOPs a step",
    "largest",
  ):
    assert words in told
  assert set(tiny.parent.iterdir()) == before


@pytest.mark.parametrize(
  ("rest", "says"),
  [
    (("--plan", "--evaluate=last"), "--plan and --evaluate must not be given"),
    (("--export=last",), "--export must read STEP:FOLDER"),
    (("--evaluate=3",), "must be the folder of a run"),
  ],
)
def test_doors_that_cannot_open_are_refused(
  door, tiny, tmp_path, capsys, rest, says
):
  with pytest.raises(SystemExit) as caught:
    door(tiny, tmp_path / "new", *rest)
  assert caught.value.code == 2
  assert says in capsys.readouterr().err


def test_out_of_memory_ends_in_a_sentence(door, tmp_path, capsys):
  # A matrix of 64 terabytes.
  wide = vary(RUN, model={"mlp_width": 10**12}, supervised={"steps": 0})
  with pytest.raises(SystemExit) as caught:
    door(as_file(wide, tmp_path / "wide.py"), tmp_path / "run")
  assert caught.value.code == 1
  told = capsys.readouterr().err.splitlines()[-1]
  assert told.startswith("error: a device is out of memory")
  assert "batch.micro_batch (8)" in told


def test_a_finished_run_is_evaluated_and_exported(
  door, finished, tmp_path, capsys
):
  _, workdir = finished
  config = workdir.parent / "tiny.py"
  changes = "--set=run.steps=12", "--set=evaluation.every=1"
  door(config, workdir, *changes, "--evaluate=last")
  told = capsys.readouterr().out.splitlines()[-1]
  rate = float(curve(workdir)[-1]["pass_rate"])
  assert told.startswith(f"chain_arithmetic, step_12: mean@4 {rate:.4f}")
  door(config, workdir, *changes, f"--export=12:{tmp_path / 'out'}")
  assert f"is in {tmp_path / 'out'}" in capsys.readouterr().out
  assert (tmp_path / "out/model.safetensors").is_file()


def test_a_run_without_a_workdir_is_refused(door, tiny, capsys):
  with pytest.raises(SystemExit) as caught:
    door(tiny, "")
  assert caught.value.code == 2
  assert "--workdir must name the folder" in capsys.readouterr().err


def test_progress_is_told_while_it_runs(finished):
  done, _ = finished
  lines = [x for x in done.stdout.splitlines() if x.startswith("ScaleRL ")]
  assert lines[-1].startswith("ScaleRL 12/12 | pass rate ")
  for word in ("tokens/s", "staleness", "done"):
    assert word in lines[-1]
  assert "\x1b" not in done.stdout  # no terminal, no escapes
  assert "Traceback" not in done.stderr


def test_a_workdir_holds_all_that_was_promised(finished):
  _, workdir = finished
  files = {path.name for path in workdir.iterdir() if path.is_file()}
  folders = {path.name for path in workdir.iterdir() if path.is_dir()}
  assert files >= {
    "config.json",
    "metrics.jsonl",
    "curve.csv",
    "evaluations.npz",
    "journal.jsonl",
    "report.html",
    "curve.png",
    "tokenizer.model",
  }
  assert folders >= {"events", "checkpoints"}
  assert len(metrics(workdir)) == 12
  assert len(curve(workdir)) == 13
  assert list((workdir / "events").glob("events.out.tfevents.*"))
  assert not list(workdir.glob("*.partial"))
  held = json.loads((workdir / "config.json").read_text())
  assert config_lib.from_dict(held["config"]) == RUN
  said = held["provenance"]
  assert said["versions"]["jax"] == jax.__version__
  assert said["commit"]
  assert said["visible_cores"] == host.visible_cores()
  assert "--xla_force_host_platform_device_count=8" in said["xla_flags"]


def test_the_same_command_again_changes_nothing(finished, door, tiny, capsys):
  done, workdir = finished
  names = ("metrics.jsonl", "curve.csv", "evaluations.npz", "journal.jsonl")
  before = {name: (workdir / name).read_bytes() for name in names}
  door(tiny, workdir)  # returns: exit 0
  told = capsys.readouterr()
  assert told.out.splitlines()[-3:] == done.stdout.splitlines()[-3:]
  assert "ScaleRL 1/" not in told.out
  assert {name: (workdir / name).read_bytes() for name in names} == before


def test_another_config_is_refused_at_the_door(finished, door, tiny, capsys):
  _, workdir = finished
  text = _refused(door, capsys, tiny, workdir, "--set=run.seed=3")
  assert "run.seed" in text


def _refused(door, capsys, *arguments):
  """The sentence of a command that exits with 2."""
  with pytest.raises(SystemExit) as caught:
    door(*arguments)
  assert caught.value.code == 2
  told = capsys.readouterr()
  assert told.out == ""
  (line,) = told.err.splitlines()
  assert line.startswith("error: ")
  return line


@pytest.mark.parametrize(
  ("change", "says"),
  [
    ("run.stepz=3", "the fields of 'run' are seed, steps"),
    ("rum.steps=3", "the sections are run, task"),
    ("run.steps=three", "run.steps must be of type int, got 'three'"),
    ("run.steps", "--set must read section.field=value"),
    ("batch.micro_batch=5", "a divisor of the 16 completions"),
    ("sampler.slots=3", "at least batch.group_size (4)"),
    ("sampler.max_prompt_tokens=4", "longer than this budget"),
    ("pipeline.generator_devices=8", "must leave a device"),
    ("task.train_prompts=99999", "different chains"),
    ("task.path=x.jsonl", "task.path must be"),
  ],
)
def test_bad_input_is_one_sentence_and_leaves_no_workdir(
  door, tiny, tmp_path, capsys, change, says
):
  workdir = tmp_path / "run"
  line = _refused(door, capsys, tiny, workdir, f"--set={change}")
  assert says in line
  assert not workdir.exists()


@pytest.mark.parametrize(
  ("text", "says"),
  [
    (None, "missing.jsonl"),
    ("", "at least one line"),
    ('{"prompt": "a", "answer": "b"}\n{"prompt": 3}\n', "line 2"),
    ('{"prompt": "a", "answer": "b"}\nwords\n', "line 2"),
    (
      "".join(
        json.dumps({"prompt": f"{'long ' * 9}{n}", "answer": "b"}) + "\n"
        for n in range(40)
      ),
      "sampler.max_prompt_tokens",
    ),
  ],
)
def test_a_bad_file_of_prompts_is_one_sentence_and_leaves_no_workdir(
  door, tiny, tmp_path, capsys, text, says
):
  path = tmp_path / ("missing.jsonl" if text is None else "prompts.jsonl")
  if text is not None:
    path.write_text(text)
  workdir = tmp_path / "run"
  line = _refused(
    door,
    capsys,
    tiny,
    workdir,
    "--set=task.name=jsonl",
    f"--set=task.path={path}",
  )
  assert says in line
  assert not workdir.exists()


@pytest.mark.parametrize(
  ("body", "says"),
  [
    ("x = 3\n", "must define get_config()"),
    ("def get_config():\n  return None\n", "got NoneType"),
    (
      "from scalerl_jax.config import RunConfig\n"
      "def get_config():\n  return RunConfig(steps=0)\n",
      "run.steps must be above 0",
    ),
  ],
)
def test_a_bad_config_file_is_one_sentence_and_leaves_no_workdir(
  door, tmp_path, capsys, body, says
):
  path = tmp_path / "bad.py"
  path.write_text(body)
  assert says in _refused(door, capsys, path, tmp_path / "run")
  assert not (tmp_path / "run").exists()


def test_an_error_inside_a_config_file_is_shown_where_it_is(door, tmp_path):
  # A config file is code: its author needs the line, not a sentence of ours.
  path = tmp_path / "broken.py"
  path.write_text("def get_config():\n  return 1 / 0\n")
  with pytest.raises(ZeroDivisionError):
    door(path, tmp_path / "run")
  assert not (tmp_path / "run").exists()


def test_an_argument_too_many_is_a_usage_error(door, tiny, tmp_path):
  with pytest.raises(app.UsageError, match="'more'"):
    door(tiny, tmp_path / "run", "more")
  assert not (tmp_path / "run").exists()


def test_a_run_that_diverges_is_one_sentence(door, tiny, tmp_path, capsys):
  workdir = tmp_path / "run"
  with pytest.raises(SystemExit) as caught:
    door(tiny, workdir, "--set=optimizer.learning_rate=1e38")
  assert caught.value.code == 1
  line = capsys.readouterr().err.splitlines()[-1]
  assert line.startswith("error: step ")
  (batch,) = workdir.glob("nonfinite_step_*.npz")
  assert str(batch) in line
  assert (workdir / "report.html").exists()


def test_the_door_starts_no_jax_before_the_cpu_is_set_up():
  # Too late, the settings of a CPU do nothing.
  code = (
    "import sys, scalerl_jax.main, scalerl_jax.flags;"
    "sys.exit('jax' in sys.modules)"
  )
  done = subprocess.run([sys.executable, "-c", code], env={**os.environ})
  assert done.returncode == 0
