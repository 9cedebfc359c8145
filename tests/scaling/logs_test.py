"""What training programs leave behind, in the shapes in which they do."""

import json

import numpy as np
import pytest
import tensorboardX

from scalerl_jax.scaling import curves, logs, tables

ROWS = [(10 * i, round(0.1 + 0.05 * i, 2)) for i in range(9)]
HALF = [(x, y / 2) for x, y in ROWS]


def _read(path, text=None, **asked):
  if text is not None:
    path.write_text(text)
  return curves.read_curves(path, **asked)


def _assert_rows(curve, rows=ROWS):
  x, y = zip(*rows, strict=True)
  np.testing.assert_allclose(curve.compute, x)
  np.testing.assert_allclose(curve.pass_rate, y, rtol=1e-6)


def _events(folder, rows=ROWS, tag="eval/pass_rate", **others):
  with tensorboardX.SummaryWriter(str(folder)) as writer:
    for step, value in rows:
      writer.add_scalar(tag, value, step, walltime=1000.0 + 2 * step)
      for name, of_step in others.items():
        writer.add_scalar(name, of_step(step), step)


def _exported(runs, metric="eval/pass_rate"):
  """A chart of Weights & Biases as its "Export as CSV" writes it."""
  columns = [
    f"{run} - {metric}{end}" for run in runs for end in ("", "__MIN", "__MAX")
  ]
  lines = [",".join(f'"{c}"' for c in ("Step", *columns))]
  for i, (run, rows) in enumerate(runs.items()):
    for x, y in rows:
      cells = [""] * len(columns)
      cells[3 * i : 3 * i + 3] = [str(y), str(y - 0.01), str(y + 0.01)]
      lines.append(",".join(f'"{c}"' for c in (x, *cells)))
    assert run in columns[3 * i]
  return "\n".join(lines) + "\n"


def test_a_weights_and_biases_export_is_a_curve_a_run(tmp_path):
  text = _exported({"ours": ROWS, "lr - 2": HALF})
  found = _read(tmp_path / "chart.csv", text)
  assert [curve.name for curve in found] == ["ours", "lr - 2"]
  _assert_rows(found[0])
  _assert_rows(found[1], HALF)
  assert found[0].notes[0] == (
    "compute is column Step, pass rate is column eval/pass_rate"
  )
  assert "2 runs of a Weights & Biases export" in found[0].notes
  # Steps of the other run are no rows of this one.
  assert not any("left out" in note for note in found[0].notes)
  with pytest.raises(
    curves.CurveError, match="the columns are Step, loss, run"
  ):
    _read(tmp_path / "loss.csv", _exported({"ours": ROWS}, "loss"))
  found = _read(
    tmp_path / "mine.csv",
    _exported({"ours": ROWS}, "my"),
    pass_rate_column="my",
  )
  _assert_rows(found[0])


def test_event_files_are_read_from_file_or_folder(tmp_path):
  _events(tmp_path)
  (file,) = tmp_path.glob("*tfevents*")
  for path in (file, tmp_path):
    (curve,) = _read(path)
    _assert_rows(curve)
    assert curve.compute_column == "step"
    assert curve.pass_rate_column == "eval/pass_rate"
  (curve,) = _read(tmp_path, compute_column="wall_seconds")
  _assert_rows(curve, [(2 * x, y) for x, y in ROWS])


def test_event_folders_are_runs_and_totals_are_compute(tmp_path):
  _events(tmp_path / "a", tokens=lambda step: 100 * step, loss=lambda _: 3.0)
  _events(tmp_path / "b" / "c", HALF, tokens=lambda step: 200 * step)
  found = _read(tmp_path)
  assert [curve.name for curve in found] == ["a", "b/c"]
  _assert_rows(found[0], [(100 * x, y) for x, y in ROWS])
  _assert_rows(found[1], [(200 * x, y) for x, y in HALF])


def test_a_step_that_was_logged_twice_is_two_evaluations(tmp_path):
  _events(tmp_path, [*ROWS, (80, 0.6)])
  (curve,) = _read(tmp_path)
  _assert_rows(curve, [*ROWS, (80, 0.6)])


def test_event_files_without_use_are_refused(tmp_path):
  _events(tmp_path / "loss", tag="loss")
  with pytest.raises(
    curves.CurveError, match="the columns are run, step, wall"
  ):
    _read(tmp_path / "loss")
  (tmp_path / "empty").mkdir()
  (tmp_path / "empty" / "events.out.tfevents.1.host").touch()
  with pytest.raises(curves.CurveError, match="the TensorBoard events hold no"):
    _read(tmp_path / "empty")
  broken = tmp_path / "events.out.tfevents.2.host"
  broken.write_bytes(b"no event file, but longer than twelve bytes")
  with pytest.raises(
    curves.CurveError, match=r"event file \(the record at byte 0"
  ):
    _read(broken)


@pytest.mark.parametrize(
  ("metric", "columns"),
  [
    ("val-core/openai/gsm8k/acc/mean@1", {}),
    ("val-core/math/acc/mean@16", {"val-core/math/acc/best@16/mean": 0.9}),
    ("val-core/math/acc/mean@16", {"val-aux/math/reward/mean@16": 0.3}),
    ("val/test_score/openai/gsm8k", {}),
    ("val-core/math/reward/mean@4", {"val-core/math/reward/mean@2": 0.9}),
  ],
)
def test_verl_logs_give_the_held_out_mean(tmp_path, metric, columns):
  train = {
    "critic/score/mean": 0.4,
    "perf/total_num_tokens": 5000,
    "training/global_step": 1,
  }
  records = []
  for x, y in ROWS:
    records += [
      {"step": x, "data": {**train, metric: y, **columns}},
      {"step": x + 5, "data": train},
    ]
  (curve,) = _read(tmp_path / "verl.jsonl", "\n".join(map(json.dumps, records)))
  _assert_rows(curve)
  assert curve.pass_rate_column == metric
  assert curve.compute_column == "step"


def test_verl_console_logs_are_read_among_other_lines(tmp_path):
  lines = ["WARNING: something", "step: none"]
  for x, y in ROWS:
    lines += [
      f"(TaskRunner pid=7) step:{x} - actor/entropy:0.3 - "
      f"val-core/gsm8k/acc/mean@1:np.float64({y}) - critic/score/mean:0.4",
      f"(TaskRunner pid=7) step:{x + 5} - actor/entropy:0.3",
    ]
  (curve,) = _read(tmp_path / "console.log", "\n".join(lines))
  _assert_rows(curve)
  assert "18 lines of metrics found in a console's log" in curve.notes
  assert any("lines 4, 6, 8" in note for note in curve.notes)


def _trainer_state():
  """log_history of transformers' Trainer, as TRL's GRPOTrainer fills it."""
  history = []
  for x, y in ROWS:
    history += [
      {
        "step": x,
        "epoch": x / 80,
        "reward": 0.4,
        "rewards/accuracy_reward/mean": 0.3,
        "num_tokens": 1000.0 * x,
      },
      {"step": x, "epoch": x / 80, "eval_reward": y, "eval_runtime": 3.1},
    ]
  return json.dumps(
    {"best_metric": None, "global_step": 80, "log_history": history}
  )


def test_trainer_states_give_evaluations_against_tokens(tmp_path):
  for step in (20, 100):
    (tmp_path / f"checkpoint-{step}").mkdir()
  (tmp_path / "checkpoint-20" / logs.STATE).write_text('{"log_history": []}')
  (tmp_path / "checkpoint-100" / logs.STATE).write_text(_trainer_state())
  for path in (tmp_path, tmp_path / "checkpoint-100"):
    (curve,) = _read(path)
    _assert_rows(curve, [(1000 * x, y) for x, y in ROWS])
    assert curve.compute_column == "num_tokens"
    assert curve.pass_rate_column == "eval_reward"


def test_prime_rl_logs_give_the_total_and_the_average(tmp_path):
  records = []
  for x, y in ROWS:
    records += [
      {
        "step": x,
        "progress/tokens": 900,
        "progress/total_tokens": 1000 * x,
        "reward/mean": 0.4,
      },
      {"step": x, "eval/aime2024/avg@16": y, "eval/aime2024/pass@8": 0.9},
    ]
  (curve,) = _read(tmp_path / "a.jsonl", "\n".join(map(json.dumps, records)))
  _assert_rows(curve, [(1000 * x, y) for x, y in ROWS])
  assert curve.pass_rate_column == "eval/aime2024/avg@16"


def test_held_out_sets_of_one_run_are_tasks(tmp_path):
  records = [
    {"step": x, "eval/aime/pass_rate": y, "eval/math/pass_rate": y / 2}
    for x, y in ROWS
  ]
  found = _read(tmp_path / "a.jsonl", "\n".join(map(json.dumps, records)))
  assert [(c.name, c.task) for c in found] == [
    ("aime", "aime"),
    ("math", "math"),
  ]


def test_records_of_one_step_are_joined_only_if_they_complement(tmp_path):
  records = [
    {"step": 1, "acc": 0.1},
    {"step": 1, "acc": 0.1},
    {"step": 1, "t": 2},
  ]
  path = tmp_path / "a.jsonl"
  path.write_text("\n".join(map(json.dumps, records)))
  rows = [dict(row.cells) for row in logs.read_table(path).rows]
  assert rows == [{"step": 1, "acc": 0.1}, {"step": 1, "acc": 0.1, "t": 2}]


def _workdir(folder, tasks=("chain",)):
  header = "step,task,flops_full,pass_rate,prompts,samples_per_prompt"
  lines = [f"{x},{task},{1e9 * x},{y},7,4" for x, y in ROWS for task in tasks]
  (folder / logs.CURVE).write_text("\n".join([header, *lines]) + "\n")


def test_our_workdirs_are_read_with_their_samples(tmp_path):
  _workdir(tmp_path)
  (curve,) = _read(tmp_path)
  _assert_rows(curve, [(1e9 * x, y) for x, y in ROWS])
  np.testing.assert_array_equal(curve.trials, [28.0] * 9)
  samples = np.arange(9 * 7).reshape(9, 7) + 2
  correct = samples // 2
  np.savez(
    tmp_path / logs.EVALUATIONS,
    **{
      "chain/step": np.array([x for x, _ in ROWS]),
      "chain/correct": correct,
      "chain/samples": samples,
    },
  )
  (curve,) = _read(tmp_path)
  np.testing.assert_array_equal(curve.trials, samples.sum(1))
  np.testing.assert_array_equal(curve.counts[0], correct)
  np.testing.assert_array_equal(curve.counts[1], samples)
  assert set(curve.behind()) == {"counts"}
  assert curve.name == tmp_path.name


def test_tasks_of_a_workdir_are_curves_with_their_own_samples(tmp_path):
  _workdir(tmp_path, ("chain", "sort"))
  np.savez(
    tmp_path / logs.EVALUATIONS,
    **{
      "sort/step": np.array([x for x, _ in ROWS]),
      "sort/correct": np.zeros((9, 5)),
      "sort/samples": np.full((9, 5), 1),
    },
  )
  chain, sort = _read(tmp_path)
  assert (chain.task, sort.task) == ("chain", "sort")
  np.testing.assert_array_equal(chain.trials, [28.0] * 9)
  np.testing.assert_array_equal(sort.trials, [5.0] * 9)
  # One sample of a prompt says nothing of its noise.
  assert sort.counts is None
  assert set(sort.behind()) == {"trials"}


@pytest.mark.parametrize(
  "broken", [b"", b"no zip", {"chain/step": np.arange(3)}, {"chain/step": 1}]
)
def test_broken_samples_are_refused(tmp_path, broken):
  _workdir(tmp_path)
  if isinstance(broken, bytes):
    (tmp_path / logs.EVALUATIONS).write_bytes(broken)
  else:
    np.savez(tmp_path / logs.EVALUATIONS, **broken)
  with pytest.raises(
    tables.CurveError, match=r"evaluations\.npz: cannot be read"
  ):
    _read(tmp_path)
