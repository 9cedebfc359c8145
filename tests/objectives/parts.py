"""The objectives put together, and the same put together from scalar loops.

Correctness -> keep -> advantages -> weights -> sum(weights * loss) of a linear
softmax policy, value and gradient, for every loss x aggregation x
normalisation.
"""

import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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
from tests.reference import surrogates as reference_surrogates

B, G, T, D, V = 24, 4, 5, 3, 7
CLIP_MAX, LOW, HIGH = 2.0, 0.2, 0.26
MAX_TOKENS = 11
EOS = V - 1
HOWS = ("sample_average", "prompt_average", "token_average", "constant")
NORMALIZATIONS = ("prompt_level", "batch_level", "none")
# Of log π, log μ, Â and the mask.
LOSSES = {
  "cispo": lambda logps, behavior_logps, advantage, mask: losses.cispo_loss(
    logps, behavior_logps, advantage, clip_max=CLIP_MAX
  ),
  "clipped_surrogate": lambda logps, behavior_logps, advantage, mask: (
    losses.clipped_surrogate_loss(
      logps, behavior_logps, advantage, clip_low=LOW, clip_high=HIGH
    )
  ),
  "gspo": lambda logps, behavior_logps, advantage, mask: losses.gspo_loss(
    logps, behavior_logps, advantage, mask, clip_low=LOW, clip_high=HIGH
  ),
  "reinforce": lambda logps, behavior_logps, advantage, mask: (
    losses.reinforce_loss(logps, advantage)
  ),
}
SPACE = list(itertools.product(LOSSES, HOWS, NORMALIZATIONS))


class Data(NamedTuple):
  """A batch of rollouts as the objectives see it; rows are completions."""

  features: np.ndarray  # [B, T, D] float32
  tokens: np.ndarray  # [B, T] int32
  mask: np.ndarray  # [B, T] bool
  behavior_logps: np.ndarray  # [B, T] float32, nats
  correct: np.ndarray  # [B] int32, 0 or 1
  rewards: np.ndarray  # [B] float32, ±1

  def take(self, groups):
    """The same groups in another order, or fewer of them."""
    rows = [group * G + sample for group in groups for sample in range(G)]
    return Data(*(array[rows] for array in self))


class Outcome(NamedTuple):
  """Value and gradient of each loss x aggregation x normalisation."""

  values: np.ndarray  # [4, 4, 3]
  gradients: np.ndarray  # [4, 4, 3, D, V]


def kernel_of_the_policy():
  return np.float32(np.random.default_rng(7).standard_normal((D, V)))


@functools.cache
def six_groups():
  """Six groups of four: 1 and 4 constant, 2 with nothing in its mask.

  A row of group 3 is empty, and two rows have a forced token in their middle.
  """
  rng = np.random.default_rng(0)
  features = np.float32(rng.standard_normal((B, T, D)))
  tokens = np.int32(rng.integers(0, EOS, (B, T)))
  lengths = np.resize([1, 5, 2, 4, 3, 0, 5], B)
  lengths[2 * G : 3 * G] = 0
  mask = np.arange(T)[None, :] < lengths[:, None]
  mask[1, 2] = mask[13, 1] = False  # forced tokens
  tokens[np.arange(B), np.maximum(lengths, 1) - 1] = EOS
  logps = reference_losses.linear_policy(
    features.tolist(), kernel_of_the_policy().tolist(), tokens.tolist()
  )
  gap = rng.standard_normal((B, T))
  correct = np.resize(np.int32([1, 0, 0, 1, 0, 1, 1]), B)
  correct[G : 2 * G] = 1
  correct[4 * G : 5 * G] = 0
  correct[5 * G :] = [0, 1, 0, 0]
  return Data(
    features=features,
    tokens=tokens,
    mask=mask,
    behavior_logps=np.float32(np.asarray(logps) - gap),
    correct=correct,
    rewards=np.float32(2 * correct - 1),
  )


# The chain under test: all 48 choices in one program, so that a shape is
# compiled once.


def prepare(data, drop, *, group_size=G):
  """Weights [4, B, T] and advantages [3, B] of the global batch."""
  counted = data.mask.any(axis=1)
  varies = filters.zero_variance_keep(
    data.correct, group_size=group_size, counted=counted
  )
  keep = counted & (varies | jnp.logical_not(drop))
  weights = [
    aggregation.aggregation_weights(
      data.mask & keep[:, None],
      group_size=group_size,
      how=how,
      max_tokens=MAX_TOKENS if how == "constant" else None,
    )
    for how in HOWS
  ]
  pushes = [
    advantages.group_advantages(
      data.rewards, group_size=group_size, normalization=name, keep=keep
    )
    for name in NORMALIZATIONS
  ]
  return jnp.stack(weights), jnp.stack(pushes)


def _losses(kernel, part, weights, pushes):
  """Σ weights · token loss, [losses, aggregations, normalisations], twice."""
  logits = jnp.einsum("btd,dv->btv", part.features, kernel)
  logps = logprobs.token_logps(logits, part.tokens)
  table = jnp.stack(
    [
      jax.vmap(loss, in_axes=(None, None, 0, None))(
        logps, part.behavior_logps, pushes, part.mask
      )
      for loss in LOSSES.values()
    ]
  )
  values = jnp.einsum("hbt,lnbt->lhn", weights, table)
  return values, values


differentiate = jax.jacrev(_losses, has_aux=True)
prepare_jitted = jax.jit(prepare, static_argnames="group_size")
differentiate_jitted = jax.jit(differentiate)


def outcome(data, *, size=B, group_size=G, drop=True):
  """Accumulated over micro-batches of `size` rows, in float64."""
  weights, pushes = prepare_jitted(data, drop, group_size=group_size)
  values, gradients = 0.0, 0.0
  for start in range(0, B, size):
    rows = slice(start, start + size)
    gradient, value = differentiate_jitted(
      kernel_of_the_policy(),
      Data(*(array[rows] for array in data)),
      weights[:, rows],
      pushes[:, rows],
    )
    values = values + np.asarray(value, np.float64)
    gradients = gradients + np.asarray(gradient, np.float64)
  return Outcome(values, gradients)


# The same by scalar loops.


def _slow_advantages(data, keep, normalization):
  """Of the kept completions alone, each group beside its own."""
  result, kept = [0.0] * len(keep), []
  for start in range(0, len(keep), G):
    rows = [row for row in range(start, start + G) if keep[row]]
    if rows:
      rewards = [float(data.rewards[row]) for row in rows]
      how = "prompt_level" if normalization == "prompt_level" else "none"
      alone = reference_advantages.group_advantages(rewards, len(rows), how)
      kept += alone
      for row, value in zip(rows, alone, strict=True):
        result[row] = value
  if normalization == "batch_level":
    std = reference_advantages.population_std(kept)
    result = [value / std for value in result]
  return result


def _slow_loss(loss, logps, behavior_logps, advantage, mask, weights):
  """Σ w·loss, and its derivative by each log π."""
  if loss == "reinforce":
    values, slopes = reference_losses.reinforce(logps, advantage)
  elif loss == "cispo":
    values, slopes = reference_losses.cispo(
      logps, behavior_logps, advantage, CLIP_MAX
    )
  elif loss == "clipped_surrogate":
    values, slopes = reference_surrogates.surrogate(
      logps, behavior_logps, advantage, LOW, HIGH
    )
  else:
    values, slopes = reference_surrogates.gspo(
      logps, behavior_logps, advantage, mask, LOW, HIGH
    )
  for i, row in enumerate(weights):
    moves = [a - b for a, b in zip(logps[i], behavior_logps[i], strict=True)]
    if loss == "gspo":
      counted = [m for m, kept in zip(moves, mask[i], strict=True) if kept]
      moves = [math.fsum(counted) / max(len(counted), 1)] * len(moves)
      # Its slopes are those of the row's loss, which each token repeats.
      row = [math.fsum(row)] * len(row)
    # A bounded log-ratio stands still outside of its bounds.
    still = loss in ("gspo", "clipped_surrogate")
    slopes[i] = [
      0.0 if still and abs(move) > reference_surrogates.BOUND else w * slope
      for w, slope, move in zip(row, slopes[i], moves, strict=True)
    ]
  return reference_losses.total(weights, values), slopes


def slow_outcome(data):
  features = np.asarray(data.features, np.float64).tolist()
  kernel = np.asarray(kernel_of_the_policy(), np.float64).tolist()
  tokens, mask = data.tokens.tolist(), data.mask.tolist()
  behavior_logps = np.asarray(data.behavior_logps, np.float64).tolist()
  logps = reference_losses.linear_policy(features, kernel, tokens)
  keep = []
  for start in range(0, len(mask), G):
    group = range(start, start + G)
    verdicts = {int(data.correct[row]) for row in group if any(mask[row])}
    keep += [len(verdicts) == 2 and any(mask[row]) for row in group]
  pushes = [_slow_advantages(data, keep, name) for name in NORMALIZATIONS]
  kept = [[m and k for m in row] for row, k in zip(mask, keep, strict=True)]
  values = np.zeros((len(LOSSES), len(HOWS), len(NORMALIZATIONS)))
  gradients = np.zeros((*values.shape, D, V))
  for h, how in enumerate(HOWS):
    limit = MAX_TOKENS if how == "constant" else None
    weights = reference_aggregation.weights(kept, G, how, limit)
    for (i, loss), (n, push) in itertools.product(
      enumerate(LOSSES), enumerate(pushes)
    ):
      values[i, h, n], slopes = _slow_loss(
        loss, logps, behavior_logps, push, mask, weights
      )
      gradients[i, h, n] = reference_losses.linear_policy_gradient(
        features, kernel, tokens, slopes
      )
  return Outcome(values, gradients)
