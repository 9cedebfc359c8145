"""Prompts computed once for their group: the same log-probs and update."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from scalerl_jax.config import LossConfig
from scalerl_jax.learning import train_step
from scalerl_jax.learning.learner import Learner
from scalerl_jax.learning.packing import pack
from scalerl_jax.learning.scoring import completion_logps, group_logps
from scalerl_jax.models.sharding import make_mesh, replicated
from scalerl_jax.types import Batch
from tests.helpers import (
  SGD,
  SHAPE,
  V,
  products,
  same_update,
  small_policy,
  weights,
)

ONE_LAYER = dataclasses.replace(SHAPE, num_layers=1)
B, G, TP, TC = 12, 3, 3, 5
T = TP + TC
# A group right in part, one right, one in part, one in part.
CORRECT = np.array([0, 1, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1], np.int32)
KEPT = CORRECT.reshape(-1, G).mean(axis=1).repeat(G) % 1 > 0
PROMPT = np.array([1, 3, 2, 3], np.int32).repeat(G)
WRITTEN = np.array([4, 5, 1, 4, 3, 4, 2, 1, 2, 1, 3, 2])
WARP = (("temperature", 0.8),)
LOSSES = {
  "cispo": LossConfig(clip_max=2.0, logprob_chunk=9),
  "gspo": LossConfig(name="gspo", aggregation="sample_average"),
}


def _batch(correct=CORRECT, masked=()):
  """Any ids anywhere, padding too; the prompts of a group are alike.

  Rows that are masked out have been truncated: they are as long as can be.
  """
  rng = np.random.default_rng(0)
  place = np.arange(T)
  written = WRITTEN.copy()
  written[list(masked)] = TC
  inside = place < (PROMPT + written)[:, None]
  asked = place < PROMPT[:, None]
  tokens = rng.integers(0, V, (B, T))
  tokens = np.where(asked, np.repeat(tokens[::G], G, axis=0), tokens)
  mask = inside & ~asked
  mask[0, 2] = False  # a forced token
  mask[list(masked)] = False
  logps = rng.uniform(-4.5, -2.0, (B, T))
  return Batch(
    tokens=tokens.astype(np.int32),
    segment_ids=inside.astype(np.int32),
    mask=mask,
    behavior_logps=np.where(mask, logps, 0.0).astype(np.float32),
    correct=correct,
    rewards=np.where(correct, 1.0, -1.0).astype(np.float32),
    prompt_length=PROMPT,
  )


def _group_logps(policy, batch, *, chunk=0):
  return group_logps(
    policy,
    batch,
    WARP,
    group_size=G,
    prompt=TP,
    width=TC,
    chunk=chunk,
  )


@pytest.mark.parametrize("chunk", [0, 12])
def test_log_probs_are_those_of_rows_of_their_own(chunk):
  policy, batch = small_policy(), jax.device_put(_batch())
  expected = completion_logps(policy, batch, WARP)
  for found, wanted in zip(
    _group_logps(policy, batch, chunk=chunk), expected, strict=True
  ):
    np.testing.assert_allclose(
      np.where(batch.mask, found, 0.0),
      np.where(batch.mask, wanted, 0.0),
      rtol=1e-5,
      atol=1e-5,
    )
    asked = np.arange(T) < PROMPT[:, None]
    assert not np.asarray(found)[asked].any()
    assert np.isfinite(found).all()


def test_a_prompt_is_computed_once_and_has_no_logits():
  policy, batch = small_policy(ONE_LAYER), jax.device_put(_batch())
  traced = jax.make_jaxpr(lambda batch: _group_logps(policy, batch))(batch)
  operands = [
    [value.aval.shape for value in product.invars]
    for product in products(traced)
  ]
  groups = B // G
  width = ONE_LAYER.width
  rows = {shapes[0][0] for shapes in operands if shapes[0][1:] == (width,)}
  assert rows == {groups * (TP + G * TC), B * TC}
  (head,) = [shapes for shapes in operands if shapes[1] == (V, width)]
  assert head[0] == (B * TC, width)


def _settings(loss, micro_batch, *, share, width_buckets=1):
  return train_step.TrainSettings(
    policy=nnx.graphdef(small_policy(ONE_LAYER)),
    optimizer=SGD,
    loss=loss,
    warp=WARP,
    group_size=G,
    micro_batch=micro_batch,
    max_completion_tokens=TC,
    width_buckets=width_buckets,
    share_prompts=share,
  )


def _update(batch, settings, devices=1):
  """What an update takes off the parameters, and its metrics."""
  mesh = make_mesh(jax.devices()[:devices])
  params = jax.device_put(nnx.state(small_policy(ONE_LAYER)), replicated(mesh))
  learner = Learner(params, settings, mesh)
  learner.start(batch)
  metrics = learner.collect()
  step = jax.tree.map(
    lambda x, y: np.asarray(x) - np.asarray(y), params, learner.state.params
  )
  return weights(step), metrics


@pytest.mark.parametrize(
  ("name", "micro_batch", "devices", "count"),
  [("cispo", 6, 2, 1), ("gspo", 3, 1, 1), ("cispo", 3, 1, 3)],
)
@pytest.mark.parametrize("masked", [(), (0, 7)])
def test_the_update_is_that_of_rows_of_their_own(
  name, micro_batch, devices, count, masked
):
  loss, batch = LOSSES[name], _batch(masked=masked)
  wanted = _update(batch, _settings(loss, B, share=False))
  settings = _settings(loss, micro_batch, share=True, width_buckets=count)
  actual = _update(batch, settings, devices)
  same_update(actual, wanted)
  full = actual[1]["micro_batches"] * micro_batch * TC
  assert (actual[1]["computed_logits"] < full) == (count > 1)


def test_what_was_computed_is_counted():
  # Groups of 5, 2 and 3 tokens at most are left: micro-batches of two groups.
  settings = _settings(LOSSES["cispo"], 6, share=True)
  _, metrics = _update(_batch(), settings)
  assert metrics["micro_batches"] == 2
  assert metrics["effective_batch"] == KEPT.sum() == 9
  assert metrics["computed_tokens"] == 4 * (TP + G * TC)
  assert metrics["computed_logits"] == 4 * G * TC
  assert metrics["computed_keys"] == 4 * (TP**2 + G * TC * (TP + TC))
  used = PROMPT[KEPT][::G].sum() + WRITTEN[KEPT].sum()
  assert metrics["padding_share"] == pytest.approx(
    1 - used / metrics["computed_tokens"]
  )


def test_short_groups_are_computed_in_narrow_rows():
  # Widths 5, 4 and 2, which leaves room for two groups: one of each is left.
  settings = _settings(LOSSES["cispo"], 3, share=True, width_buckets=3)
  _, metrics = _update(_batch(), settings)
  assert metrics["micro_batches"] == 3
  assert metrics["computed_logits"] == G * (5 + 4 + 2 * 2)
  # A row that is masked out does not make its group wider.
  _, metrics = _update(_batch(masked=(7,)), settings)
  assert metrics["computed_logits"] == G * (5 + 4 + 2 * 2)


def test_a_batch_with_nothing_kept_is_skipped():
  batch = _batch(correct=np.ones(B, np.int32))
  gradient, metrics = _update(batch, _settings(LossConfig(), 6, share=True))
  assert metrics["skipped"] == 1.0
  assert metrics["micro_batches"] == metrics["loss"] == 0.0
  assert not any(x.any() for x in jax.tree.leaves(gradient))


@pytest.mark.parametrize(
  ("change", "settings", "told"),
  [
    ({"prompt_length": None}, {}, r"prompt_length .* got None"),
    ({"packed": pack(_batch(), KEPT, T).packed}, {}, r"packing must be 0"),
    ({}, {"micro_batch": 4}, r"multiple of the groups of 3, got 4"),
    ({}, {"micro_batch": 2}, r"multiple of the groups of 3, got 2"),
    ({}, {"max_completion_tokens": T}, r"below the 8 tokens of a row, got 8"),
  ],
)
def test_prompts_that_cannot_be_shared_are_refused(change, settings, told):
  batch = dataclasses.replace(_batch(), **change)
  asked = _settings(LossConfig(), 6, share=True)
  with pytest.raises(ValueError, match=told):
    _update(batch, dataclasses.replace(asked, **settings))
