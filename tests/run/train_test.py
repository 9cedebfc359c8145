"""Whole runs: the same twice, stopped and resumed, refused, broken."""

import json
import pathlib
import signal

import jax
import numpy as np
import pytest

from scalerl_jax import config as config_lib
from scalerl_jax.run.train import Run, refill_limit
from tests.runs import (
  TINY,
  curve,
  evaluations,
  journal,
  metrics,
  send,
  shared_cache,
  vary,
)

STEPS = TINY.run.steps


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory):
  with shared_cache(tmp_path_factory) as folder:
    yield folder


def _train(folder, config=TINY, **arguments):
  run = Run(config, folder)
  return run, run.train(**arguments)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """The uninterrupted run; (run, its summary)."""
  return _train(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture(scope="module")
def sittings(tmp_path_factory):
  """The same run in three sittings; (run, summary, what was seen) of each.

  The first is stopped while the first rollouts are being written, before any
  update, the second after the third one.
  """
  folder = tmp_path_factory.mktemp("sittings") / "run"
  told = []
  for wrap in (
    send(signal.SIGINT),
    send(signal.SIGTERM, at=3),
    lambda inner: inner,
  ):
    run, summary = _train(folder, wrap_transport=wrap)
    left = {path.name for path in folder.iterdir()}
    saved = sorted(int(p.name) for p in (folder / "checkpoints").iterdir())
    told.append((run, summary, left, saved, len(metrics(folder))))
  return told


@pytest.fixture(scope="module")
def again(tmp_path_factory):
  """The same config a second time, evaluated and saved at other steps."""
  config = vary(TINY, evaluation={"every": 3}, checkpoint={"every": 1})
  return _train(tmp_path_factory.mktemp("again") / "run", config)


def _assert_same_state(one, other):
  one, other = (run.pipeline.state_dict() for run, *_ in (one, other))
  for state in (one, other):
    state["counters"].pop("train_seconds")
  assert jax.tree.structure(one) == jax.tree.structure(other)
  jax.tree.map(
    lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)),
    one,
    other,
  )


def test_a_run_makes_its_steps_and_says_how_it_went(whole):
  run, summary = whole
  lines = metrics(run.workdir)
  assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
  rows = curve(run.workdir)
  assert [int(row["step"]) for row in rows] == [0, 2, 4, 6]
  assert summary.start == float(rows[0]["pass_rate"])
  assert summary.end == float(rows[-1]["pass_rate"])
  assert pathlib.Path(summary.report) == run.workdir / "report.html"
  # The tests below compare something: there were updates, off policy.
  assert sum(line["effective_batch"] for line in lines) > 0
  assert any(line["staleness_mean"] > 0 for line in lines)
  assert lines[-1]["trained_tokens"] == lines[-1]["generated_tokens"]


def test_every_update_moves_the_weights(whole):
  run, _ = whole
  saved = run.workdir / "checkpoints"
  assert sorted(int(path.name) for path in saved.iterdir()) == [4, 6]
  assert int(np.asarray(run.learner.state.step)) == STEPS
  assert run.pipeline.ledger.version == STEPS


def test_metrics_agree_with_each_other(whole):
  run, _ = whole
  lines = metrics(run.workdir, without=())
  before = 0
  for line in lines:
    assert line["trained_tokens"] == before + line["batch_tokens"]
    before = line["trained_tokens"]
    assert len(line["staleness"]) == TINY.pipeline.max_staleness + 1
    assert sum(line["staleness"]) == TINY.batch.prompts
    assert line["staleness"][line["staleness_max"]] > 0
    assert (
      line["effective_batch"] == TINY.batch.group_size * line["mixed_groups"]
    )
    assert line["useful_token_fraction"] == (
      line["kept_tokens"] / line["batch_tokens"]
    )
    for name in ("sampler_occupancy", "truncated", "time/learner_idle_share"):
      assert 0.0 <= line[name] <= 1.0
  held = run.meshes.devices * run.pipeline.totals.train_seconds
  assert 0.0 < lines[-1]["time/device_seconds"] <= held


def test_the_timeline_and_the_shares_of_the_machine_are_written(whole):
  run, _ = whole
  events = json.loads((run.workdir / "trace.json").read_text())
  updates = [event for event in events if event["name"] == "update"]
  assert [event["args"]["step"] for event in updates] == [*range(1, STEPS + 1)]
  lines = metrics(run.workdir, without=())
  for name in ("learner_mfu", "sampler_mfu", "sampler_bandwidth_share"):
    told = [line[f"time/{name}"] for line in lines if f"time/{name}" in line]
    assert told
    assert all(0.0 <= share <= 1.0 for share in told)


def test_the_logical_schedule_gives_the_same_run_twice(whole, again):
  wanted = metrics(whole[0].workdir, without=("time/", "forecast/"))
  assert metrics(again[0].workdir, without=("time/", "forecast/")) == wanted
  assert journal(again[0].workdir) == journal(whole[0].workdir)
  _assert_same_state(whole, again)


def test_evaluating_and_saving_change_nothing(whole, again):
  # `again` evaluates at steps 0, 3, 6 and saves at each step.
  shared = {int(row["step"]): row for row in curve(whole[0].workdir)}
  rows = {int(row["step"]): row for row in curve(again[0].workdir)}
  assert set(rows) == {0, 3, 6}
  for step in (0, 6):
    assert rows[step] == shared[step]


def test_a_clean_stop_leaves_a_curve_a_report_and_a_state(sittings):
  for (_, summary, left, saved, lines), version in zip(
    sittings, (0, 3, STEPS), strict=True
  ):
    assert left >= {"curve.csv", "curve.png", "report.html", "metrics.jsonl"}
    assert saved[-1] == version
    assert lines == version
    assert summary.evaluations == 1 + version // 2
    assert pathlib.Path(summary.report).stat().st_size > 1000


def test_a_stopped_run_gives_the_signals_back(sittings):
  assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
  assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_stopped_and_resumed_is_uninterrupted(whole, sittings):
  folder, resumed = whole[0].workdir, sittings[-1][0].workdir
  assert metrics(resumed) == metrics(folder)
  assert curve(resumed) == curve(folder)
  assert evaluations(resumed) == evaluations(folder)
  samples = "samples.json"
  assert (resumed / samples).read_text() == (folder / samples).read_text()
  _assert_same_state(whole, sittings[-1])


def test_a_resumed_journal_tells_the_same_schedule(whole, sittings):
  resumed, wanted = (
    journal(run.workdir) for run in (sittings[-1][0], whole[0])
  )
  assert resumed == wanted


def test_clocks_go_on_over_sittings(sittings):
  rows = curve(sittings[-1][0].workdir, without=())
  for name in ("device_seconds", "wall_seconds"):
    seconds = [float(row[name]) for row in rows]
    assert seconds == sorted(seconds)
    assert seconds[-1] > 0


def test_a_workdir_of_another_config_is_refused_before_work(whole):
  run, _ = whole
  before = {p: p.stat().st_mtime_ns for p in run.workdir.rglob("*")}
  with pytest.raises(ValueError, match=r"differs in run\.seed\)"):
    Run(vary(TINY, run={"seed": 5}), run.workdir)
  assert {p: p.stat().st_mtime_ns for p in run.workdir.rglob("*")} == before


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"task": {"train_prompts": 9999}}, "task.train_prompts"),
    ({"pipeline": {"generator_devices": 8}}, "pipeline.generator_devices"),
    (
      {"pipeline": {"tensor": 2}, "model": {"num_heads": 3}},
      "pipeline.tensor",
    ),
    (
      {"task": {"name": "jsonl", "path": "missing.jsonl"}},
      "missing.jsonl",
    ),
  ],
)
def test_what_cannot_work_is_refused_before_a_workdir_is_made(
  tmp_path, changes, says
):
  with pytest.raises(ValueError, match=r".") as caught:
    Run(vary(TINY, **changes), tmp_path / "run")
  assert says in str(caught.value)
  assert "\n" not in str(caught.value)
  assert not (tmp_path / "run").exists()


def test_a_refused_config_can_be_mended_in_the_same_workdir(tmp_path):
  path = tmp_path / "prompts.jsonl"
  path.write_text("not JSON\n")
  config = vary(TINY, task={"name": "jsonl", "path": str(path)})
  with pytest.raises(ValueError, match="line 1"):
    Run(config, tmp_path / "run")
  mended = vary(TINY, run={"seed": 3})
  assert Run(mended, tmp_path / "run").config == mended


def test_the_config_of_a_workdir_makes_the_run_again(whole):
  held = json.loads((whole[0].workdir / "config.json").read_text())
  assert config_lib.from_dict(held["config"]) == TINY


class _Poison:
  """A transport that spoils the log-probs of groups from the third batch on."""

  def __init__(self, inner):
    self.inner, self.got = inner, 0
    self.publish, self.fetch, self.put = inner.publish, inner.fetch, inner.put

  def get(self):
    scored = self.inner.get()
    if scored is not None:
      self.got += 1
      if self.got > 2 * TINY.batch.prompts:
        scored.rollout.behavior_logps[:, 0] = np.nan
    return scored


def test_an_update_that_is_not_finite_ends_the_run(tmp_path):
  folder = tmp_path / "run"
  with pytest.raises(FloatingPointError) as caught:
    _train(folder, wrap_transport=_Poison)
  text = str(caught.value)
  assert "\n" not in text
  (path,) = folder.glob("nonfinite_step_*.npz")
  assert str(path) in text
  step = int(path.stem.rpartition("_")[2])
  assert f"step {step} has loss nan" in text
  # Written as no step, skipped by nobody, and nothing published.
  lines = metrics(folder)
  assert [line["step"] for line in lines] == list(range(1, step))
  assert all(np.isfinite(line["loss"]) for line in lines)
  events = journal(folder)
  published = [e["version"] for e in events if e["event"] == "publish"]
  assert published == list(range(step))
  assert (folder / "report.html").exists()
  # The batch that did it, whole.
  (update,) = [
    e for e in events if e["event"] == "update" and e["step"] == step - 1
  ]
  uids = {e["group"]: e["uid"] for e in events if e["event"] == "admit"}
  shape = (TINY.batch.prompts, TINY.batch.group_size)
  tokens = (*shape, TINY.sampler.max_completion_tokens)
  with np.load(path) as batch:
    assert batch["uid"].tolist() == [uids[group] for group in update["groups"]]
    for name in ("correct", "length", "finish"):
      assert batch[name].shape == shape
    for name in ("tokens", "versions", "forced", "behavior_logps"):
      assert batch[name].shape == tokens
    assert np.isnan(batch["behavior_logps"]).any()


def test_a_phase_may_replace_as_much_as_its_batches():
  refill = vary(TINY, loss={"zero_variance": "refill", "refill_limit": 3})
  prompts = TINY.batch.prompts
  assert refill_limit(TINY) == 0
  assert refill_limit(refill) == 3 * prompts
  ppo = {"algorithm": "ppo_off_policy", "updates_per_phase": 5}
  assert refill_limit(vary(refill, pipeline=ppo)) == 3 * 5 * prompts


def test_changed_difficulties_are_noticed_where_they_give_the_order(tmp_path):
  path = tmp_path / "prompts.jsonl"

  def config(order, difficulty):
    rows = [
      {"prompt": f"say {n}", "answer": str(n), "difficulty": difficulty * n}
      for n in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return vary(
      TINY,
      task={"name": "jsonl", "path": str(path)},
      sampler={"max_prompt_tokens": 12},
      curriculum={"order": order},
    )

  for order in ("uniform", "easy_to_hard"):
    folder = tmp_path / order
    Run(config(order, 1.0), folder)
    Run(config(order, 1.0), folder)
    if order == "uniform":
      Run(config(order, -1.0), folder)
    else:
      with pytest.raises(ValueError, match="have changed since"):
        Run(config(order, -1.0), folder)


def test_a_run_with_nothing_left_to_gain_stops_and_is_saved(tmp_path, capfd):
  # The rest of this run cannot gain .95: it stops at the first fit.
  config = vary(
    TINY,
    run={"steps": 30, "early_stop_gain": 0.95},
    evaluation={"every": 1},
  )
  run, _ = _train(tmp_path / "run", config)
  step = run.pipeline.ledger.version
  assert 5 <= step < 10
  saved = [int(p.name) for p in (tmp_path / "run/checkpoints").iterdir()]
  assert max(saved) == step
  told = capfd.readouterr().out
  assert f"early stop at step {step}: with probability " in told
  assert "set run.early_stop_gain to 0" in told
