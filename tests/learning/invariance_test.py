"""The whole update of the clipped losses, whatever the micro-batch.

`train_step_test.py` holds ScaleRL's loss to the book; GSPO and the clipped
surrogate, whose clips look at a completion or at a sign, are held to it here.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scalerl_jax.config import LossConfig
from scalerl_jax.learning import train_step
from scalerl_jax.types import Batch
from tests.helpers import SGD, SHAPE, V, small_policy, weights
from tests.reference import advantages as reference_advantages
from tests.reference import aggregation as reference_aggregation
from tests.reference import losses as reference_losses
from tests.reference import surrogates as reference_surrogates

ONE_LAYER = dataclasses.replace(SHAPE, num_layers=1)
B, G, T, PROMPT = 12, 4, 7, 2
# One group right in part, one wrong, one right in another part.
CORRECT = np.array([0, 1, 0, 0] + [0] * 4 + [1, 1, 0, 1], np.int32)
KEPT = [0, 1, 2, 3, 8, 9, 10, 11]
LENGTHS = np.array([5, 1, 3, 2, 4, 5, 1, 2, 3, 4, 5, 2])
CHOICES = {
  "gspo": LossConfig(
    name="gspo", clip_low=0.3, clip_high=0.4, aggregation="sample_average"
  ),
  "clipped_surrogate": LossConfig(
    name="clipped_surrogate", clip_low=0.2, clip_high=0.26
  ),
}


@functools.cache
def _batch():
  """(batch, log π of its tokens), half a nat and more off policy."""
  rng = np.random.default_rng(3)
  tokens = rng.integers(0, V, (B, T)).astype(np.int32)
  places = np.arange(T)
  inside = places < PROMPT + LENGTHS[:, None]
  mask = inside & (places >= PROMPT)
  mask[0, PROMPT + 1] = mask[10, PROMPT] = False  # forced tokens
  segments = inside.astype(np.int32)
  logps, _ = _policy(_params(), tokens, segments, np.zeros((B, T), np.float32))
  logps = np.asarray(logps, np.float64)
  behavior = logps - 0.7 * rng.standard_normal((B, T))
  return Batch(
    tokens=tokens,
    segment_ids=segments,
    mask=mask,
    behavior_logps=np.where(mask, behavior, 0.0).astype(np.float32),
    correct=CORRECT,
    rewards=np.where(CORRECT, 1.0, -1.0).astype(np.float32),
  ), logps


def _params():
  return nnx.state(small_policy(ONE_LAYER))


@jax.jit
def _policy(params, tokens, segments, slopes):
  """log π [B, T], and d Σ slopes · log π / d parameters."""
  graph = nnx.graphdef(small_policy(ONE_LAYER))

  def total(params):
    logits = nnx.merge(graph, params)(tokens, segment_ids=segments)[:, :-1]
    logps = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(logps, tokens[:, 1:, None], axis=-1)[..., 0]
    logps = jnp.pad(chosen, ((0, 0), (1, 0)))
    return jnp.sum(slopes * logps), logps

  gradient, logps = jax.grad(total, has_aux=True)(params)
  return logps, gradient


@functools.cache
def _by_the_book(name):
  """(loss, clip fraction, gradient) of the kept groups alone."""
  loss, (batch, logps) = CHOICES[name], _batch()
  kept = jax.tree.map(lambda x: x[KEPT], batch)
  mask, logps = kept.mask.tolist(), logps[KEPT].tolist()
  behavior_logps = np.float64(kept.behavior_logps).tolist()
  pushes = reference_advantages.group_advantages(
    kept.rewards.tolist(), G, loss.normalization
  )
  shares = reference_aggregation.weights(mask, G, loss.aggregation)
  clips = loss.clip_low, loss.clip_high
  if name == "gspo":
    values, slopes = reference_surrogates.gspo(
      logps, behavior_logps, pushes, mask, *clips
    )
    each = np.sum(shares, axis=1, keepdims=True)
  else:
    values, slopes = reference_surrogates.surrogate(
      logps, behavior_logps, pushes, *clips
    )
    each = np.asarray(shares)
  slopes = np.where(mask, each * slopes, 0.0)
  of_all = np.zeros((B, T), np.float32)
  of_all[KEPT] = slopes
  _, gradient = _policy(_params(), batch.tokens, batch.segment_ids, of_all)
  clipped = np.mean(slopes[kept.mask] == 0.0)
  return reference_losses.total(shares, values), clipped, weights(gradient)


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("micro_batch", [3, B])
def test_an_update_is_that_of_the_book_whatever_the_micro_batch(
  micro_batch, name
):
  settings = train_step.TrainSettings(
    policy=nnx.graphdef(small_policy(ONE_LAYER)),
    optimizer=SGD,
    loss=CHOICES[name],
    warp=(),
    group_size=G,
    micro_batch=micro_batch,
    max_completion_tokens=T,
  )
  state = train_step.LearnerState(
    params=_params(),
    optimizer=settings.optimizer.init(_params()),
    step=jnp.int32(0),
  )
  batch = jax.tree.map(jnp.asarray, _batch()[0])
  after, metrics = jax.jit(
    functools.partial(train_step.train_step, settings=settings)
  )(state, batch)
  value, clipped, gradient = _by_the_book(name)
  step = jax.tree.map(
    lambda x, y: np.asarray(x) - np.asarray(y), state.params, after.params
  )
  # Whole model: 1e-4 of what is there, as elsewhere.
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5),
    weights(step),
    gradient,
  )
  assert metrics["loss"] == pytest.approx(value, rel=1e-4, abs=1e-6)
  assert metrics["clip_fraction"] == pytest.approx(clipped, abs=1e-6)
  assert metrics["micro_batches"] == -(-len(KEPT) // micro_batch)


def test_some_is_clipped_and_some_is_not():
  # Guards the test above.
  for name in CHOICES:
    _, clipped, gradient = _by_the_book(name)
    assert 0.1 < clipped < 0.9
    assert max(np.abs(x).max() for x in jax.tree.leaves(gradient)) > 0.05
  one, other = (
    np.concatenate([x.ravel() for x in jax.tree.leaves(_by_the_book(name)[2])])
    for name in CHOICES
  )
  assert np.abs(one - other).max() > 1e-2
