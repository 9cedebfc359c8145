import signal
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from scalerl_jax.run import metrics
from scalerl_jax.run.metrics import AXES, MetricsWriter
from scalerl_jax.scaling import curves

PROMPTS = {"chain": 5, "hard, chain": 3}


def axes(step):
  return {name: step * (number + 1.5) for number, name in enumerate(AXES)} | {
    "trained_tokens": 100 * step,
    "generated_tokens": 110 * step,
  }


def evaluate(writer, step, task="chain", seed=0):
  rng = np.random.default_rng([step, seed, len(task)])
  prompts = PROMPTS[task]
  samples = np.full(prompts, 4)
  return writer.evaluation(
    step,
    task,
    axes(step),
    rng.integers(0, 5, prompts),
    samples,
    rng.uniform(1, 9, prompts).astype(np.float32),
    rng.integers(0, 2, prompts),
  )


def train(folder, steps, *, resume_step=None):
  """Steps and evaluations, as a run writes them."""
  writer = MetricsWriter(folder, resume_step=resume_step)
  if resume_step is None:
    evaluate(writer, 0)
  for step in range((resume_step or 0) + 1, steps + 1):
    if step % 2 == 0:
      for task in PROMPTS:
        evaluate(writer, step, task)
    writer.step(step, {"loss": step / 3, "staleness": [step, 1]})
  writer.close()


def files(folder):
  """What resuming must give back, bit for bit."""
  texts = [
    (folder / name).read_text() for name in (metrics.METRICS, metrics.CURVE)
  ]
  arrays = {
    f"{task}/{name}": array.tolist()
    for task, fields in metrics.read_evaluations(folder).items()
    for name, array in fields.items()
  }
  return *texts, arrays


def scalars(folder):
  """(tag, step, value) of all events of a folder, and its purge steps."""
  found, purged = [], []
  for path in sorted((folder / metrics.EVENTS).iterdir()):
    data = path.read_bytes()
    while data:
      size = int.from_bytes(data[:8], "little")
      event = event_pb2.Event.FromString(data[12 : 12 + size])
      data = data[12 + size + 4 :]
      if event.HasField("session_log"):
        purged.append(event.step)
      found += [
        (value.tag, event.step, value.simple_value)
        for value in event.summary.value
      ]
  return found, purged


def test_lines_read_back_as_they_were(tmp_path):
  writer = MetricsWriter(tmp_path, resume_step=None)
  values = {
    "third": 1 / 3,
    "float32": np.float32(0.1),
    "float64": np.float64(0.1),
    "bfloat16": jnp.bfloat16(0.5),
    "jax": jnp.float32(0.3),
    "count": np.int64(7),
    "flag": np.bool_(True),
    "list": [np.float32(0.2), float("inf")],
    "array": np.array([1.5, np.nan]),
    "nan": float("nan"),
    "nan32": np.float32("nan"),
    "none": None,
    "text": "é",
  }
  writer.step(3, values)
  writer.close()
  (line,) = metrics.read_metrics(tmp_path)
  assert line == {
    "step": 3,
    "third": 1 / 3,
    "float32": 0.1,
    "float64": 0.1,
    "bfloat16": 0.5,
    "jax": 0.3,
    "count": 7,
    "flag": True,
    "list": [0.2, None],
    "array": [1.5, None],
    "nan": None,
    "nan32": None,
    "none": None,
    "text": "é",
  }
  text = (tmp_path / metrics.METRICS).read_text()
  assert "NaN" not in text
  assert "Infinity" not in text


def test_curve_has_the_columns_of_the_contract(tmp_path):
  writer = MetricsWriter(tmp_path, resume_step=None)
  rate = writer.evaluation(
    10, "chain", axes(10), [1, 0, 4], [4, 4, 4], [3.0, 4.0, 5.0], [0, 1, 0]
  )
  writer.close()
  head, row = (tmp_path / metrics.CURVE).read_text().splitlines()
  assert head == (
    "step,task,trained_tokens,generated_tokens,flops_full,flops_spent,"
    "device_seconds,wall_seconds,pass_rate,prompts,samples_per_prompt"
  )
  assert rate == 5 / 12
  assert row == f"10,chain,1000,1100,35.0,45.0,55.0,65.0,{5 / 12},3,4"


def test_curve_gives_what_was_written_so_far(tmp_path):
  writer = MetricsWriter(tmp_path, resume_step=None)
  assert len(writer.curve("chain")["step"]) == 0
  rates = [evaluate(writer, step) for step in (0, 10)]
  evaluate(writer, 10, "hard, chain")
  curve = writer.curve("chain")
  writer.close()
  assert curve["step"].tolist() == [0, 10]
  assert curve["trained_tokens"].tolist() == [0, 1000]
  assert curve["pass_rate"].tolist() == rates
  read = metrics.read_curves(tmp_path)
  assert list(read) == ["chain", "hard, chain"]
  for name, column in curve.items():
    assert column.dtype == read["chain"][name].dtype
    np.testing.assert_array_equal(column, read["chain"][name])


def test_curve_is_read_by_the_door_for_curves(tmp_path):
  train(tmp_path, 24)
  read = curves.read_curve(
    tmp_path, compute_column="flops_spent", series="chain"
  )
  ours = metrics.read_curves(tmp_path)["chain"]
  np.testing.assert_array_equal(read.compute, ours["flops_spent"])
  np.testing.assert_array_equal(read.pass_rate, ours["pass_rate"])
  assert set(read.trials) == {5 * 4}


def test_evaluations_hold_every_prompt_of_every_set(tmp_path):
  train(tmp_path, 5)
  sets = metrics.read_evaluations(tmp_path)
  assert sets["chain"]["step"].tolist() == [0, 2, 4]
  assert sets["hard, chain"]["step"].tolist() == [2, 4]
  for task, evaluations in (("chain", 3), ("hard, chain", 2)):
    for name in metrics.EVALUATION_FIELDS:
      assert sets[task][name].shape == (evaluations, PROMPTS[task])
    share = sets[task]["correct"].sum(1) / sets[task]["samples"].sum(1)
    written = metrics.read_curves(tmp_path)[task]["pass_rate"]
    np.testing.assert_array_equal(share, written)


@pytest.mark.parametrize("resume_step", [0, 3, 4, 9])
def test_resumed_is_uninterrupted(tmp_path, resume_step):
  whole, broken = tmp_path / "whole", tmp_path / "broken"
  train(whole, 9)
  train(broken, 7 if resume_step < 7 else 9)
  train(broken, 9, resume_step=resume_step)
  assert files(broken) == files(whole)


def test_half_written_last_lines_are_cut_off(tmp_path):
  whole, broken = tmp_path / "whole", tmp_path / "broken"
  train(whole, 6)
  train(broken, 6)
  # A kill in the middle of a line: the rest of it is a whole line by chance.
  for name in (metrics.METRICS, metrics.CURVE):
    with (broken / name).open("rb+") as file:
      file.seek(-1, 2)
      file.truncate()
  assert len(metrics.read_metrics(broken)) == 5
  with (broken / metrics.METRICS).open("a") as file:
    file.write('{"step": ')
  train(broken, 6, resume_step=5)
  assert files(broken) == files(whole)


def test_a_fresh_run_never_appends(tmp_path):
  old, new = tmp_path / "old", tmp_path / "new"
  train(old, 6)
  before = files(old)
  writer = MetricsWriter(old, resume_step=None)
  writer.close()
  assert sorted(writer.set_aside) == [
    "curve.csv",
    "evaluations.npz",
    "events",
    "metrics.jsonl",
  ]
  assert metrics.read_metrics(old) == []
  train(old, 4)  # finds files that were set aside before
  train(new, 4)
  assert files(old) == files(new)
  assert files(old) != before


def test_files_set_aside_are_kept(tmp_path):
  train(tmp_path, 6)
  text = (tmp_path / metrics.METRICS).read_text()
  MetricsWriter(tmp_path, resume_step=None).close()
  assert (tmp_path / "metrics.jsonl.old").read_text() == text


def test_what_is_written_survives_a_kill(tmp_path):
  code = (
    "import os, signal, sys\n"
    "from scalerl_jax.run.metrics import AXES, MetricsWriter\n"
    "writer = MetricsWriter(sys.argv[1], resume_step=None)\n"
    "for step in range(3):\n"
    "  writer.step(step, {'loss': 0.5})\n"
    "  writer.evaluation(step, 'chain', dict.fromkeys(AXES, step), [1], [2],"
    " [3.0], [0])\n"
    "os.kill(os.getpid(), signal.SIGKILL)\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", code, str(tmp_path)],
    stdin=subprocess.DEVNULL,
    check=False,
  )
  assert done.returncode == -signal.SIGKILL
  assert [line["step"] for line in metrics.read_metrics(tmp_path)] == [0, 1, 2]
  assert metrics.read_curves(tmp_path)["chain"]["step"].tolist() == [0, 1, 2]
  evaluations = metrics.read_evaluations(tmp_path)["chain"]
  assert evaluations["step"].tolist() == [0, 1, 2]


def test_two_runs_differ_in_time_only(tmp_path):
  lines = []
  for number, name in enumerate(("one", "two")):
    writer = MetricsWriter(tmp_path / name, resume_step=None)
    writer.step(1, {"loss": 0.25, "time/step_seconds": 0.1 * number})
    writer.close()
    (line,) = metrics.read_metrics(tmp_path / name)
    lines.append({k: v for k, v in line.items() if not k.startswith("time/")})
  assert lines[0] == lines[1] == {"step": 1, "loss": 0.25}


def test_events_hold_the_numbers(tmp_path):
  train(tmp_path, 3)
  found, purged = scalars(tmp_path)
  assert purged == []
  assert [(tag, step) for tag, step, _ in found if tag == "loss"] == [
    ("loss", step) for step in (1, 2, 3)
  ]
  rates = metrics.read_curves(tmp_path)["chain"]["pass_rate"]
  shown = [value for tag, _, value in found if tag == "pass_rate/chain"]
  np.testing.assert_allclose(shown, rates, rtol=1e-6)
  train(tmp_path, 3, resume_step=1)
  found, purged = scalars(tmp_path)
  assert purged == [2]  # TensorBoard hides steps from here on, of older files
  assert len([1 for tag, _, _ in found if tag == "loss"]) == 5


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"axes": {"step": 1}}, "axes must be exactly trained_tokens"),
    ({"correct": [1, 2]}, r"one number for each of its 5 prompts"),
    ({"samples": [0] * 5, "correct": [0] * 5}, "must have samples"),
    ({"step": 0}, "step 0 of 'chain' was evaluated already"),
  ],
)
def test_a_wrong_evaluation_is_refused_and_leaves_no_trace(
  tmp_path, change, words
):
  writer = MetricsWriter(tmp_path, resume_step=None)
  evaluate(writer, 0)
  before = files(tmp_path)
  right = {
    "step": 2,
    "task": "chain",
    "axes": axes(2),
    "correct": [1] * 5,
    "samples": [4] * 5,
    "mean_length": [2.0] * 5,
    "truncated": [0] * 5,
  }
  with pytest.raises(ValueError, match=words):
    writer.evaluation(**(right | change))
  assert files(tmp_path) == before
  writer.evaluation(**right)
  writer.close()
  curve = metrics.read_curves(tmp_path)["chain"]
  assert curve["step"].tolist() == [0, 2]


@pytest.mark.parametrize(
  ("name", "text", "words"),
  [
    ("metrics.jsonl", '{"step": 1}\nloss 3\n', "metrics.jsonl, line 2"),
    ("metrics.jsonl", '{"loss": 1}\n', "metrics.jsonl, line 1"),
    ("curve.csv", "compute,pass_rate\n1,2\n", "curve.csv, line 1"),
  ],
)
def test_files_of_others_are_refused(tmp_path, name, text, words):
  (tmp_path / name).write_text(text)
  with pytest.raises(ValueError, match=words):
    MetricsWriter(tmp_path, resume_step=1)
  assert (tmp_path / name).read_text() == text


def test_an_empty_folder_holds_nothing(tmp_path):
  assert metrics.read_metrics(tmp_path) == []
  assert metrics.read_curves(tmp_path) == {}
  assert metrics.read_evaluations(tmp_path) == {}
