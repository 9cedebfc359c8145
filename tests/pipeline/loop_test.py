"""The loop: starts with version 0, skips, stops, and carries errors out."""

import dataclasses
import itertools
import json
import threading
import traceback

import jax
import numpy as np
import pytest

from scalerl_jax.config import LengthConfig
from scalerl_jax.pipeline.journal import Journal
from scalerl_jax.pipeline.loop import NonFiniteError, batch_metrics
from scalerl_jax.pipeline.store import Scored, no_rollout
from scalerl_jax.types import FinishReason
from tests.pipeline import parts
from tests.pipeline.parts import TC, G, P


def _watching():
  names = ("watch-", "judge")
  return [t for t in threading.enumerate() if t.name.startswith(names)]


@pytest.fixture(autouse=True)
def threads_end():
  """However a run ends, its threads end with it."""
  assert not _watching()
  yield
  assert not _watching()


def _versions(calls, kind):
  return [version for what, version in calls if what == kind]


# Weights.


def test_version_0_is_published_before_the_first_token():
  pipeline = parts.make_pipeline(steps=2)
  initial = parts.on_host(pipeline.learner.state.params)
  parts.finish(pipeline)
  calls = pipeline.transport.calls
  assert calls[0] == ("publish", 0)
  assert _versions(calls, "publish") == [0, 1, 2]
  parts.same(pipeline.transport.host[0], initial)
  # In use from its publication on, and never an older one again.
  newest = -1
  for what, version in calls:
    assert version == (newest + 1 if what == "publish" else newest)
    newest = version


def test_weights_that_were_published_already_are_not_published_again():
  pipeline = parts.make_pipeline(steps=1)
  pipeline.publish_weights()
  parts.finish(pipeline)
  assert _versions(pipeline.transport.calls, "publish") == [0, 1]


@pytest.mark.parametrize("trainer", [0, 1], ids=["shared", "disjoint"])
def test_published_weights_outlive_the_next_updates(trainer):
  pipeline = parts.make_pipeline(trainer=trainer)
  first = pipeline.learner.state.params
  parts.finish(pipeline)
  # The learner's own were given away, on the sampler's device too.
  assert all(x.is_deleted() for x in jax.tree.leaves(first))
  transport = pipeline.transport
  assert list(transport.published) == [*range(6)]
  for version, params in transport.published.items():
    parts.same(parts.on_host(params), transport.host[version])
    assert {d for x in jax.tree.leaves(params) for d in x.devices()} == {
      jax.devices()[0]
    }


# Skipped steps.


def _always(answer, completion, *, ended):
  del answer, completion, ended
  return True


def test_batches_without_a_usable_group_are_skipped_and_counted():
  task = dataclasses.replace(parts.tiny_task(), verifier=_always)
  pipeline = parts.make_pipeline(k=1, steps=4, task=task)
  initial = parts.on_host(pipeline.learner.state)
  recording = parts.finish(pipeline)
  assert recording.steps == [1, 2, 3, 4]
  for metrics in recording.metrics:
    assert metrics["skipped"] == 1.0
    assert metrics["mixed_groups"] == 0
    assert metrics["train_pass_rate"] == 1.0
    numbers = [v for v in metrics.values() if not isinstance(v, list)]
    assert np.isfinite(numbers).all()
  skipped = [totals["skipped_steps"] for totals in recording.totals]
  assert skipped == [1, 2, 3, 4]
  assert recording.totals[-1]["micro_batches"] == 0
  final = parts.on_host(pipeline.learner.state)
  parts.same(final.params, initial.params)
  parts.same(final.optimizer, initial.optimizer)


def test_a_run_goes_on_after_a_skipped_step():
  judged = []

  def later_even(answer, completion, *, ended):
    judged.append(completion)
    # The first batch holds nothing to learn from, later ones do.
    return len(judged) <= P * G or parts.even(answer, completion, ended=ended)

  task = dataclasses.replace(parts.tiny_task(), verifier=later_even)
  pipeline = parts.make_pipeline(k=0, steps=4, task=task)
  recording = parts.finish(pipeline)
  skipped = [metrics["skipped"] for metrics in recording.metrics]
  assert skipped[0] == 1.0
  assert 0.0 in skipped
  host = pipeline.transport.host
  parts.same(host[1], host[0])
  learnt = skipped.index(0.0)
  assert not np.array_equal(
    host[learnt + 1]["final_norm"].get_value(),
    host[0]["final_norm"].get_value(),
  )


class _Impatient:
  """A judge that gives up on the first completion of each group."""

  timeouts = 0

  def judge(self, prompts, completions, ended):
    self.timeouts += len(prompts) // G
    return np.arange(len(prompts)) % G % 2 == 1


def test_judgements_that_are_given_up_are_counted():
  judge = _Impatient()
  judge.timeouts = 1000  # an evaluation's
  task = dataclasses.replace(parts.tiny_task(), verifier=judge)
  pipeline = parts.make_pipeline(k=0, steps=3, task=task)
  recording = parts.finish(pipeline)
  counted = [totals["verifier_timeouts"] for totals in recording.totals]
  assert counted == [P, 2 * P, 3 * P]


# Stops.


@pytest.mark.parametrize("schedule", ["logical", "wall"])
@pytest.mark.parametrize("k", [0, 3])
def test_a_stop_comes_at_a_step_boundary(k, schedule):
  pipeline = parts.make_pipeline(k=k, steps=6, schedule=schedule)
  recording = parts.Recording()
  parts.finish(
    pipeline, recording, should_stop=lambda: len(recording.steps) >= 2
  )
  assert recording.steps == [1, 2]
  assert pipeline.ledger.version == 2
  assert not pipeline.ledger.updating
  assert not pipeline.learner.running
  # Whole: nothing in the air, so the state can be taken.
  state = pipeline.state_dict()
  assert int(state["learner"].step) == 2
  assert state["ledger"]["version"] == 2


@pytest.mark.parametrize("chunks", range(4, 13))
@pytest.mark.parametrize("schedule", ["logical", "wall"])
def test_a_stop_waits_for_the_running_update_and_for_no_other(schedule, chunks):
  pipeline = parts.make_pipeline(k=3, steps=30, schedule=schedule)
  asked = []

  def after_some_chunks():
    if pipeline.totals.chunks >= chunks:
      asked.append(pipeline.ledger.version + pipeline.learner.running)
    return bool(asked)

  recording = parts.finish(
    pipeline, should_stop=after_some_chunks, pauses_at=lambda step: False
  )
  assert recording.steps == [*range(1, asked[0] + 1)]
  assert not pipeline.learner.running
  assert int(pipeline.state_dict()["learner"].step) == asked[0] < 30


def test_a_stop_before_anything_has_started_does_nothing():
  pipeline = parts.make_pipeline()
  recording = parts.finish(pipeline, should_stop=lambda: True)
  assert recording.steps == []
  assert pipeline.groups.admitted == 0
  assert pipeline.totals.chunks == 0


def test_the_state_is_refused_while_a_chunk_is_in_the_air():
  pipeline = parts.make_pipeline(steps=2)
  seen = []

  def verifier(answer, completion, *, ended):
    # Groups are judged while the next chunk runs.
    with pytest.raises(ValueError, match="whole at a step boundary only"):
      pipeline.state_dict()
    seen.append(completion)
    return parts.even(answer, completion, ended=ended)

  judging = pipeline.judging
  judging.task = dataclasses.replace(judging.task, verifier=verifier)
  parts.finish(pipeline, should_stop=lambda: len(seen) >= G)
  assert len(seen) >= G
  pipeline.state_dict()


# Errors.


class _Broken(Exception):
  pass


@pytest.mark.parametrize("schedule", ["logical", "wall"])
@pytest.mark.parametrize("calls", [1, 2 * P * G])
def test_an_error_of_the_verifier_comes_out_with_its_traceback(calls, schedule):
  judged = []

  def faulty_verifier(answer, completion, *, ended):
    judged.append(completion)
    if len(judged) == calls:
      raise _Broken("the verifier")
    return parts.even(answer, completion, ended=ended)

  task = dataclasses.replace(parts.tiny_task(), verifier=faulty_verifier)
  pipeline = parts.make_pipeline(k=3, schedule=schedule, task=task)
  with pytest.raises(_Broken, match="the verifier") as caught:
    parts.finish(pipeline)
  frames = traceback.extract_tb(caught.value.__traceback__)
  assert frames[-1].name == "faulty_verifier"
  # Under the wall schedule the verifier goes on until the loop hears of it.
  assert len(judged) == calls or (schedule == "wall" and len(judged) > calls)


@pytest.mark.parametrize("schedule", ["logical", "wall"])
def test_an_error_at_a_step_boundary_comes_out_with_its_traceback(schedule):
  steps = []

  def faulty_on_step(event):
    steps.append(event.step)
    if event.step == 2:
      raise _Broken("the recorder")

  pipeline = parts.make_pipeline(k=3, schedule=schedule)
  with pytest.raises(_Broken, match="the recorder") as caught:
    parts.finish(pipeline, faulty_on_step)
  frames = traceback.extract_tb(caught.value.__traceback__)
  assert frames[-1].name == "faulty_on_step"
  assert steps == [1, 2]


@pytest.mark.parametrize("schedule", ["logical", "wall"])
def test_an_error_of_the_question_whether_to_stop_comes_out(schedule):
  asked = []

  def faulty_question():
    asked.append(None)
    if len(asked) == 4:
      raise _Broken("the question")
    return False

  pipeline = parts.make_pipeline(schedule=schedule, k=3)
  with pytest.raises(_Broken, match="the question"):
    parts.finish(pipeline, should_stop=faulty_question)


@pytest.mark.parametrize("schedule", ["logical", "wall"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_update_that_is_not_finite_stops_the_run(value, schedule, tmp_path):
  turns = itertools.count()

  def in_turn(answer, completion, *, ended):
    # Every group is mixed: no batch is skipped, whatever is drawn when.
    del answer, completion, ended
    return next(turns) % 2 == 0

  journal = Journal(tmp_path / "journal.jsonl")
  pipeline = parts.make_pipeline(
    k=1,
    schedule=schedule,
    journal=journal,
    task=dataclasses.replace(parts.tiny_task(), verifier=in_turn),
  )
  recording = parts.Recording()

  def poison(event):
    recording(event)
    if event.step == 2:
      # After the publication: the sampler's weights stay good.
      state = pipeline.learner.state
      spoilt = jax.tree.map(lambda x: x * value, state.params)
      pipeline.learner.load_state(dataclasses.replace(state, params=spoilt))

  with pytest.raises(NonFiniteError, match="nothing was published") as caught:
    parts.finish(pipeline, poison)
  journal.close()
  error = caught.value
  assert isinstance(error, FloatingPointError)
  assert recording.steps == [1, 2]
  assert pipeline.ledger.version == 2
  assert _versions(pipeline.transport.calls, "publish") == [0, 1, 2]
  for params in pipeline.transport.host.values():
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))
  # The batch is the one that was trained on, as it was scored.
  lines = (tmp_path / "journal.jsonl").read_text().splitlines()
  events = [json.loads(line) for line in lines]
  last = [event for event in events if event["event"] == "update"][-1]
  assert error.step == 3
  assert last["step"] == 2
  assert [scored.index for scored in error.batch] == last["groups"]
  put = {scored.index: scored for scored in pipeline.transport.scored}
  for scored in error.batch:
    parts.same(scored.rollout.tokens, put[scored.index].rollout.tokens)
    parts.same(scored.correct, put[scored.index].correct)


def test_tokens_of_a_policy_that_is_not_finite_are_not_trained_on():
  pipeline = parts.make_pipeline()
  state = pipeline.learner.state
  spoilt = jax.tree.map(lambda x: x * np.nan, state.params)
  pipeline.learner.load_state(dataclasses.replace(state, params=spoilt))
  recording = parts.Recording()
  with pytest.raises(NonFiniteError, match="log-probs of sampled tokens"):
    parts.finish(pipeline, recording)
  assert recording.steps == []
  assert not pipeline.transport.scored
  assert not pipeline.learner.running


def test_an_unknown_schedule_is_refused():
  with pytest.raises(ValueError, match="one of logical, wall, got 'lunar'"):
    parts.make_pipeline(schedule="lunar")


# What the host knows of a batch.


def _scored(index, lengths, versions, finish, correct):
  rollout = no_rollout(G, parts.SAMPLER)
  tokens = np.arange(TC)
  rollout.length[:] = lengths
  rollout.finish[:] = finish
  rollout.versions[:] = np.where(
    tokens < np.array(lengths)[:, None], np.array(versions), 0
  )
  return Scored(index, rollout, np.array(correct, np.int32))


def test_metrics_of_a_batch_are_those_worked_by_hand():
  eos, budget = FinishReason.EOS, FinishReason.BUDGET
  two = [3, 3, 4, 4, 4, 4, 4, 4]
  batch = [
    # Row 1 ends before the switch; padding holds 0, which is no version.
    _scored(7, [TC, 2, 5], [two] * G, [budget, eos, eos], [1, 0, 1]),
    _scored(9, [1, 3, 4], [[5] * TC] * G, [eos, eos, eos], [1, 1, 1]),
  ]
  metrics = batch_metrics(
    batch, np.array([2, 0]), max_staleness=3, length=LengthConfig()
  )
  assert metrics == {
    "train_pass_rate": pytest.approx(5 / 6),
    "mixed_groups": 1,
    "batch_tokens": TC + 2 + 5 + 1 + 3 + 4,
    "completion_length": pytest.approx((TC + 2 + 5 + 1 + 3 + 4) / 6),
    "truncated": pytest.approx(1 / 6),
    "interrupted": 0.0,
    "several_versions": pytest.approx(2 / 6),
    "staleness_mean": 1.0,
    "staleness_max": 2,
    "staleness": [1, 0, 1, 0],
  }
