"""The warm start's loss against loops, its schedule, and that it learns."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scalerl_jax.config import SupervisedConfig
from scalerl_jax.data.tasks import load_task
from scalerl_jax.learning.supervised import (
  cross_entropy,
  supervised_optimizer,
  train_supervised,
)
from scalerl_jax.models.sharding import make_mesh
from tests.helpers import SHAPE, V, small_policy
from tests.runs import TINY

ONE_LAYER = dataclasses.replace(SHAPE, num_layers=1)
N, T = 3, 7


@functools.cache
def _loss():
  """(policy, its compiled `cross_entropy`)."""
  policy = small_policy(ONE_LAYER)
  return policy, jax.jit(lambda *texts: cross_entropy(policy, *texts))


@pytest.fixture
def texts():
  """(tokens, mask, lengths): prompts of several lengths, some padding."""
  rng = np.random.default_rng(0)
  lengths = np.array([7, 4, 5], np.int32)
  columns = np.arange(T)
  mask = (columns >= [[2], [1], [3]]) & (columns < lengths[:, None])
  return rng.integers(0, V, (N, T)).astype(np.int32), mask, lengths


def _reference(policy, tokens, mask, lengths):
  """Mean of −log p over the tokens in the mask, a token at a time."""
  # Causal: what stands after a text does not reach into it.
  logits = np.asarray(jax.jit(policy)(jnp.asarray(tokens)), np.float64)
  nats = []
  for row in range(N):
    for t in range(1, lengths[row]):
      if mask[row, t]:
        before = logits[row, t - 1]
        spread = np.exp(before - before.max())
        nats.append(-np.log(spread[tokens[row, t]] / spread.sum()))
  return np.mean(nats)


def test_cross_entropy_is_the_mean_over_the_mask(texts):
  policy, loss = _loss()
  found = loss(*map(jnp.asarray, texts))
  np.testing.assert_allclose(found, _reference(policy, *texts), rtol=1e-5)


@pytest.mark.parametrize("padding", [0, V - 1])
def test_padding_changes_nothing(texts, padding):
  _, loss = _loss()
  tokens, mask, lengths = texts
  other = np.where(np.arange(T) < lengths[:, None], tokens, padding)
  one, two = (
    loss(*map(jnp.asarray, (x, mask, lengths))) for x in (tokens, other)
  )
  np.testing.assert_allclose(one, two, rtol=1e-5)


def test_no_token_in_the_mask_is_no_loss(texts):
  _, loss = _loss()
  tokens, mask, lengths = map(jnp.asarray, texts)
  assert loss(tokens, jnp.zeros_like(mask), lengths) == 0.0


def _rates(config):
  """The size of each update of a parameter whose gradient is constant."""
  optimizer = supervised_optimizer(config)
  # Far smaller than the clip, so that Adam's ratio is 1 and no decay shows.
  params, gradient = jnp.zeros(()), jnp.asarray(0.5)
  state = optimizer.init(params)
  rates = []
  for _ in range(config.steps):
    update, state = optimizer.update(gradient, state, params)
    rates.append(-float(update))
  return np.array(rates)


def test_the_rate_rises_then_falls_to_nothing():
  config = SupervisedConfig(steps=40, learning_rate=0.3, warmup_fraction=0.25)
  rates = _rates(config)
  steps = np.arange(40)
  cosine = 0.15 * (1 + np.cos(np.pi * (steps - 10) / 30))
  wanted = np.where(steps < 10, 0.03 * steps, cosine)
  np.testing.assert_allclose(rates, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_shortest_warm_starts_have_a_schedule(steps):
  rates = _rates(SupervisedConfig(steps=steps))
  assert np.isfinite(rates).all()


@pytest.fixture(scope="module")
def task():
  return load_task(TINY.task, TINY.supervised, max_prompt_tokens=5)


def _trained(task, mesh, steps=20):
  """(parameters before, (steps done, parameters, loss) of some steps)."""
  config = dataclasses.replace(TINY.supervised, steps=20)
  vocab = task.tokenizer.vocab_size
  policy = small_policy(TINY.model, vocab_size=vocab, mesh=mesh)
  graph, params = nnx.split(policy)
  before = jax.tree.map(np.array, params)
  training = train_supervised(graph, params, config, task.supervised(), mesh)
  told = [
    (done, jax.tree.map(np.array, trained), float(loss))
    for done, trained, loss in itertools.islice(training, steps)
  ]
  # The caller's parameters were copied, not donated.
  jax.tree.map(np.testing.assert_array_equal, params, before)
  return before, told


@pytest.fixture(scope="module")
def one_device(task):
  return _trained(task, make_mesh())


def test_the_loss_falls(task, one_device):
  before, told = one_device
  assert [done for done, *_ in told] == list(range(1, 21))
  losses = [loss for *_, loss in told]
  uniform = np.log(task.tokenizer.vocab_size)
  assert losses[0] > 0.9 * uniform
  assert np.mean(losses[-4:]) < 0.6 * np.mean(losses[:4])
  # The first step has rate 0, later ones move every weight.
  jax.tree.map(np.testing.assert_array_equal, told[0][1], before)
  for new, old in zip(
    jax.tree.leaves(told[-1][1]), jax.tree.leaves(before), strict=True
  ):
    assert (new != old).any()


def test_devices_share_a_batch_and_give_the_same_losses(task, one_device):
  _, two = _trained(task, make_mesh(jax.local_devices()[:2]), 4)
  np.testing.assert_allclose(
    [loss for *_, loss in two],
    [loss for *_, loss in one_device[1][:4]],
    rtol=1e-4,
  )
