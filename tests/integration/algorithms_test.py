"""Whole tiny runs of the paper's other choices: what each one promises."""

import collections
import itertools
import signal

import jax
import numpy as np
import pytest
from flax import nnx

from scalerl_jax.run.exam import evaluate_saved
from scalerl_jax.run.train import Run
from scalerl_jax.run.warm_start import cache_folder
from tests.pipeline import parts
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


def _train(folder, config, **arguments):
  run = Run(config, folder)
  run.train(**arguments)
  return run


# PPO-off-policy-k.


def test_ppo_off_policy_1_is_the_synchronous_run(tmp_path):
  ppo = {"algorithm": "ppo_off_policy", "updates_per_phase": 1}
  one = _train(tmp_path / "ppo", vary(TINY, pipeline=ppo))
  other = _train(tmp_path / "k0", vary(TINY, pipeline={"max_staleness": 0}))
  assert metrics(one.workdir) == metrics(other.workdir)
  assert journal(one.workdir) == journal(other.workdir)
  gaps = [line["logp_gap_max"] for line in metrics(one.workdir)]
  assert max(gaps) <= 1e-4


def test_ppo_off_policy_3_generates_three_batches_with_one_policy(tmp_path):
  ppo = {"algorithm": "ppo_off_policy", "updates_per_phase": 3}
  config = vary(TINY, pipeline=ppo, run={"steps": 8})
  lines = metrics(_train(tmp_path / "run", config).workdir)
  assert [line["staleness_max"] for line in lines] == [0, 1, 2, 0, 1, 2, 0, 1]
  for line in lines:
    assert line["staleness"][line["staleness_max"]] == TINY.batch.prompts
    assert line["several_versions"] == 0.0
  # The last phase has two updates; its admissions are of one version.
  admitted = collections.Counter(
    event["version"]
    for event in journal(tmp_path / "run")
    if event["event"] == "admit"
  )
  prompts = TINY.batch.prompts
  assert admitted == {0: 3 * prompts, 3: 3 * prompts, 6: 2 * prompts}


# Dynamic sampling.


def test_groups_of_zero_variance_are_replaced(tmp_path):
  config = vary(TINY, loss={"zero_variance": "refill", "refill_limit": 50})
  run = _train(tmp_path / "run", config)
  lines = metrics(run.workdir)
  assert lines[-1]["discarded_groups"] > 0
  for line in lines:
    assert line["mixed_groups"] == TINY.batch.prompts
    assert line["effective_batch"] == TINY.batch.completions
  events = journal(run.workdir)
  discarded = {e["group"] for e in events if e["event"] == "discard"}
  trained = {g for e in events if e["event"] == "update" for g in e["groups"]}
  assert len(discarded) == lines[-1]["discarded_groups"]
  assert not discarded & trained
  rows = curve(run.workdir)
  assert float(rows[-1]["flops_full"]) == lines[-1]["flops_full"]


@pytest.mark.parametrize("k", [0, 2])
def test_refilling_ends_when_every_group_is_constant(k):
  limit, steps = 3, 4
  pipeline = parts.make_pipeline(
    k=k,
    steps=steps,
    task=parts.tiny_task(lambda *_, **__: True),
    refill_limit=limit,
  )
  recording = parts.finish(pipeline)
  assert recording.steps == list(range(1, steps + 1))
  assert pipeline.totals.skipped_steps == steps
  assert 0 < pipeline.totals.discarded_groups <= (steps + 1) * limit
  told = sum(m["batch_tokens"] for m in recording.metrics)
  generated = pipeline.totals.generated_tokens
  assert told + pipeline.totals.discarded_tokens == generated


def test_a_refilling_run_resumes_with_its_count():
  def pipeline():
    return parts.make_pipeline(
      k=2,
      steps=6,
      task=parts.tiny_task(lambda *_, **__: True),
      refill_limit=4,
    )

  whole = pipeline()
  parts.finish(whole)
  counts = []  # at which the run was stopped
  for step in range(1, 6):
    first = pipeline()
    parts.finish(
      first, should_stop=lambda run=first, at=step: run.ledger.version >= at
    )
    state = parts.on_host(first.state_dict())
    counts.append(int(state["counters"]["replaced"]))
    rest = pipeline()
    on_device = {
      "learner": parts.like(state["learner"], rest.learner.state),
      "slots": parts.like(state["slots"], rest.sampler.state),
    }
    rest.load_state_dict({**state, **on_device})
    parts.finish(rest)
    assert parts.counts(rest.totals) == parts.counts(whole.totals)
  assert max(counts) > 0  # at some of them part of the limit was used up


# No-Positive-Resampling.

# One prompt in two is done at once: half of 24 prompts are gone within the
# three epochs that these steps are.
RETIRING = vary(
  TINY,
  run={"steps": 14},
  curriculum={"no_positive_resampling": True, "retire_at": 0.5},
)


@pytest.fixture(scope="module")
def retiring(tmp_path_factory):
  return _train(tmp_path_factory.mktemp("retiring") / "run", RETIRING)


def test_a_retired_prompt_is_never_sampled_again(retiring):
  lines = metrics(retiring.workdir)
  shares = [line["retired_share"] for line in lines]
  assert shares == sorted(shares)
  assert 0.0 < shares[-1] < 1.0
  epochs = [set()]
  for event in journal(retiring.workdir):
    if event["event"] == "admit":
      if event["uid"] in epochs[-1]:
        epochs.append(set())
      epochs[-1].add(event["uid"])
  assert len(epochs[0]) == TINY.task.train_prompts
  assert len(epochs) >= 3
  for before, after in itertools.pairwise(epochs):
    assert after <= before  # who was left out once never comes back
  assert epochs[-2] < epochs[0]


def test_a_resumed_run_has_the_same_history(retiring, tmp_path):
  folder = tmp_path / "run"
  _train(folder, RETIRING, wrap_transport=send(signal.SIGTERM, at=9))
  again = _train(folder, RETIRING)
  assert again.resumed == 9
  assert metrics(again.workdir) == metrics(retiring.workdir)
  parts.same(again.pipeline.stream.state(), retiring.pipeline.stream.state())


# Length control.

INTERRUPTED = vary(
  TINY,
  loss={"zero_variance": "keep"},
  pipeline={"max_staleness": 0},
  length={
    "control": "interruption",
    "min_thinking_tokens": 1,
    "max_thinking_tokens": 2,
  },
)


class Watch:
  """A transport that keeps what it carries."""

  def __init__(self, inner):
    self.inner, self.scored = inner, []

  def publish(self, version, params):
    self.inner.publish(version, params)

  def fetch(self):
    return self.inner.fetch()

  def put(self, scored):
    self.scored.append(scored)
    self.inner.put(scored)

  def get(self):
    return self.inner.get()


def test_forced_tokens_are_conditioned_on_and_never_trained_on(tmp_path):
  watches = []

  def watch(inner):
    watches.append(Watch(inner))
    return watches[-1]

  run = _train(tmp_path / "run", INTERRUPTED, wrap_transport=watch)
  rollouts = [scored.rollout for scored in watches[0].scored]
  marker = int(run.task.tokenizer.encode("=")[0])
  interrupted = drawn = 0
  for rollout in rollouts:
    for row in range(TINY.batch.group_size):
      forced = np.flatnonzero(rollout.forced[row])
      tokens = rollout.tokens[row][: rollout.length[row]].tolist()
      assert forced.size <= 1
      drawn += len(tokens) - forced.size
      if forced.size:
        interrupted += 1
        assert tokens[forced[0]] == marker
        assert 1 <= forced[0] <= 2  # the thinking budget
        assert marker not in tokens[: forced[0]]
        assert len(tokens) <= forced[0] + 1 + 2  # the answer budget
        assert rollout.behavior_logps[row][forced[0]] == 0.0
  lines = metrics(run.workdir)
  told = sum(line["interrupted"] for line in lines)
  assert interrupted == round(told * TINY.batch.completions)
  assert interrupted > 0
  # Nothing is dropped: the tokens that count are all that were drawn.
  assert sum(line["kept_tokens"] for line in lines) == drawn
  # On policy: what follows a forced phrase is scored as it was drawn.
  assert max(line["logp_gap_max"] for line in lines) <= 1e-4


def test_a_masked_truncated_completion_leaves_the_denominators(tmp_path):
  short = {"max_completion_tokens": 4}
  config = vary(TINY, sampler=short, loss={"zero_variance": "keep"})
  wrong = metrics(_train(tmp_path / "wrong", config).workdir)
  config = vary(config, length={"truncated": "masked"})
  masked = metrics(_train(tmp_path / "masked", config).workdir)
  first, other = wrong[0], masked[0]  # the same rollouts, of the base policy
  assert first["truncated"] == other["truncated"] > 0.0
  rows = TINY.batch.completions
  assert first["effective_batch"] == rows
  assert other["effective_batch"] == rows * (1.0 - other["truncated"])
  assert other["kept_tokens"] == (
    first["kept_tokens"] - 4 * rows * first["truncated"]
  )


# Everything at once.

MIXED = vary(
  TINY,
  run={"steps": 8},
  task={
    "name": "mixture",
    "mixture": "chain_arithmetic:3,chain_logic:1",
    "train_prompts": 12,
  },
  supervised={"steps": 60},
  loss={"zero_variance": "refill", "refill_limit": 1},
  length={
    "control": "interruption",
    "min_thinking_tokens": 1,
    "max_thinking_tokens": 2,
    "truncated": "masked",
  },
  curriculum={"no_positive_resampling": True, "order": "easy_to_hard"},
  pipeline={"algorithm": "ppo_off_policy", "updates_per_phase": 3},
)


def test_a_mixture_with_every_control_resumes_in_the_middle_of_a_phase(
  tmp_path,
):
  whole = _train(tmp_path / "whole", MIXED)
  folder = tmp_path / "run"
  _train(folder, MIXED, wrap_transport=send(signal.SIGTERM, at=4))
  again = _train(folder, MIXED)
  assert again.resumed == 4
  assert metrics(again.workdir) == metrics(whole.workdir)
  parts.same(again.pipeline.stream.state(), whole.pipeline.stream.state())
  # Three prompts in four are of the first task, to within one.
  tasks = {prompt.uid: prompt.task for prompt in whole.task.train}
  given = [
    tasks[event["uid"]]
    for event in journal(whole.workdir)
    if event["event"] == "admit"
  ]
  assert abs(given.count("chain_arithmetic") - 0.75 * len(given)) <= 1
  # A curve for each, of completions that are interrupted too.
  names = ["chain_arithmetic", "chain_logic"]
  assert sorted({row["task"] for row in curve(whole.workdir)}) == names
  lengths = evaluations(whole.workdir)
  for name in names:
    assert np.max(lengths[f"{name}/mean_length"]) <= 2 + 1 + 2
  # Replaced groups are bounded by the batches that a phase generates.
  replaced = metrics(whole.workdir)[-1]["discarded_groups"]
  assert 0 < replaced <= 3 * 3 * TINY.batch.prompts


# Precision of the generator and of the head.

ON_POLICY = vary(TINY, run={"steps": 2}, pipeline={"max_staleness": 0})


@pytest.fixture(scope="module")
def full_head(tmp_path_factory):
  """Metrics with the FP32 head on both sides."""
  folder = tmp_path_factory.mktemp("full_head") / "run"
  return metrics(_train(folder, ON_POLICY).workdir)


@pytest.mark.parametrize(
  ("sampler", "learner"),
  [
    ("bfloat16", "float32"),
    ("float32", "bfloat16"),
    ("bfloat16", "bfloat16"),
  ],
)
def test_a_rounded_head_shows_in_the_gap(sampler, learner, full_head, tmp_path):
  # With float32 on both sides the gap is at most 1e-4: above.
  config = vary(
    ON_POLICY,
    sampler={"head_dtype": sampler},
    loss={"head_dtype": learner},
  )
  bases = set((cache_folder() / "base").iterdir())
  lines = metrics(_train(tmp_path / "run", config).workdir)
  gap = max(line["logp_gap_max"] for line in lines)
  # Rounded alike from float32 bodies that agree, both sides still agree.
  assert gap < 0.2 if sampler == learner else 1e-4 < gap < 0.2
  # Other weights and other tokens, whichever side is rounded.
  assert lines[0]["gradient_norm"] != full_head[0]["gradient_norm"]
  # The base policy does not depend on it: variants start from the same one.
  assert set((cache_folder() / "base").iterdir()) == bases


def test_a_bfloat16_generator_samples_for_a_float32_trainer(tmp_path):
  config = vary(ON_POLICY, sampler={"dtype": "bfloat16"})
  run = _train(tmp_path / "run", config)
  lines = metrics(run.workdir)
  assert not any(line["skipped_steps"] for line in lines)
  # Measured: 5.3e-2, and 5e-3 on average. In float32: at most 1e-4.
  assert 1e-4 < max(line["logp_gap_max"] for line in lines) <= 1e-1
  cache = run.pipeline.sampler.state.cache
  held = jax.tree.leaves((cache.rings, cache.prompt_k, cache.prompt_v))
  assert {x.dtype.name for x in held} == {"bfloat16"}
  trained = nnx.to_pure_dict(run.learner.state.params)
  published = nnx.to_pure_dict(run.pipeline.transport.fetch()[1])
  for name, weight in published["layers"].items():
    assert weight.dtype.name == "bfloat16", name
    assert trained["layers"][name].dtype.name == "float32"
  # The tied table is the head's too.
  table = np.asarray(published["embedding"])
  np.testing.assert_array_equal(table, trained["embedding"])
  assert table.dtype == np.float32
  # One program for all versions.
  programs = run.pipeline.sampler._programs._made
  (decode,) = (programs[key] for key in programs if key[0] == "decode")
  assert decode._cache_size() == 1
  # A saved step is examined as the run evaluated it.
  (told,) = evaluate_saved(config, run.workdir, "last")
  rate = float(curve(run.workdir)[-1]["pass_rate"])
  assert f"mean@4 {rate:.4f}," in told
