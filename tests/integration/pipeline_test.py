"""Whole pipelines of tiny real parts: bounded, replayed, resumed, complete."""

import collections
import dataclasses
import json

import jax
import numpy as np
import pytest

from scalerl_jax.pipeline.journal import Journal
from tests.helpers import weights
from tests.pipeline import parts
from tests.pipeline.parts import G, P
from tests.reference import transformer as reference

STEPS = 7
# Bound, and chunks between an update's start and its publication: weights
# change inside of completions in all but the first.
CASES = {"k0": (0, 2), "k1": (1, 2), "k3": (3, 1), "k3_slow": (3, 3)}


@dataclasses.dataclass
class Run:
  """A run that has ended."""

  k: int
  chunks_per_step: int
  pipeline: object
  recording: parts.Recording
  transport: parts.Recorder
  events: list
  params: object  # the final ones, on the host


def _run(folder, k, chunks_per_step, **options):
  path = folder / "journal.jsonl"
  journal = Journal(path)
  pipeline = parts.make_pipeline(
    k=k,
    chunks_per_step=chunks_per_step,
    steps=STEPS,
    journal=journal,
    **options,
  )
  recording = parts.finish(pipeline)
  journal.close()
  return Run(
    k,
    chunks_per_step,
    pipeline,
    recording,
    pipeline.transport,
    [json.loads(line) for line in path.read_text().splitlines()],
    parts.on_host(pipeline.learner.state.params),
  )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """One run of each case under the logical schedule."""
  return {
    name: _run(tmp_path_factory.mktemp(name), *case)
    for name, case in CASES.items()
  }


@pytest.fixture(params=CASES)
def run(request, runs):
  """Each of them in turn."""
  return runs[request.param]


@pytest.fixture(params=["wall_k0", "wall_k3"])
def wall(request, tmp_path):
  """A run under the wall schedule."""
  k = int(request.param[-1])
  return _run(tmp_path, k, 2, schedule="wall")


def _records(scored):
  """Groups by their number, as comparable trees."""
  return {
    each.index: {"correct": each.correct, **vars(each.rollout)}
    for each in scored
  }


def _devices(tree):
  return {device for x in jax.tree.leaves(tree) for device in x.devices()}


def _versions_of(rollout, row):
  return rollout.versions[row, : rollout.length[row]]


def _trained(recording):
  return [scored for batch in recording.batches for scored in batch]


# The same run again.


@pytest.mark.parametrize("name", ["k0", "k3"])
def test_the_same_run_again_is_the_same_bit_for_bit(name, runs, tmp_path):
  first, again = runs[name], _run(tmp_path, *CASES[name])
  assert again.recording.metrics == first.recording.metrics
  assert again.recording.totals == first.recording.totals
  assert again.events == first.events
  parts.same(_records(again.transport.scored), _records(first.transport.scored))
  parts.same(again.transport.host, first.transport.host)
  parts.same(again.params, first.params)


def test_the_learner_beside_or_on_the_samplers_device_is_the_same(
  runs, tmp_path
):
  beside = runs["k3"]
  shared = _run(tmp_path, *CASES["k3"], trainer=0)
  held = {
    run: {
      d
      for x in jax.tree.leaves(run.pipeline.learner.state.params)
      for d in x.devices()
    }
    for run in ()
  }
  del held
  assert shared.recording.metrics == beside.recording.metrics
  assert shared.events == beside.events
  parts.same(shared.params, beside.params)


# Staleness.


def _check_staleness(run):
  """Of every group that was trained on, counted anew from its tokens."""
  assert run.recording.steps == [*range(1, STEPS + 1)]
  for step, (metrics, batch) in enumerate(
    zip(run.recording.metrics, run.recording.batches, strict=True)
  ):
    oldest = [
      min(int(_versions_of(s.rollout, row).min()) for row in range(G))
      for s in batch
    ]
    staleness = np.array([step - version for version in oldest])
    assert (staleness >= 0).all()
    assert (staleness <= run.k).all()
    histogram = [int((staleness == age).sum()) for age in range(run.k + 1)]
    assert metrics["staleness"] == histogram
    assert sum(histogram) == P
    assert metrics["staleness_max"] == staleness.max()
    assert metrics["staleness_mean"] == pytest.approx(staleness.mean())
    newest = max(
      int(_versions_of(s.rollout, row).max()) for s in batch for row in range(G)
    )
    assert newest <= step


def test_staleness_is_that_of_the_oldest_token_and_never_above_k(run):
  _check_staleness(run)


def test_staleness_is_used(runs):
  for name, run in runs.items():
    most = max(metrics["staleness_max"] for metrics in run.recording.metrics)
    assert (most > 0) == (run.k > 0), name
  slow = runs["k3_slow"].recording.metrics
  assert max(metrics["staleness_max"] for metrics in slow) == 3


def test_bound_0_is_on_policy_and_synchronous(runs):
  run = runs["k0"]
  for step, (metrics, batch) in enumerate(
    zip(run.recording.metrics, run.recording.batches, strict=True)
  ):
    for scored in batch:
      for row in range(G):
        assert set(_versions_of(scored.rollout, row).tolist()) == {step}
    assert metrics["several_versions"] == 0.0
    assert metrics["logp_gap_max"] <= 1e-4
  # Nothing is sampled between an update's start and its publication.
  kinds = [event["event"] for event in run.events]
  for place, kind in enumerate(kinds):
    if kind == "update":
      assert kinds[place + 1] == "publish"


def test_a_stale_batch_is_off_policy(runs):
  gaps = [m["logp_gap_max"] for m in runs["k3"].recording.metrics]
  assert max(gaps) > 1e-2


def test_weights_change_inside_of_completions(runs):
  for name in ("k1", "k3", "k3_slow"):
    run = runs[name]
    several = []
    for scored in _trained(run.recording):
      for row in range(G):
        versions = _versions_of(scored.rollout, row)
        assert (np.diff(versions) >= 0).all()
        several.append(len(set(versions.tolist())) > 1)
    assert any(several)
    assert np.mean(several) == pytest.approx(
      np.mean([m["several_versions"] for m in run.recording.metrics])
    )


def test_behavior_logps_are_those_of_a_slow_decode_that_keeps_the_cache(runs):
  run = runs["k3"]
  tables = {v: weights(params) for v, params in run.transport.host.items()}
  several = [
    (scored, row)
    for scored in run.transport.scored
    for row in range(G)
    if len(set(_versions_of(scored.rollout, row).tolist())) > 1
  ]
  single = [(scored, 1) for scored in run.transport.scored[:: 2 * P]]
  wrong = []
  for scored, row in [*several[:6], *single]:
    rollout = scored.rollout
    length = int(rollout.length[row])
    prompt = rollout.prompt[: rollout.prompt_length].tolist()
    tokens = rollout.tokens[row, :length].tolist()
    versions = _versions_of(rollout, row).tolist()
    found = rollout.behavior_logps[row, :length]
    slow = reference.decode_logps(
      tables, parts.ONE_LAYER, prompt, tokens, versions
    )
    np.testing.assert_allclose(found, slow, rtol=0, atol=1e-4)
    other = reference.decode_logps(
      tables, parts.ONE_LAYER, prompt, tokens, versions[:1] * length
    )
    wrong.append(np.abs(other - found).max())
  assert len(several) >= 3
  # That a switch is at another place would be seen.
  assert max(wrong) > 1e-2


# Nothing is lost, nothing is used twice.


def _check_complete(run):
  admits = [event for event in run.events if event["event"] == "admit"]
  trained = _trained(run.recording)
  # Groups: admitted, judged and trained on once each.
  expected = [*range(STEPS * P)]
  assert [event["group"] for event in admits] == expected
  assert sorted(scored.index for scored in run.transport.scored) == expected
  assert sorted(scored.index for scored in trained) == expected
  assert run.pipeline.groups.admitted == STEPS * P
  # Prompts: each as often as any other, give or take one, and no sample twice.
  names = [(event["uid"], event["first_sample"]) for event in admits]
  assert len(set(names)) == len(names)
  assert all(first % G == 0 for _, first in names)
  visits = collections.Counter(uid for uid, _ in names)
  assert max(visits.values()) - min(visits.values()) <= 1
  assert len(visits) == 7
  by_index = {event["group"]: event for event in admits}
  for scored in trained:
    event = by_index[scored.index]
    assert int(scored.rollout.uid) == event["uid"]
    assert int(scored.rollout.first_sample) == event["first_sample"]
  # Trained on as they were judged.
  parts.same(_records(trained), _records(run.transport.scored))
  # Tokens: the drained tail included.
  lengths = [int(s.rollout.length.sum()) for s in run.transport.scored]
  totals = run.recording.totals[-1]
  assert totals["generated_tokens"] == totals["trained_tokens"] == sum(lengths)
  first_tokens = STEPS * P * G  # drawn at the prefill, by no decode step
  assert totals["drawn_tokens"] == sum(lengths) - first_tokens
  assert totals["prompt_tokens"] == sum(
    int(s.rollout.prompt_length) for s in trained
  )
  # Two rows an insertion, whether one group enters or two.
  assert totals["prefilled_rows"] % 2 == 0
  assert STEPS * P <= totals["prefilled_rows"] <= 2 * STEPS * P
  assert [m["batch_tokens"] for m in run.recording.metrics] == [
    sum(int(s.rollout.length.sum()) for s in batch)
    for batch in run.recording.batches
  ]
  # Nobody is left.
  pipeline = run.pipeline
  assert pipeline.ledger.done
  assert pipeline.ledger.outstanding == 0
  assert not pipeline.sampler.busy
  assert not pipeline.store.in_flight
  assert not pipeline.store.queued


def test_every_group_is_trained_on_once_and_the_tail_is_drained(run):
  _check_complete(run)


def test_verdicts_are_those_of_the_task(run):
  task = parts.tiny_task()
  answers = {prompt.uid: prompt for prompt in task.train}
  for scored in run.transport.scored:
    rollout = scored.rollout
    for row in range(G):
      text = task.tokenizer.decode(rollout.tokens[row, : rollout.length[row]])
      prompt = answers[int(rollout.uid)]
      ended = rollout.tokens[row, rollout.length[row] - 1] in parts.end_ids()
      right = task.verify(prompt, text, ended=ended)
      assert scored.correct[row] == int(right)
    np.testing.assert_array_equal(
      rollout.prompt[: rollout.prompt_length], prompt.tokens
    )
  correct = np.concatenate([s.correct for s in run.transport.scored])
  assert 0.0 < correct.mean() < 1.0


# The wall's schedule.


def test_the_walls_schedule_keeps_the_bound(wall):
  _check_staleness(wall)
  if wall.k == 0:
    gaps = [m["logp_gap_max"] for m in wall.recording.metrics]
    assert max(gaps) <= 1e-4


def test_the_walls_schedule_loses_nothing(wall):
  _check_complete(wall)
  _check_journal(wall, wall_time=True)


def test_steps_need_no_still_sampler_under_the_walls_schedule(tmp_path):
  journal = Journal(tmp_path / "journal.jsonl")
  pipeline = parts.make_pipeline(
    k=3, steps=STEPS, schedule="wall", journal=journal
  )
  recording = parts.finish(pipeline, pauses_at=lambda step: False)
  journal.close()
  lines = (tmp_path / "journal.jsonl").read_text().splitlines()
  run = Run(
    3,
    2,
    pipeline,
    recording,
    pipeline.transport,
    [json.loads(line) for line in lines],
    None,
  )
  _check_staleness(run)
  _check_complete(run)


# The journal.


def _check_journal(run, *, wall_time=False):
  """Replays the events with books of its own."""
  published, chunk, started = -1, 0, None
  held, updating, trained = {}, [], set()  # group -> version
  updates, admitted = [], 0
  for event in run.events:
    kind = event["event"]
    if kind == "publish":
      assert event["version"] == published + 1
      if published >= 0:
        assert updating
        if not wall_time:
          # In its place; earlier only if the sampler could have nothing to do.
          full = len(held) == (run.k + 1) * P or admitted == STEPS * P
          assert chunk - started <= run.chunks_per_step
          assert chunk - started == run.chunks_per_step or full
        for group in updating:
          del held[group]
        trained |= set(updating)
        updating = []
      published += 1
    elif kind == "admit":
      assert event["version"] == published
      assert event["group"] not in held
      assert event["group"] not in trained
      held[event["group"]] = published
      admitted += 1
      assert len(held) <= (run.k + 1) * P
    elif kind == "chunk":
      chunk += 1
      assert event["at_chunk"] == chunk
      assert event["version"] == published
      assert set(held) - set(updating)
    else:
      assert kind == "update"
      assert event["step"] == published
      assert not updating
      updating, started = event["groups"], chunk
      assert len(updating) == P
      assert all(published - held[group] <= run.k for group in updating)
      left = [v for group, v in held.items() if group not in updating]
      for d in range(run.k + 1):
        assert sum(v <= published + d - run.k for v in left) <= d * P
      updates.append(updating)
    assert event["at_chunk"] == chunk
  assert not held
  assert published == STEPS
  assert updates == [[s.index for s in b] for b in run.recording.batches]
  assert run.recording.totals[-1]["chunks"] == chunk


def test_the_journal_tells_the_schedule(run):
  _check_journal(run)


# Resumed = uninterrupted.


def _state_at(step, case, journal=None):
  """The state at a step boundary, on the host, and what was under way."""
  k, chunks_per_step = CASES[case]
  pipeline = parts.make_pipeline(
    k=k, chunks_per_step=chunks_per_step, steps=STEPS, journal=journal
  )
  saved = {}

  def save(event):
    if event.step == step:
      saved["state"] = parts.on_host(pipeline.state_dict())
      saved["busy"] = pipeline.sampler.busy
      saved["in_flight"] = len(pipeline.store.in_flight)
      saved["queued"] = len(pipeline.store.queued)

  parts.finish(pipeline, save)
  return saved


def _restored(case, state):
  """A new pipeline that has read a saved state."""
  k, chunks_per_step = CASES[case]
  pipeline = parts.make_pipeline(
    k=k, chunks_per_step=chunks_per_step, steps=STEPS
  )
  pipeline.load_state_dict(parts.like(state, pipeline.state_dict()))
  return pipeline


def _check_resumed(run, step, pipeline, recording):
  assert recording.steps == [*range(step + 1, STEPS + 1)]
  assert recording.metrics == run.recording.metrics[step:]
  assert recording.totals == run.recording.totals[step:]
  parts.same(
    [_records(batch) for batch in recording.batches],
    [_records(batch) for batch in run.recording.batches[step:]],
  )
  assert [*pipeline.transport.host] == [*range(step, STEPS + 1)]
  for version, params in pipeline.transport.host.items():
    parts.same(params, run.transport.host[version])
  parts.same(parts.on_host(pipeline.learner.state.params), run.params)


@pytest.mark.parametrize("step", range(1, STEPS))
def test_a_run_goes_on_from_any_step_as_if_never_stopped(step, runs):
  saved = _state_at(step, "k3")
  pipeline = _restored("k3", saved["state"])
  _check_resumed(runs["k3"], step, pipeline, parts.finish(pipeline))


def test_saved_states_hold_half_written_and_queued_groups():
  states = [_state_at(step, "k3") for step in range(1, STEPS)]
  half = 0
  for saved in states:
    slots = saved["state"]["slots"]
    half += int((slots.active & (slots.length > 0)).sum())
    assert saved["busy"] == bool(
      (saved["state"]["occupancy"]["owner"] >= 0).any()
    )
  assert half > 0
  assert any(saved["in_flight"] for saved in states)
  assert any(saved["queued"] for saved in states)
  assert any(saved["in_flight"] and saved["queued"] for saved in states)


def test_a_run_goes_on_after_a_clean_stop_as_if_never_stopped(runs):
  run = runs["k3_slow"]
  k, chunks_per_step = CASES["k3_slow"]
  stopped = set()
  # Asked between any two chunks, whatever is queued or half-written then.
  for chunks in range(run.recording.totals[-1]["chunks"]):
    first = parts.make_pipeline(
      k=k, chunks_per_step=chunks_per_step, steps=STEPS
    )
    until = parts.finish(
      first,
      should_stop=lambda first=first, chunks=chunks: (
        first.totals.chunks >= chunks
      ),
    )
    at = first.ledger.version
    assert until.metrics == run.recording.metrics[:at]
    if (at, first.totals.chunks) in stopped:
      continue
    stopped.add((at, first.totals.chunks))
    state = parts.on_host(first.state_dict())
    pipeline = _restored("k3_slow", state)
    _check_resumed(run, at, pipeline, parts.finish(pipeline))
  assert len(stopped) > 4


def _resumed_journal(path, events, case, state):
  """What the journal says at the end, if `events` stood in it before."""
  path.write_text("".join(json.dumps(event) + "\n" for event in events))
  # As a run does: restored first, its journal opened then.
  pipeline = _restored(case, state)
  pipeline.journal = Journal(path, events=pipeline.events)
  parts.finish(pipeline)
  pipeline.journal.close()
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("steps", [0, 2, 5])
def test_the_journal_goes_on_after_a_clean_stop(steps, runs, tmp_path):
  run = runs["k3"]
  k, chunks_per_step = CASES["k3"]
  path = tmp_path / "journal.jsonl"
  first = parts.make_pipeline(
    k=k, chunks_per_step=chunks_per_step, steps=STEPS, journal=Journal(path)
  )
  parts.finish(first, should_stop=lambda: first.ledger.version >= steps)
  first.journal.close()
  events = [json.loads(line) for line in path.read_text().splitlines()]
  assert events == run.events[: len(events)]
  state = parts.on_host(first.state_dict())
  assert _resumed_journal(path, events, "k3", state) == run.events


@pytest.mark.parametrize("step", range(1, STEPS))
def test_the_journal_of_a_run_that_went_on_is_cut_back(step, runs, tmp_path):
  run = runs["k3"]
  journal = Journal(tmp_path / "first.jsonl")
  state = _state_at(step, "k3", journal)["state"]
  journal.close()
  path = tmp_path / "journal.jsonl"
  # The first run went on after its state was saved, and to its end.
  assert _resumed_journal(path, run.events, "k3", state) == run.events
