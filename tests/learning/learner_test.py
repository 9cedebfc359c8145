"""The learner: donated state, published copies, one update in the air."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scalerl_jax.config import LossConfig, OptimizerConfig
from scalerl_jax.learning.learner import Learner
from scalerl_jax.learning.optimizer import make_optimizer
from scalerl_jax.learning.train_step import TrainSettings
from scalerl_jax.models.sharding import make_mesh
from scalerl_jax.types import Batch
from tests.helpers import SHAPE, V, compilations, small_policy

ONE_LAYER = dataclasses.replace(SHAPE, num_layers=1)
B, G, T = 6, 3, 5
CORRECT = np.array([0, 1, 0, 1, 1, 0], np.int32)


def _batch(correct=CORRECT):
  rng = np.random.default_rng(0)
  mask = np.arange(T) >= rng.integers(1, T, (B, 1))
  return Batch(
    tokens=rng.integers(0, V, (B, T)).astype(np.int32),
    segment_ids=np.ones((B, T), np.int32),
    mask=mask,
    behavior_logps=np.where(mask, -3.0, 0.0).astype(np.float32),
    correct=correct,
    rewards=np.where(correct, 1.0, -1.0).astype(np.float32),
  )


def _short(batch, longest):
  """The same rows cut to at most so many tokens."""
  inside = np.broadcast_to(np.arange(T) < longest, (B, T))
  return dataclasses.replace(
    batch,
    segment_ids=batch.segment_ids * inside,
    mask=inside & (np.arange(T) > 0),
  )


def _learner(mesh=None, width_buckets=1):
  mesh = mesh or make_mesh()
  graph, params = nnx.split(small_policy(ONE_LAYER, mesh=mesh))
  settings = TrainSettings(
    policy=graph,
    optimizer=make_optimizer(OptimizerConfig(warmup_steps=2)),
    loss=LossConfig(),
    warp=(("temperature", 1.0),),
    group_size=G,
    micro_batch=3,
    max_completion_tokens=T,
    width_buckets=width_buckets,
  )
  return Learner(params, settings, mesh), params


@pytest.fixture(scope="module")
def compiled():
  """(learner, its first parameters, its first state on the host)."""
  learner, params = _learner()
  new = jax.tree.map(np.array, learner.state)
  learner.compile(_batch())
  jax.tree.map(np.testing.assert_array_equal, learner.state, new)
  return learner, params, new


def _reset(learner, new):
  learner.load_state(
    jax.tree.map(
      lambda x, like: jax.device_put(x, like.sharding), new, learner.state
    )
  )


@pytest.fixture
def learner(compiled):
  """The learner before its first update."""
  learner, _, new = compiled
  _reset(learner, new)
  return learner


def _host(tree):
  return jax.tree.map(np.array, tree)


def _differ(left, right):
  return any(
    (x != y).any()
    for x, y in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
  )


def test_the_first_update_finds_everything_compiled(learner):
  with compilations() as count:
    learner.start(_batch())
    learner.collect()
  assert not count


def test_other_lengths_find_everything_compiled_and_compute_less():
  learner, _ = _learner(width_buckets=3)  # 3 rows of 5 or 4, 6 of 2
  learner.compile(_batch())
  told = []
  lengths = np.array([5, 2, 2, 2, 3, 2])[:, None]
  with compilations() as count:
    for longest in (T, 4, 2, lengths):
      learner.start(_short(_batch(), longest))
      told.append(learner.collect())
  assert not count
  tokens = [metrics["computed_tokens"] for metrics in told]
  # Of the last, the two longest and a short one, then the others.
  assert tokens == [2 * 3 * 5, 2 * 3 * 4, 6 * 2, 3 * 5 + 6 * 2]
  assert [metrics["micro_batches"] for metrics in told] == [2, 2, 1, 2]
  assert told[2]["computed_keys"] == 6 * 2 * 2
  assert told[3]["padding_share"] == pytest.approx(1 - 16 / 27)


def test_the_parameters_that_it_was_given_stay():
  learner, params = _learner()
  before = _host(params)
  # What an update does to the state that is given away to it.
  jax.tree.map(lambda leaf: leaf.delete(), learner.state)
  jax.tree.map(np.testing.assert_array_equal, _host(params), before)


def test_a_published_copy_survives_the_next_updates(learner):
  learner.start(_batch())
  learner.collect()
  inside = learner.state.params
  published = jax.tree.map(jnp.copy, inside)
  before = _host(published)
  for _ in range(2):
    learner.start(_batch())
    learner.collect()
  # The state itself was given away.
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(inside))
  jax.tree.map(np.testing.assert_array_equal, _host(published), before)
  assert _differ(_host(learner.state.params), before)


def test_the_same_updates_give_the_same_bits(compiled, learner):
  _, _, new = compiled
  ends = []
  for _ in range(2):
    _reset(learner, new)
    for _ in range(2):
      learner.start(_batch())
      learner.collect()
    ends.append(_host(learner.state))
  jax.tree.map(np.testing.assert_array_equal, *ends)
  assert int(ends[0].step) == 2


def test_a_skipped_update_changes_nothing_but_the_count_of_steps(learner):
  learner.start(_batch())
  learner.collect()
  before = _host(learner.state)
  learner.start(_batch(np.ones(B, np.int32)))
  metrics = learner.collect()
  after = _host(learner.state)
  assert metrics["skipped"] == 1.0
  assert all(np.isfinite(value) for value in metrics.values())
  for name in ("params", "optimizer"):
    jax.tree.map(
      np.testing.assert_array_equal, getattr(after, name), getattr(before, name)
    )
  assert int(after.step) == int(before.step) + 1 == 2


def test_the_optimiser_of_the_config_makes_the_update(compiled, learner):
  _, _, new = compiled
  learner.start(_batch())
  learner.collect()
  # Adam's first step is the rate (half of it in a warm-up of two), whatever
  # the gradient: where there is one, the parameter moves by that.
  rate = OptimizerConfig().learning_rate / 2
  decay = OptimizerConfig().weight_decay
  moved, count = 0, 0
  for x, y in zip(
    jax.tree.leaves(new.params),
    jax.tree.leaves(_host(learner.state.params)),
    strict=True,
  ):
    step = (x - y) - rate * decay * x
    moved += (np.abs(np.abs(step) - rate) < 0.01 * rate).sum()
    count += x.size
  assert moved > 0.95 * count


def test_metrics_are_collected_once_and_are_numbers(learner):
  assert not learner.running
  assert learner.ready
  with pytest.raises(ValueError, match="no update is running; call start"):
    learner.collect()
  learner.start(_batch())
  assert learner.running
  metrics = learner.collect()
  assert all(type(value) is float for value in metrics.values())
  assert metrics["skipped"] == 0.0
  assert metrics["effective_batch"] == B
  assert metrics["micro_batches"] == 2.0
  assert metrics["computed_logits"] == 24.0
  assert metrics["computed_tokens"] == 30.0
  assert metrics["computed_keys"] == 150.0
  assert metrics["padding_share"] == 0.0
  assert not learner.running
  with pytest.raises(ValueError, match="no update is running"):
    learner.collect()


def test_a_restored_learner_has_nothing_in_the_air(learner):
  saved = jax.tree.map(jnp.copy, learner.state)
  learner.start(_batch())
  learner.load_state(saved)
  assert not learner.running
  assert int(learner.state.step) == 0


def test_the_moments_of_adam_are_cut_as_the_parameters_are():
  mesh = make_mesh(jax.devices()[:8], fsdp=2, tensor=2)
  learner, params = _learner(mesh)
  cut = {
    shape: piece
    for shape, piece in (
      (x.shape, x.addressable_shards[0].data.shape)
      for x in jax.tree.leaves(params)
    )
  }
  assert cut[(1, 16, 4, 6)] == (1, 8, 2, 6)
  moments = [x for x in jax.tree.leaves(learner.state.optimizer) if x.ndim]
  assert len(moments) == 2 * len(jax.tree.leaves(params))
  for moment in moments:
    held = {shard.data.shape for shard in moment.addressable_shards}
    assert held == {cut[moment.shape]}
  for scalar in (learner.state.step, *jax.tree.leaves(learner.state)):
    assert len(scalar.addressable_shards) == 8
