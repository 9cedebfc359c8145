"""Packed rows: all of it, once, nowhere cut; and the update they lead to."""

import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import strategies as st

from scalerl_jax.config import LossConfig
from scalerl_jax.learning import train_step
from scalerl_jax.learning.learner import Learner
from scalerl_jax.learning.packing import first_fit, pack, trained_rows, unpack
from scalerl_jax.models.sharding import make_mesh, replicated
from scalerl_jax.types import Batch
from tests.helpers import (
  SGD,
  SHAPE,
  V,
  equations,
  same_update,
  small_policy,
  weights,
)

ONE_LAYER = dataclasses.replace(SHAPE, num_layers=1)
B, G, T, W = 12, 3, 7, 17
# A group right in part, one right, one in part, one wrong.
CORRECT = np.array([0, 1, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0], np.int32)
KEPT = np.array([True] * 3 + [False] * 3 + [True] * 3 + [False] * 3)
PROMPT = np.array([1, 1, 1, 2, 2, 2, 3, 3, 3, 2, 2, 2])
LENGTH = np.array([5, 7, 3, 7, 6, 4, 7, 4, 5, 3, 4, 5])  # prompt included
LOSSES = {
  "cispo": LossConfig(clip_max=2.0, logprob_chunk=9),
  "gspo": LossConfig(name="gspo", aggregation="sample_average"),
}


def _batch(seed=0, correct=CORRECT):
  """Any ids anywhere, padding too."""
  rng = np.random.default_rng(seed)
  place = np.arange(T)
  inside = place < LENGTH[:, None]
  mask = inside & (place >= PROMPT[:, None])
  mask[0, 2] = False  # a forced token
  logps = rng.uniform(-4.5, -2.0, (B, T))
  return Batch(
    tokens=rng.integers(0, V, (B, T)).astype(np.int32),
    segment_ids=inside.astype(np.int32),
    mask=mask,
    behavior_logps=np.where(mask, logps, 0.0).astype(np.float32),
    correct=correct,
    rewards=np.where(correct, 1.0, -1.0).astype(np.float32),
  )


@hypothesis.given(
  lengths=st.lists(st.integers(0, 9), min_size=1, max_size=25),
  width=st.integers(9, 23),
)
@hypothesis.settings(max_examples=60)
def test_nothing_overlaps_or_is_cut_and_rows_are_few(lengths, width):
  lengths = np.array(lengths)
  row, start = first_fit(lengths, width)
  taken = np.zeros((len(lengths), width), int)
  for length, r, c in zip(lengths, row, start, strict=True):
    assert (r < 0) == (length == 0)
    assert c + length <= width
    taken[r, c : c + length] += 1
  assert taken.max() <= 1
  assert taken.sum() == lengths.sum()
  # Rows in use come first, and of two of them one is more than half full.
  filled = taken.sum(axis=1)
  rows = row.max() + 1
  assert (filled[:rows] > 0).all()
  assert (filled[: max(rows - 1, 0)] * 2 > width).sum() >= rows - 2
  for left, right in zip(first_fit(lengths, width), (row, start), strict=True):
    np.testing.assert_array_equal(left, right)


def test_the_longest_goes_first_and_equal_ones_keep_their_order():
  row, start = first_fit(np.array([2, 5, 2, 4, 5]), 9)
  assert row.tolist() == [1, 0, 1, 0, 1]
  assert start.tolist() == [5, 0, 7, 5, 0]


def test_a_completion_wider_than_a_row_is_refused_with_both_numbers():
  with pytest.raises(ValueError, match=r"at least the 7 tokens .* got 6"):
    first_fit(np.array([3, 7]), 6)


def test_kept_completions_stand_in_rows_of_their_own_segments():
  batch = _batch()
  packed = pack(batch, KEPT, W).packed
  assert packed.tokens.shape == (B, W)
  np.testing.assert_array_equal(packed.row >= 0, KEPT)
  for item in np.flatnonzero(KEPT):
    place = np.arange(packed.start[item], packed.start[item] + LENGTH[item])
    row = packed.row[item]
    np.testing.assert_array_equal(
      packed.tokens[row, place], batch.tokens[item, : LENGTH[item]]
    )
    (own,) = set(packed.segment_ids[row, place])
    assert (packed.segment_ids[row] == own).sum() == LENGTH[item]
  assert (packed.segment_ids > 0).sum() == LENGTH[KEPT].sum()
  # 31 tokens: two rows of 17, where six of 7 would be.
  assert packed.row.max() + 1 == 2


def test_unpacked_values_are_those_of_each_completion():
  packed = pack(_batch(), KEPT, W).packed
  values = np.arange(B * W, dtype=np.float32).reshape(B, W) + 1.0
  for first in (0, 1):
    (found,), here = unpack(
      (jnp.asarray(values[first : first + 1]),),
      jax.device_put(packed),
      first=jnp.int32(first),
      length=T,
    )
    np.testing.assert_array_equal(here, packed.row == first)
    for item in range(B):
      if here[item]:
        start, end = packed.start[item], LENGTH[item]
        expected = values[first, start + 1 : start + end]
        np.testing.assert_array_equal(found[item, 1:end], expected)
      else:
        assert not found[item].any()
    assert not found[:, 0].any()


def test_what_is_learnt_from_is_what_the_filter_keeps():
  batch = jax.device_put(_batch())
  mask = batch.mask.at[1].set(False)  # its group is all wrong now
  for drop, expected in ((True, [6, 7, 8]), (False, [0, *range(2, B)])):
    keep = trained_rows(mask, batch.correct, group_size=G, drop=drop)
    assert np.flatnonzero(keep).tolist() == expected


def _settings(name, packing, micro_batch):
  return train_step.TrainSettings(
    policy=nnx.graphdef(small_policy(ONE_LAYER)),
    optimizer=SGD,
    loss=LOSSES[name],
    warp=(("temperature", 0.8),),
    group_size=G,
    micro_batch=micro_batch,
    max_completion_tokens=T,
    packing=packing,
  )


@functools.cache
def _learner(name, packing, micro_batch, devices):
  mesh = make_mesh(jax.devices()[:devices])
  params = jax.device_put(nnx.state(small_policy(ONE_LAYER)), replicated(mesh))
  return Learner(params, _settings(name, packing, micro_batch), mesh)


def _update(batch, name, *, packing, micro_batch, devices=1):
  """What an update takes off the parameters, and its metrics."""
  learner = _learner(name, packing, micro_batch, devices)
  before = jax.tree.map(np.array, learner.state)
  learner.start(batch)
  metrics = learner.collect()
  after = jax.tree.map(np.array, learner.state)
  learner.load_state(
    jax.tree.map(
      lambda x, like: jax.device_put(x, like.sharding), before, learner.state
    )
  )
  step = jax.tree.map(lambda x, y: x - y, before.params, after.params)
  return weights(step), metrics


@functools.cache
def _padded(name):
  return _update(_batch(), name, packing=0, micro_batch=B)


@pytest.mark.parametrize(
  ("name", "micro_batch", "devices"),
  [("cispo", 2, 2), ("gspo", 1, 1)],
)
def test_packed_is_padded_value_and_gradient(name, micro_batch, devices):
  actual = _update(
    _batch(), name, packing=W, micro_batch=micro_batch, devices=devices
  )
  same_update(actual, _padded(name))
  assert actual[1]["micro_batches"] == 2 // micro_batch
  assert actual[1]["computed_keys"] == 2 * W * W
  assert actual[1]["padding_share"] == pytest.approx(1 - 31 / (2 * W))


def test_a_batch_with_nothing_kept_is_skipped():
  batch = _batch(correct=np.ones(B, np.int32))
  gradient, metrics = _update(batch, "cispo", packing=W, micro_batch=1)
  assert metrics["skipped"] == 1.0
  assert metrics["micro_batches"] == metrics["loss"] == 0.0
  assert not any(x.any() for x in jax.tree.leaves(gradient))


def test_the_forward_pass_is_over_packed_rows_alone():
  settings = _settings("cispo", W, 2)
  params = nnx.state(small_policy(ONE_LAYER))
  state = train_step.LearnerState(
    params, settings.optimizer.init(params), jnp.int32(0)
  )
  jaxpr = jax.make_jaxpr(
    functools.partial(train_step.train_step, settings=settings)
  )(state, pack(_batch(), KEPT, W))
  logits = {
    variable.aval.shape
    for equation in equations(jaxpr.jaxpr)
    for variable in equation.outvars
    if variable.aval.size > V and variable.aval.shape[2:] == (V,)
  }
  assert logits == {(2, 4, V)}  # 9 tokens of two rows at a time
