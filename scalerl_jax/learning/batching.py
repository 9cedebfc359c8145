"""From groups of rollouts to one batch of rows, on the host."""

from collections.abc import Sequence

import numpy as np

from scalerl_jax.types import Batch, Rollout


def collate(
  rollouts: Sequence[Rollout], correct: np.ndarray, rewards: np.ndarray
) -> Batch:
  """One row a completion: prompt, completion, padding; groups stay adjacent.

  The mask is carried, never inferred: True where a token was drawn by the
  sampler, False on prompts, forced tokens and padding, whatever their ids.

  Args:
    rollouts: P groups of G completions, finished.
    correct: 0/1, `[P, G]`.
    rewards: `[P, G]`.

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
  return Batch(
    tokens=np.where(present, tokens, 0).astype(np.int32),
    segment_ids=present.astype(np.int32),
    mask=mask,
    behavior_logps=np.where(
      mask, completed(flat("behavior_logps")), 0.0
    ).astype(np.float32),
    correct=correct.reshape(rows).astype(np.int32),
    rewards=rewards.reshape(rows).astype(np.float32),
  )
