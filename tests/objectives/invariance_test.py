"""What cannot change the loss of a batch, nor its gradient.

However the batch is split, sharded, padded, ordered or filled up with groups
that do not count, both numbers stay, for every loss x aggregation x
normalisation. The chain under test and its scalar loops are in `parts.py`.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from scalerl_jax.objectives import aggregation, logprobs, losses
from tests.objectives import parts
from tests.objectives.parts import (
  CLIP_MAX,
  EOS,
  HIGH,
  HOWS,
  LOSSES,
  LOW,
  MAX_TOKENS,
  NORMALIZATIONS,
  SPACE,
  B,
  D,
  Data,
  G,
  Outcome,
  T,
  V,
  six_groups,
)
from tests.reference import losses as reference_losses

every_choice = pytest.mark.parametrize(("loss", "how", "normalization"), SPACE)


def _on_devices(data, devices):
  """Rows shared out; of 8 devices each holds 3, and groups of 4 straddle."""
  mesh = jax.make_mesh(
    (devices,),
    ("data",),
    axis_types=(AxisType.Auto,),
    devices=jax.devices()[:devices],
  )
  with jax.set_mesh(mesh):
    sharded = jax.device_put(data, NamedSharding(mesh, PartitionSpec("data")))
    kernel = jax.device_put(
      parts.kernel_of_the_policy(), NamedSharding(mesh, PartitionSpec())
    )
    assert len(sharded.mask.sharding.device_set) == devices
    gradients, values = jax.jit(
      lambda kernel, data: parts.differentiate(
        kernel, data, *parts.prepare(data, True)
      )
    )(kernel, sharded)
  return Outcome(np.asarray(values), np.asarray(gradients))


@functools.cache
def _expected():
  return parts.slow_outcome(six_groups())


# What may happen to a batch. Each gives the outcome and what it should be.


def _same(change):
  return lambda: (parts.outcome(change(six_groups())), _expected())


def _padded(left, right):
  def pad(array, value):
    widths = [(0, 0), (left, right)] + [(0, 0)] * (array.ndim - 2)
    return np.pad(array, widths, constant_values=value)

  return _same(
    lambda data: data._replace(
      features=pad(data.features, 3.0),
      tokens=pad(data.tokens, EOS),
      mask=pad(data.mask, False),
      behavior_logps=pad(data.behavior_logps, -200.0),
    )
  )


def _garbage(data):
  """Anything in the places that do not count, forced tokens among them."""
  rng, pad = np.random.default_rng(5), ~data.mask
  return data._replace(
    features=np.where(
      pad[..., None],
      np.float32(50 * rng.standard_normal((B, T, D))),
      data.features,
    ),
    tokens=np.where(pad, np.int32(rng.integers(0, V, (B, T))), data.tokens),
    behavior_logps=np.where(
      pad, np.float32(rng.choice([-200.0, 200.0], (B, T))), data.behavior_logps
    ),
  )


def _pad_is_eos(data):
  return data._replace(tokens=np.where(data.mask, data.tokens, EOS))


def _shuffled_completions(data):
  rng = np.random.default_rng(8)
  rows = np.concatenate([g * G + rng.permutation(G) for g in range(B // G)])
  return Data(*(array[rows] for array in data))


def _dropped():
  """Groups that are constant or empty, beside never having had them."""
  expected = parts.slow_outcome(six_groups().take([0, 3, 5]))
  return parts.outcome(six_groups()), expected


def _without_group_3(emptied):
  """Rows of group 3 emptied: all of them, or until the rest is constant."""
  mask = six_groups().mask.copy()
  mask[[3 * G + row for row in emptied]] = False
  expected = parts.slow_outcome(six_groups().take([0, 5]))
  return parts.outcome(six_groups()._replace(mask=mask)), expected


def _extreme():
  """Log-ratios of ±200 nats, of completions pushed up and pushed down."""
  behavior_logps = six_groups().behavior_logps.copy()
  behavior_logps[0, 0] = behavior_logps[2, 1] = -201.0
  behavior_logps[1, 3] = behavior_logps[3, 0] = 200.0
  data = six_groups()._replace(behavior_logps=behavior_logps)
  outcome = parts.outcome(data)
  assert all(np.isfinite(numbers).all() for numbers in outcome)
  return outcome, parts.slow_outcome(data)


TRANSFORMATIONS = {
  **{
    f"micro_batches_of_{size}": lambda size=size: (
      parts.outcome(six_groups(), size=size),
      _expected(),
    )
    for size in (1, 2, 3, B)  # 1, 2 and 3 rows cut groups of four
  },
  **{
    f"devices_{n}": lambda n=n: (_on_devices(six_groups(), n), _expected())
    for n in (1, 2, 4, 8)
  },
  "padded_left": _padded(4, 0),
  "padded_right": _padded(0, 4),
  "padded_on_both_sides": _padded(1, 3),
  "any_padding": _same(_garbage),
  "pad_is_eos": _same(_pad_is_eos),
  "shuffled_groups": _same(lambda data: data.take([3, 1, 5, 0, 4, 2])),
  "shuffled_completions": _same(_shuffled_completions),
  "dropped_groups": _dropped,
  "an_emptied_group": lambda: _without_group_3(range(G)),
  "a_group_left_constant": lambda: _without_group_3([3]),
  "extreme_log_ratios": _extreme,
}


@functools.cache
def _case(transformation):
  return TRANSFORMATIONS[transformation]()


def _index(loss, how, normalization):
  return (
    list(LOSSES).index(loss),
    HOWS.index(how),
    NORMALIZATIONS.index(normalization),
  )


@every_choice
@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
def test_neither_loss_nor_gradient_changes(
  transformation, loss, how, normalization
):
  actual, expected = _case(transformation)
  at = _index(loss, how, normalization)
  for numbers, wanted in zip(actual, expected, strict=True):
    np.testing.assert_allclose(numbers[at], wanted[at], rtol=1e-5, atol=1e-6)


def _all_right(data):
  return data._replace(
    correct=np.ones_like(data.correct), rewards=np.ones(B, np.float32)
  )


def _right_ones_alone(data):
  """As after masking out what was truncated, were that all the wrong ones."""
  right = data.correct[:, None] == 1
  return data._replace(mask=data.mask & right)


def _nothing(data):
  return data._replace(mask=np.zeros_like(data.mask))


# (what happens to the batch, group size, zero-variance groups dropped)
UNUSABLE = {
  "every_group_dropped": (_all_right, G, True),
  "every_group_constant_and_kept": (_all_right, G, False),
  "every_group_left_constant": (_right_ones_alone, G, False),
  "nothing_in_the_mask": (_nothing, G, True),
  "groups_of_one_dropped": (lambda data: data, 1, True),
  "groups_of_one_kept": (lambda data: data, 1, False),
}


@functools.cache
def _unusable(name):
  change, size, drop = UNUSABLE[name]
  return parts.outcome(change(six_groups()), group_size=size, drop=drop)


@every_choice
@pytest.mark.parametrize("name", UNUSABLE)
def test_without_a_usable_group_loss_and_gradient_are_zero(
  name, loss, how, normalization
):
  at = _index(loss, how, normalization)
  for numbers in _unusable(name):
    assert (numbers[at] == 0.0).all()


def test_the_batch_exercises_what_it_should():
  # Guards the tests above: filtered groups, empty rows, ratios on both sides
  # of every clip, 48 gradients that are not 0 and differ from one another.
  data = six_groups()
  kernel = parts.kernel_of_the_policy().tolist()
  logps = reference_losses.linear_policy(
    data.features.tolist(), kernel, data.tokens.tolist()
  )
  kept = data.take([0, 3, 5])
  pushed_up = np.repeat(kept.correct[:, None] == 1, T, axis=1)[kept.mask]
  move = (np.asarray(logps) - data.behavior_logps).reshape(-1, G, T)
  move = move[[0, 3, 5]].reshape(-1, T)
  ratio = np.exp(move)[kept.mask]
  assert (ratio > CLIP_MAX).any()
  assert (pushed_up & (ratio > 1 + HIGH)).any()
  assert (~pushed_up & (ratio < 1 - LOW)).any()
  mean = (move * kept.mask).sum(axis=1) / np.maximum(kept.mask.sum(axis=1), 1)
  up = kept.correct == 1
  clipped = np.where(up, mean > np.log(1 + HIGH), mean < np.log(1 - LOW))
  assert clipped.any()
  assert (~clipped & kept.mask.any(axis=1)).any()
  assert not kept.mask.any(axis=1).all()
  gradients = _expected().gradients.reshape(len(SPACE), -1)
  assert (np.abs(gradients).max(axis=1) > 1e-2).all()
  for one, other in itertools.combinations(gradients, 2):
    assert np.abs(one - other).max() > 1e-4


def test_the_last_eos_learns_and_the_same_id_behind_it_does_not():
  # The mask says where a completion ends, no token id does.
  data = _pad_is_eos(six_groups())
  weights, pushes = parts.prepare_jitted(data, True)
  logits = jnp.asarray(
    np.random.default_rng(6).standard_normal((B, T, V)), jnp.float32
  )

  @jax.jit
  @jax.grad
  def gradient_of(logits):
    logps = logprobs.token_logps(logits, jnp.asarray(data.tokens))
    loss = losses.reinforce_loss(logps, pushes[0])
    return (weights[HOWS.index("token_average")] * loss).sum()

  gradient = gradient_of(logits)
  moved = np.abs(np.asarray(gradient)).max(axis=-1) > 0.0
  kept = np.repeat([True, False, False, True, False, True], G)
  assert (moved == (data.mask & kept[:, None])).all()
  assert (moved & (data.tokens == EOS)).any()


@pytest.mark.parametrize("scale", [0.01, 30.0])
def test_scale_and_shift_of_rewards_are_divided_out(scale):
  scaled = np.float32(scale * six_groups().rewards + 5.0)
  outcome = parts.outcome(six_groups()._replace(rewards=scaled))
  for numbers, wanted in zip(outcome, _expected(), strict=True):
    factor = np.ones((1, 1, 3, *([1] * (numbers.ndim - 3))))
    factor[:, :, NORMALIZATIONS.index("none")] = scale
    np.testing.assert_allclose(
      numbers, factor * wanted, rtol=1e-5, atol=2e-6 * max(scale, 1.0)
    )


@pytest.mark.parametrize("loss", LOSSES)
def test_doubling_max_tokens_halves_the_gradient_of_constant(loss):
  weights, pushes = parts.prepare_jitted(six_groups(), True)
  halved = aggregation.aggregation_weights(
    weights[0] > 0, group_size=G, how="constant", max_tokens=2 * MAX_TOKENS
  )
  # In the place of another average, in the program that there is.
  weights = np.concatenate([halved[None], weights[1:]])
  outcome = parts.differentiate_jitted(
    parts.kernel_of_the_policy(), six_groups(), weights, pushes
  )
  for numbers in outcome:
    half, _, _, whole = np.asarray(numbers)[list(LOSSES).index(loss)]
    assert np.abs(half).max() > 1e-3
    np.testing.assert_allclose(2 * half, whole, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("lengths", [(1, 2), (2, 2), (4, 2), (5, 1), (5, 5)])
def test_constant_is_token_average_only_at_one_length(lengths):
  # What a token's gradient is multiplied by: the same in every batch, or less
  # where completions are longer. With max_tokens = 3 the two meet in batches
  # of 6 tokens in 2 completions.
  mask = np.arange(T)[None] < np.array(lengths)[:, None]
  constant, average = (
    aggregation.aggregation_weights(
      jnp.asarray(mask), group_size=2, how=how, max_tokens=limit
    )
    for how, limit in (("constant", 3), ("token_average", None))
  )
  np.testing.assert_allclose(constant, mask / 6, rtol=1e-6)
  np.testing.assert_allclose(average, mask / sum(lengths), rtol=1e-6)
  assert np.allclose(constant, average, rtol=1e-6) == (sum(lengths) == 6)
