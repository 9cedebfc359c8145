"""What cannot change the loss of a batch, nor its gradient.

The whole chain on a linear softmax policy, correctness -> keep -> advantages ->
weights -> sum(weights * loss), beside the same chain as scalar loops: however
the batch is split, sharded, padded or ordered, both numbers stay.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from scalerl_jax.objectives import (
  advantages,
  aggregation,
  filters,
  logprobs,
  losses,
)
from tests.reference import advantages as reference_advantages
from tests.reference import aggregation as reference_aggregation
from tests.reference import losses as reference_losses

B, G, T, D, V = 24, 4, 5, 3, 7
CLIP_MAX = 2.0
MAX_TOKENS = 11
HOWS = ("sample_average", "prompt_average", "token_average", "constant")
# Every average with ScaleRL's normalisation, its average with the others.
RECIPES = (
  *((how, "batch_level") for how in HOWS),
  ("prompt_average", "prompt_level"),
  ("prompt_average", "none"),
)
EOS = V - 1


class Data(NamedTuple):
  """A batch of rollouts as the objectives see it; rows are completions."""

  features: np.ndarray  # [B, T, D] float32
  tokens: np.ndarray  # [B, T] int32
  mask: np.ndarray  # [B, T] bool
  behavior_logps: np.ndarray  # [B, T] float32, nats
  correct: np.ndarray  # [B] int32, 0 or 1
  rewards: np.ndarray  # [B] float32, ±1


def _kernel():
  return np.float32(np.random.default_rng(7).standard_normal((D, V)))


def _data():
  """Six groups of four: 1 and 4 constant, 2 with nothing in its mask."""
  rng = np.random.default_rng(0)
  features = np.float32(rng.standard_normal((B, T, D)))
  tokens = np.int32(rng.integers(0, EOS, (B, T)))
  lengths = np.resize([1, 5, 2, 4, 3, 0, 5], B)
  lengths[2 * G : 3 * G] = 0
  mask = np.arange(T)[None, :] < lengths[:, None]
  tokens[np.arange(B), np.maximum(lengths, 1) - 1] = EOS
  logps = reference_losses.linear_policy(
    features.tolist(), _kernel().tolist(), tokens.tolist()
  )
  gap = rng.standard_normal((B, T))
  correct = np.resize(np.int32([1, 0, 0, 1, 0, 1, 1]), B)
  correct[G : 2 * G] = 1
  correct[4 * G : 5 * G] = 0
  return Data(
    features=features,
    tokens=tokens,
    mask=mask,
    behavior_logps=np.float32(np.asarray(logps) - gap),
    correct=correct,
    rewards=np.float32(2 * correct - 1),
  )


@functools.partial(jax.jit, static_argnames=("how", "normalization", "size"))
def _prepare(data, how, normalization="batch_level", size=G):
  """(weights [B, T], advantages [B]) of the global batch, groups of `size`."""
  keep = filters.zero_variance_keep(data.correct, group_size=size)
  advantage = advantages.group_advantages(
    data.rewards, group_size=size, normalization=normalization, keep=keep
  )
  weights = aggregation.aggregation_weights(
    data.mask & keep[:, None],
    group_size=size,
    how=how,
    max_tokens=MAX_TOKENS if how == "constant" else None,
  )
  return weights, advantage


def _loss(kernel, features, tokens, behavior_logps, advantage, weights):
  logits = jnp.einsum("btd,dv->btv", features, kernel)
  logps = logprobs.token_logps(logits, tokens)
  token_loss = losses.cispo_loss(
    logps, behavior_logps, advantage, clip_max=CLIP_MAX
  )
  return (weights * token_loss).sum()


_loss_and_gradient = jax.jit(jax.value_and_grad(_loss))


def _outcome(data, how, normalization="batch_level", group_size=G, size=None):
  """Loss and gradient, accumulated over micro-batches of `size` rows."""
  weights, advantage = _prepare(data, how, normalization, group_size)
  rows = len(data.mask)
  size = rows if size is None else size
  value, gradient = 0.0, np.zeros((D, V))
  for start in range(0, rows, size):
    part = slice(start, start + size)
    part_value, part_gradient = _loss_and_gradient(
      jnp.asarray(_kernel()),
      jnp.asarray(data.features[part]),
      jnp.asarray(data.tokens[part]),
      jnp.asarray(data.behavior_logps[part]),
      advantage[part],
      weights[part],
    )
    value += float(part_value)
    gradient += np.asarray(part_gradient, np.float64)
  return value, gradient


def _expected(data, how, normalization="batch_level", group_size=G):
  """The same two numbers by scalar loops only."""
  kernel = np.asarray(_kernel(), np.float64).tolist()
  features = np.asarray(data.features, np.float64).tolist()
  tokens, mask = data.tokens.tolist(), data.mask.tolist()
  correct = data.correct.tolist()
  keep = []
  for start in range(0, len(correct), group_size):
    mean = sum(correct[start : start + group_size]) / group_size
    keep.extend([0.0 < mean < 1.0] * group_size)
  advantage = reference_advantages.group_advantages(
    data.rewards.tolist(), group_size, normalization, keep
  )
  weights = reference_aggregation.weights(
    [[m and k for m in row] for row, k in zip(mask, keep, strict=True)],
    group_size,
    how,
    MAX_TOKENS if how == "constant" else None,
  )
  values, slopes = reference_losses.cispo(
    reference_losses.linear_policy(features, kernel, tokens),
    np.asarray(data.behavior_logps, np.float64).tolist(),
    advantage,
    CLIP_MAX,
  )
  gradient = reference_losses.linear_policy_gradient(
    features,
    kernel,
    tokens,
    [
      [w * s for w, s in zip(weight_row, slope_row, strict=True)]
      for weight_row, slope_row in zip(weights, slopes, strict=True)
    ],
  )
  return reference_losses.total(weights, values), np.asarray(gradient)


@functools.cache
def _expected_of_the_batch(how):
  return _expected(_data(), how)


def _assert_same(actual, expected):
  value, gradient = actual
  expected_value, expected_gradient = expected
  np.testing.assert_allclose(value, expected_value, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-6)


def test_the_batch_exercises_what_it_should():
  # Guards the tests below: filtered groups, empty rows, ratios on both sides
  # of the cap, a gradient that is not 0.
  data = _data()
  logps = np.asarray(
    reference_losses.linear_policy(
      data.features.tolist(), _kernel().tolist(), data.tokens.tolist()
    )
  )
  ratio = np.exp(logps - data.behavior_logps)[data.mask]
  assert (ratio > CLIP_MAX).any()
  assert (ratio < 0.5).any()
  assert not data.mask.any(axis=1).all()
  for how in HOWS:
    assert np.abs(_expected_of_the_batch(how)[1]).max() > 1e-2


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("size", [1, 2, 3, B])
def test_micro_batches_change_neither_loss_nor_gradient(size, how):
  # 1, 2 and 3 rows cut groups of four in two.
  _assert_same(_outcome(_data(), how, size=size), _expected_of_the_batch(how))


@pytest.mark.parametrize(
  ("devices", "hows"),
  # One compilation a mesh and average takes a second: all averages on one.
  [*((n, ("prompt_average",)) for n in (1, 2, 4)), (8, HOWS)],
)
def test_devices_change_neither_loss_nor_gradient(devices, hows):
  # 8 devices hold 3 rows each, so that groups of four straddle them.
  mesh = jax.make_mesh(
    (devices,),
    ("data",),
    axis_types=(AxisType.Auto,),
    devices=jax.devices()[:devices],
  )

  @jax.jit
  def outcomes(kernel, data):
    result = {}
    for how in hows:
      weights, advantage = _prepare(data, how)
      result[how] = jax.value_and_grad(_loss)(
        kernel,
        data.features,
        data.tokens,
        data.behavior_logps,
        advantage,
        weights,
      )
    return result

  with jax.set_mesh(mesh):
    sharded = jax.device_put(
      _data(), NamedSharding(mesh, PartitionSpec("data"))
    )
    kernel = jax.device_put(_kernel(), NamedSharding(mesh, PartitionSpec()))
    assert len(sharded.mask.sharding.device_set) == devices
    actual = outcomes(kernel, sharded)
  for how in hows:
    _assert_same(actual[how], _expected_of_the_batch(how))


@pytest.mark.parametrize("how", HOWS)
def test_the_content_of_padding_is_irrelevant(how):
  data, rng = _data(), np.random.default_rng(5)
  pad = ~data.mask
  noise = np.float32(rng.choice([-200.0, 200.0], (B, T)))
  garbage = data._replace(
    features=np.where(
      pad[..., None],
      np.float32(50 * rng.standard_normal((B, T, D))),
      data.features,
    ),
    tokens=np.where(pad, np.int32(rng.integers(0, V, (B, T))), data.tokens),
    behavior_logps=np.where(pad, noise, data.behavior_logps),
  )
  _assert_same(_outcome(garbage, how), _expected_of_the_batch(how))


def test_the_amount_of_padding_is_irrelevant():
  left, right = 2, 4

  def pad(array, value):
    widths = [(0, 0), (left, right)] + [(0, 0)] * (array.ndim - 2)
    return np.pad(array, widths, constant_values=value)

  data = _data()
  padded = data._replace(
    features=pad(data.features, 3.0),
    tokens=pad(data.tokens, EOS),
    mask=pad(data.mask, False),
    behavior_logps=pad(data.behavior_logps, -200.0),
  )
  for how in HOWS:
    _assert_same(_outcome(padded, how), _expected_of_the_batch(how))


def test_pad_may_equal_eos():
  # The mask says where a completion ends; the last EOS in it learns, the
  # same id behind it does not.
  data = _data()
  same = data._replace(tokens=np.where(data.mask, data.tokens, EOS))
  other = data._replace(tokens=np.where(data.mask, data.tokens, 0))
  for how in HOWS:
    _assert_same(_outcome(same, how), _expected(other, how))

  weights, advantage = _prepare(same, "token_average")
  logits = jnp.asarray(
    np.random.default_rng(6).standard_normal((B, T, V)), jnp.float32
  )

  @jax.jit
  @jax.grad
  def gradient_of(logits):
    logps = logprobs.token_logps(logits, jnp.asarray(same.tokens))
    return (weights * losses.reinforce_loss(logps, advantage)).sum()

  gradient = gradient_of(logits)
  moved = np.abs(np.asarray(gradient)).max(axis=-1) > 0.0
  kept = np.repeat([True, False, True, True, False, True], G)
  assert (moved == (same.mask & kept[:, None])).all()
  assert (moved & (same.tokens == EOS)).any()


@pytest.mark.parametrize(("how", "normalization"), RECIPES)
def test_the_order_of_groups_and_of_completions_is_irrelevant(
  how, normalization
):
  data, rng = _data(), np.random.default_rng(8)
  rows = np.concatenate(
    [group * G + rng.permutation(G) for group in rng.permutation(B // G)]
  )
  shuffled = Data(*(array[rows] for array in data))
  _assert_same(
    _outcome(shuffled, how, normalization), _expected(data, how, normalization)
  )


@pytest.mark.parametrize(("how", "normalization"), RECIPES)
def test_dropping_a_group_equals_never_having_had_it(how, normalization):
  # Groups 1 and 4 are constant and filtered, group 2 has nothing in its mask.
  # Its rewards still count for batch_level, so it goes only where it is inert.
  data = _data()
  absent = [1, 4] if normalization == "batch_level" else [1, 2, 4]
  rows = np.flatnonzero(~np.isin(np.arange(B) // G, absent))
  never = Data(*(array[rows] for array in data))
  _assert_same(
    _outcome(data, how, normalization), _expected(never, how, normalization)
  )


@pytest.mark.parametrize("how", HOWS)
def test_extreme_log_ratios_leave_the_rest_of_the_batch_alone(how):
  data = _data()
  behavior_logps = data.behavior_logps.copy()
  behavior_logps[0, 0] = -201.0
  behavior_logps[1, 3] = 200.0
  extreme = data._replace(behavior_logps=behavior_logps)
  value, gradient = _outcome(extreme, how)
  assert np.isfinite(value)
  assert np.isfinite(gradient).all()
  _assert_same((value, gradient), _expected(extreme, how))


@pytest.mark.parametrize(("how", "normalization"), RECIPES)
def test_a_batch_without_a_usable_group_has_loss_and_gradient_zero(
  how, normalization
):
  data = _data()
  all_right = data._replace(
    correct=np.ones((B,), np.int32), rewards=np.ones((B,), np.float32)
  )
  nothing = data._replace(mask=np.zeros((B, T), bool))
  for unusable in (all_right, nothing):
    value, gradient = _outcome(unusable, how, normalization)
    assert value == 0.0
    assert (gradient == 0.0).all()


def test_groups_of_one_completion_have_loss_and_gradient_zero():
  value, gradient = _outcome(_data(), "prompt_average", group_size=1)
  assert value == 0.0
  assert (gradient == 0.0).all()


@pytest.mark.parametrize("how", HOWS)
def test_the_scale_of_rewards_is_irrelevant_at_batch_level(how):
  data = _data()
  for scale in (0.01, 30.0):
    scaled = data._replace(rewards=np.float32(scale * data.rewards + 5.0))
    _assert_same(_outcome(scaled, how), _expected_of_the_batch(how))
