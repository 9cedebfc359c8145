"""One update against an independent one, row by row, from the equations."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scalerl_jax.config import LossConfig
from scalerl_jax.learning import train_step
from scalerl_jax.learning.learner import Learner
from scalerl_jax.models.sharding import make_mesh, replicated
from scalerl_jax.types import Batch
from tests.helpers import SGD, SHAPE, V, equations, small_policy, weights
from tests.reference import advantages as reference_advantages
from tests.reference import aggregation as reference_aggregation
from tests.reference import transformer as reference

ONE_LAYER = dataclasses.replace(SHAPE, num_layers=1)
B, G, T, TOP_K = 16, 4, 8, 5
# Groups: one right of four, none, three of four, all. The second and the
# fourth have nothing to say.
CORRECT = np.array([0, 1, 0, 0] + [0] * 4 + [1, 1, 0, 1] + [1] * 4, np.int32)
KEPT = np.array([True] * 4 + [False] * 4 + [True] * 4 + [False] * 4)
PROMPT = np.resize([1, 3, 2, 3], B // G).repeat(G)
COMPLETION = np.resize([5, 1, 3, 2, 4, 5, 1], B)
COOL = (("temperature", 0.6), ("top_k", TOP_K))


def _warped(logits, warp):
  """Scaled and cut, in numpy."""
  options = dict(warp)
  logits = np.asarray(logits, np.float64) / options.get("temperature", 1.0)
  if options.get("top_k"):
    border = np.sort(logits)[-options["top_k"]]
    logits = np.where(logits < border, -np.inf, logits)
  return logits


def _batch(warp=(), *, gap=1.0):
  """Completions out of the five likeliest words, with recorded log-probs.

  Ids of prompts and of padding are any; `gap` is how far the policy has moved
  since the tokens were drawn, in nats.
  """
  rng = np.random.default_rng(0)
  table = weights(nnx.state(small_policy(ONE_LAYER)))
  tokens = rng.integers(0, V, (B, T)).astype(np.int32)
  segments, logps = np.zeros((B, T), np.int32), np.zeros((B, T), np.float32)
  mask = np.zeros((B, T), bool)
  for b in range(B):
    sequence, hidden = reference.Sequence(ONE_LAYER), None
    end = PROMPT[b] + COMPLETION[b]
    for t in range(end):
      if t >= PROMPT[b]:
        row = _warped(reference.logits(table, hidden), warp)
        tokens[b, t] = np.argsort(row)[-1 - rng.integers(TOP_K)]
        logps[b, t] = reference.log_softmax(row)[tokens[b, t]]
        mask[b, t] = True
      hidden = sequence.read(table, tokens[b, t])
    segments[b, :end] = 1
  mask[0, PROMPT[0] + 1] = False  # a forced token
  moved = logps - gap * rng.standard_normal((B, T))
  return Batch(
    tokens=tokens,
    segment_ids=segments,
    mask=mask,
    behavior_logps=np.where(mask, moved, 0.0).astype(np.float32),
    correct=CORRECT,
    rewards=np.where(CORRECT, 1.0, -1.0).astype(np.float32),
  ), logps


def _settings(
  *, micro_batch=B, loss=None, warp=(), optimizer=None, width_buckets=1
):
  # Plain gradient descent: the change of the parameters is the gradient, with
  # its size, which Adam would hide.
  return train_step.TrainSettings(
    policy=nnx.graphdef(small_policy(ONE_LAYER)),
    optimizer=optimizer or SGD,
    loss=loss or LossConfig(),
    warp=warp,
    group_size=G,
    micro_batch=micro_batch,
    max_completion_tokens=T,
    width_buckets=width_buckets,
  )


class Updates:
  """A learner that always starts from the same parameters."""

  def __init__(self, settings, devices=1):
    mesh = make_mesh(jax.devices()[:devices])
    params = nnx.state(small_policy(ONE_LAYER))
    self.learner = Learner(
      jax.device_put(params, replicated(mesh)), settings, mesh
    )
    self.before = jax.tree.map(np.array, self.learner.state)

  def __call__(self, batch):
    """(what was taken off the parameters, metrics) of one update."""
    self.learner.load_state(
      jax.tree.map(
        lambda x, like: jax.device_put(x, like.sharding),
        self.before,
        self.learner.state,
      )
    )
    self.learner.start(batch)
    metrics = self.learner.collect()
    step = jax.tree.map(
      lambda x, y: x - np.asarray(y),
      self.before.params,
      self.learner.state.params,
    )
    return weights(step), metrics


@pytest.fixture(scope="module")
def updates():
  """The whole batch at once, two rows on each of eight devices."""
  return Updates(_settings(), devices=8)


@functools.cache
def _row_gradient(warp):
  """d Σ_t slope_t · log π_t / d parameters of one row, compiled once."""
  graph = nnx.graphdef(small_policy(ONE_LAYER))
  options = dict(warp)

  @jax.jit
  @jax.grad
  def gradient(params, tokens, segments, slopes):
    logits = nnx.merge(graph, params)(tokens[None], segment_ids=segments[None])
    logits = logits[0, :-1] / options.get("temperature", 1.0)
    if options.get("top_k"):
      border = jnp.sort(logits, axis=-1)[:, -options["top_k"], None]
      logits = jnp.where(logits < border, -1e9, logits)
    logps = jax.nn.log_softmax(logits)[jnp.arange(T - 1), tokens[1:]]
    return jnp.where(slopes[1:] == 0.0, 0.0, slopes[1:] * logps).sum()

  return gradient


def _slow(batch, logps, loss, warp=(), *, silent=()):
  """The gradient of the kept groups alone, but for `silent` (row, token)."""
  kept = jax.tree.map(lambda x: x[KEPT], batch)
  advantages = reference_advantages.group_advantages(
    kept.rewards.tolist(), G, loss.normalization
  )
  shares = reference_aggregation.weights(
    kept.mask.tolist(), G, loss.aggregation
  )
  ratio = np.exp(logps[KEPT] - kept.behavior_logps)
  factor = np.minimum(ratio, loss.clip_max) if loss.name == "cispo" else 1.0
  slopes = -np.float64(advantages)[:, None] * np.float64(shares) * factor
  for row, token in silent:
    slopes[row, token] = 0.0
  gradient = _row_gradient(warp)
  params = nnx.state(small_policy(ONE_LAYER))
  total = None
  for row in range(KEPT.sum()):
    part = weights(
      gradient(
        params,
        jnp.asarray(kept.tokens[row]),
        jnp.asarray(kept.segment_ids[row]),
        jnp.asarray(slopes[row], jnp.float32),
      )
    )
    total = part if total is None else jax.tree.map(np.add, total, part)
  return total


def _close(actual, expected, bound=1e-5):
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=bound),
    actual,
    expected,
  )


@pytest.fixture(scope="module")
def slow():
  """The batch and its gradient by the book, for ScaleRL's loss."""
  batch, logps = _batch()
  gradient = _slow(batch, logps, LossConfig())
  assert max(np.abs(x).max() for x in jax.tree.leaves(gradient)) > 0.05
  return batch, logps, gradient


def test_an_update_is_the_gradient_of_the_kept_groups_alone(updates, slow):
  batch, _, expected = slow
  gradient, metrics = updates(batch)
  _close(gradient, expected)
  norm = np.sqrt(sum((x**2).sum() for x in jax.tree.leaves(expected)))
  assert metrics["gradient_norm"] == pytest.approx(norm, rel=1e-4)
  assert metrics["effective_batch"] == KEPT.sum()
  assert metrics["kept_tokens"] == batch.mask[KEPT].sum()


@pytest.mark.parametrize(("micro_batch", "devices"), [(1, 1), (2, 2), (4, 4)])
def test_micro_batches_and_devices_change_nothing(slow, micro_batch, devices):
  batch, _, expected = slow
  gradient, metrics = Updates(_settings(micro_batch=micro_batch), devices)(
    batch
  )
  _close(gradient, expected)
  assert metrics["micro_batches"] == -(-KEPT.sum() // micro_batch)


@pytest.mark.parametrize(
  ("micro_batch", "devices", "count"), [(2, 1, 3), (4, 4, T), (B, 2, 2)]
)
def test_widths_of_rows_change_nothing(slow, micro_batch, devices, count):
  batch, _, expected = slow
  settings = _settings(micro_batch=micro_batch, width_buckets=count)
  gradient, metrics = Updates(settings, devices)(batch)
  _close(gradient, expected)
  assert metrics["kept_tokens"] == batch.mask[KEPT].sum()
  # No row is computed in vain but those that fill up a micro-batch.
  assert (
    metrics["computed_tokens"] <= micro_batch * T * metrics["micro_batches"]
  )


def test_dropped_and_padded_tokens_have_no_say(updates, slow):
  batch, _, expected = slow
  rng = np.random.default_rng(7)
  tokens, behavior = batch.tokens.copy(), batch.behavior_logps.copy()
  nowhere = batch.segment_ids == 0
  tokens[nowhere] = rng.integers(0, V, nowhere.sum())
  tokens[~KEPT] = rng.integers(0, V, (B - KEPT.sum(), T))
  behavior[~KEPT] = -30.0
  gradient, _ = updates(
    dataclasses.replace(batch, tokens=tokens, behavior_logps=behavior)
  )
  _close(gradient, expected)


def test_chunks_of_logits_change_nothing_and_bound_them(updates, slow):
  batch, _, expected = slow
  params = nnx.state(small_policy(ONE_LAYER))

  def step(chunk):
    settings = _settings(micro_batch=4, loss=LossConfig(logprob_chunk=chunk))
    state = train_step.LearnerState(
      params=params,
      optimizer=settings.optimizer.init(params),
      step=jnp.int32(0),
    )
    arguments = state, jax.tree.map(jnp.asarray, batch)
    return functools.partial(
      train_step.train_step, settings=settings
    ), arguments

  def widest(chunk):
    """Numbers of the largest traced array with a vocabulary in its shape."""
    function, arguments = step(chunk)
    return max(
      math.prod(variable.aval.shape)
      for equation in equations(jax.make_jaxpr(function)(*arguments).jaxpr)
      for variable in equation.outvars
      if V in variable.aval.shape
    )

  chunk = 12  # three of the eight columns of a micro-batch's rows
  assert widest(0) >= 4 * (T - 1) * V
  bound = max(chunk, ONE_LAYER.width) * V  # the table is [V, D]
  assert widest(chunk) <= bound
  function, arguments = step(chunk)
  compiled = jax.jit(function).lower(*arguments).compile()
  shapes = [
    [int(size) for size in shape.split(",")]
    for shape in re.findall(r"f32\[([\d,]+)\]", compiled.as_text())
  ]
  assert max(math.prod(shape) for shape in shapes if V in shape) <= bound
  after, metrics = compiled(*arguments)
  gradient = jax.tree.map(
    lambda x, y: np.asarray(x) - np.asarray(y), params, after.params
  )
  _close(weights(gradient), expected)
  _, whole = updates(batch)
  for name in ("loss", "entropy", "ratio_max", "logp_gap_mean"):
    assert metrics[name] == pytest.approx(whole[name], rel=1e-5), name


def test_metrics_of_a_stale_batch_are_its_own(updates, slow):
  batch, logps, _ = slow
  _, metrics = updates(batch)
  counted = batch.mask & KEPT[:, None]
  gap = (logps - batch.behavior_logps)[counted]
  ratio = np.exp(gap)
  for name, expected in (
    ("ratio_mean", ratio.mean()),
    ("ratio_max", ratio.max()),
    ("ratio_min", ratio.min()),
    ("clip_fraction", (ratio > LossConfig().clip_max).mean()),
    ("logp_gap_mean", np.abs(gap).mean()),
    ("logp_gap_max", np.abs(gap).max()),
  ):
    assert metrics[name] == pytest.approx(expected, rel=1e-4), name
  assert metrics["clip_fraction"] > 0.0
  table, spread = weights(nnx.state(small_policy(ONE_LAYER))), []
  for b in np.flatnonzero(KEPT):
    rows = reference.forward(table, ONE_LAYER, batch.tokens[b])
    for t in np.flatnonzero(counted[b]):
      row = reference.log_softmax(rows[t - 1])
      spread.append(-(np.exp(row) * row).sum())
  assert metrics["entropy"] == pytest.approx(np.mean(spread), rel=1e-4)


def test_on_policy_ratios_are_one_and_the_gap_is_none(updates):
  batch, _ = _batch(gap=0.0)
  _, metrics = updates(batch)
  for name in ("ratio_mean", "ratio_max", "ratio_min"):
    assert metrics[name] == pytest.approx(1.0, abs=1e-4)
  assert 0.0 <= metrics["logp_gap_max"] <= 1e-4
  assert metrics["clip_fraction"] == 0.0


def test_ratios_are_anchored_on_the_recorded_log_probs(updates):
  batch, _ = _batch(gap=0.0)
  on_policy, _ = updates(batch)
  halved = np.where(batch.mask, batch.behavior_logps + np.log(2.0), 0.0)
  stale, metrics = updates(
    dataclasses.replace(batch, behavior_logps=np.float32(halved))
  )
  assert metrics["ratio_mean"] == pytest.approx(0.5, rel=1e-4)
  _close(stale, jax.tree.map(lambda x: 0.5 * x, on_policy))


def test_reinforce_knows_no_ratio_and_the_learner_cools_and_cuts_too():
  loss = LossConfig(
    name="reinforce", aggregation="token_average", normalization="none"
  )
  batch, logps = _batch(COOL)
  apply = Updates(_settings(loss=loss, warp=COOL))
  gradient, metrics = apply(batch)
  _close(gradient, _slow(batch, logps, loss, COOL))
  plain = _slow(batch, logps, loss)
  difference = jax.tree.map(lambda x, y: np.abs(x - y).max(), gradient, plain)
  assert max(jax.tree.leaves(difference)) > 1e-2
  # Prompts and padding hold words that are cut: what weighs nothing must add
  # nothing, not 0 · (-inf).
  assert np.isfinite(metrics["loss"])
  # A stale token that today's policy would not draw has no gradient.
  tokens, last = batch.tokens.copy(), PROMPT[0] + COMPLETION[0] - 1
  table = weights(nnx.state(small_policy(ONE_LAYER)))
  logits = reference.forward(table, ONE_LAYER, tokens[0, :last])[-1]
  tokens[0, last] = np.argmin(logits)
  stale = dataclasses.replace(batch, tokens=tokens)
  gradient, metrics = apply(stale)
  assert np.isfinite(metrics["loss"])
  _close(gradient, _slow(stale, logps, loss, COOL, silent=[(0, last)]))


@pytest.mark.parametrize("correct", [0, 1])
def test_a_batch_with_nothing_kept_is_skipped(updates, correct):
  batch, _ = _batch()
  empty = dataclasses.replace(
    batch,
    correct=np.full(B, correct, np.int32),
    rewards=np.full(B, 2.0 * correct - 1.0, np.float32),
  )
  gradient, metrics = updates(empty)
  assert not any(x.any() for x in jax.tree.leaves(gradient))
  assert metrics["skipped"] == 1.0
  assert metrics["effective_batch"] == metrics["micro_batches"] == 0.0
  assert metrics["loss"] == metrics["gradient_norm"] == 0.0
  assert all(np.isfinite(value) for value in metrics.values())
  assert int(updates.learner.state.step) == 1


def test_a_group_without_a_mask_is_a_group_never_had(updates, slow):
  batch, _, expected = slow
  # The dropped groups turn mixed, and nothing of them counts.
  correct = np.where(KEPT, CORRECT, np.arange(B) % 2).astype(np.int32)
  cleared = dataclasses.replace(
    batch,
    correct=correct,
    rewards=np.where(correct, 1.0, -1.0).astype(np.float32),
    mask=batch.mask & KEPT[:, None],
  )
  gradient, metrics = updates(cleared)
  _close(gradient, expected)
  assert metrics["effective_batch"] == KEPT.sum()


@pytest.mark.parametrize(
  ("aggregation", "normalization", "zero_variance"),
  [
    ("prompt_average", "batch_level", "drop"),
    ("sample_average", "prompt_level", "keep"),
    ("token_average", "batch_level", "keep"),
    ("constant", "none", "drop"),
  ],
)
def test_weights_are_those_of_the_whole_batch(
  aggregation, normalization, zero_variance
):
  batch, _ = _batch()
  loss = LossConfig(
    aggregation=aggregation,
    normalization=normalization,
    zero_variance=zero_variance,
  )
  advantages, shares, keep = train_step.global_weights(
    jax.device_put(batch), _settings(loss=loss)
  )
  kept = KEPT if zero_variance == "drop" else np.ones(B, bool)
  np.testing.assert_array_equal(keep, kept)
  alone = jax.tree.map(lambda x: x[kept], batch)
  expected = reference_advantages.group_advantages(
    alone.rewards.tolist(), G, normalization
  )
  np.testing.assert_allclose(advantages[kept], expected, rtol=1e-5, atol=1e-6)
  limit = T if aggregation == "constant" else None
  expected = reference_aggregation.weights(
    alone.mask.tolist(), G, aggregation, limit
  )
  np.testing.assert_allclose(shares[kept], expected, rtol=1e-5, atol=1e-6)
  assert not np.asarray(shares[~kept]).any()
  assert not np.asarray(advantages[~kept]).any()


def test_every_loss_is_reachable_and_they_differ():
  logps = jnp.array([[-1.0, -2.0, -0.5]])
  behavior = jnp.array([[-3.0, -1.0, -0.5]])
  batch = Batch(
    tokens=jnp.zeros((1, 3), jnp.int32),
    segment_ids=jnp.ones((1, 3), jnp.int32),
    mask=jnp.ones((1, 3), bool),
    behavior_logps=behavior,
    correct=jnp.ones((1,), jnp.int32),
    rewards=jnp.ones((1,)),
  )
  slopes = {
    name: jax.grad(
      lambda x, loss=loss, name=name: loss(
        x, batch, jnp.array([0.5]), LossConfig(name=name, clip_high=3.0)
      ).sum()
    )(logps).tolist()
    for name, loss in train_step.LOSSES.items()
  }
  assert len(slopes) == len({str(value) for value in slopes.values()})
  np.testing.assert_allclose(slopes["reinforce"], [[-0.5, -0.5, -0.5]])
  np.testing.assert_allclose(
    slopes["cispo"], [[-2.0, -0.5 * np.exp(-1.0), -0.5]], rtol=1e-6
  )
  # ρ = e², e⁻¹, 1: the first is above 4 and pushed up, so it learns no more.
  np.testing.assert_allclose(
    slopes["clipped_surrogate"], [[0.0, -0.5 * np.exp(-1.0), -0.5]], rtol=1e-6
  )
  # s = exp(mean of 2, −1, 0), the same for all tokens.
  np.testing.assert_allclose(
    slopes["gspo"], [[-0.5 * np.exp(1 / 3)] * 3], rtol=1e-6
  )
