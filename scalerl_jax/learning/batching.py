"""From groups of rollouts to one batch of rows, on the host."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from scalerl_jax.config import LengthConfig
from scalerl_jax.objectives.lengths import length_penalty
from scalerl_jax.types import Batch, FinishReason, Rollout


def counted_rows(finish: np.ndarray, length: LengthConfig) -> np.ndarray:
  """False on completions that are masked out for having been truncated.

  Args:
    finish: `FinishReason` of each completion, any shape.
    length: says what becomes of truncated ones.
  """
  masked = length.truncated == "masked"
  return ~((finish == FinishReason.BUDGET) & masked)


def completion_rewards(
  correct: np.ndarray,
  lengths: np.ndarray,
  length: LengthConfig,
  *,
  max_length: int,
) -> np.ndarray:
  """+1 if right and −1 if wrong, with the length penalty where it is on.

  A truncated completion has not ended and is wrong.

  Args:
    correct: 0/1, any shape.
    lengths: completion tokens, of the same shape.
    length: says whether there is a penalty.
    max_length: L_max, the completion budget.

  Returns:
    float32, of the same shape.
  """
  rewards = np.where(correct, 1.0, -1.0).astype(np.float32)
  if length.control == "penalty":
    penalty = length_penalty(
      jnp.asarray(lengths.reshape(-1)),
      jnp.asarray(correct.reshape(-1)),
      max_length=max_length,
      cache_length=length.penalty_cache,
    )
    rewards += np.asarray(penalty).reshape(rewards.shape)
  return rewards


def collate(
  rollouts: Sequence[Rollout],
  correct: np.ndarray,
  rewards: np.ndarray,
  counted: np.ndarray | None = None,
) -> Batch:
  """One row a completion: prompt, completion, padding; groups stay adjacent.

  The mask is carried, never inferred: True where a token was drawn by the
  sampler, False on prompts, forced tokens and padding, whatever their ids.

  Args:
    rollouts: P groups of G completions, finished.
    correct: 0/1, `[P, G]`.
    rewards: `[P, G]`.
    counted: bool `[P, G]`, False on completions that are masked out; all
      count by default.

  Returns:
    numpy arrays, B = P·G rows of T = Tp + Tc tokens.
  """
  groups, group_size = correct.shape

  def stack(name: str) -> np.ndarray:
    return np.stack([getattr(r, name) for r in rollouts])

  prompt = np.repeat(stack("prompt"), group_size, axis=0)
  prompt_length = np.repeat(stack("prompt_length"), group_size)[:, None]
  rows = groups * group_size

  def flat(name: str) -> np.ndarray:
    values = stack(name)
    return values.reshape(rows, *values.shape[2:])

  completion, length = flat("tokens"), flat("length")[:, None]
  width = prompt.shape[1] + completion.shape[1]
  column = np.broadcast_to(np.arange(width), (rows, width))
  place = column - prompt_length  # column in the completion
  in_prompt = place < 0
  in_completion = ~in_prompt & (place < length)
  source = np.clip(place, 0, completion.shape[1] - 1)

  def completed(values: np.ndarray) -> np.ndarray:
    return np.take_along_axis(values, source, axis=1)

  padded = np.pad(prompt, ((0, 0), (0, completion.shape[1])))
  tokens = np.where(in_prompt, padded, completed(completion))
  present = in_prompt | in_completion
  mask = in_completion & ~completed(flat("forced"))
  if counted is not None:
    mask &= counted.reshape(rows)[:, None]
  return Batch(
    tokens=np.where(present, tokens, 0).astype(np.int32),
    segment_ids=present.astype(np.int32),
    mask=mask,
    behavior_logps=np.where(
      mask, completed(flat("behavior_logps")), 0.0
    ).astype(np.float32),
    correct=correct.reshape(rows).astype(np.int32),
    rewards=rewards.reshape(rows).astype(np.float32),
    prompt_length=prompt_length[:, 0].astype(np.int32),
  )


def make_batch(
  rollouts: Sequence[Rollout], correct: np.ndarray, length: LengthConfig
) -> Batch:
  """The batch of finished and judged groups, length control included.

  Args:
    rollouts: P groups of G completions.
    correct: 0/1, `[P, G]`.
    length: penalty, and what becomes of truncated completions.
  """
  rewards = completion_rewards(
    correct,
    np.stack([r.length for r in rollouts]),
    length,
    max_length=rollouts[0].tokens.shape[-1],
  )
  finish = np.stack([r.finish for r in rollouts])
  return collate(rollouts, correct, rewards, counted_rows(finish, length))
