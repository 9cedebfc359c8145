"""What a mixture of tasks adds to its parts: uids apart, texts by weight.

Each part stays a task by itself; `tasks.py` puts them together.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Int

from scalerl_jax.config import SupervisedConfig, TaskConfig
from scalerl_jax.data.prompts import SupervisedBatch
from scalerl_jax.data.streams import Purpose, stream
from scalerl_jax.types import Prompt

UIDS_OF_PART = 2**24  # so many prompts a part, and 2⁷ parts below 2³¹
_BATCHES_OF_PART = 2**32  # of 2⁶⁴ addresses


def check_counts(task: TaskConfig) -> None:
  """Refuses more prompts of a part than it has uids, before any is made.

  Raises:
    ValueError: there are more than 2²⁴, training and held-out together.
  """
  count = task.train_prompts + task.heldout_prompts
  if count > UIDS_OF_PART:
    raise ValueError(
      "task.train_prompts + task.heldout_prompts must be at most"
      f" {UIDS_OF_PART} for each task of task.mixture, got {count}; lower them"
    )


def renumbered(prompts: Sequence[Prompt], part: int) -> list[Prompt]:
  """The prompts of part number `part`, with uids from part·2²⁴ on.

  So the first part keeps its uids, and none moves when a part is added behind
  or another number of prompts is asked for.

  >>> prompt = Prompt(3, "", np.zeros(0, np.int32), "")
  >>> [renumbered([prompt], part)[0].uid for part in range(3)]
  [3, 16777219, 33554435]
  """
  first = part * UIDS_OF_PART
  return [replace(prompt, uid=first + prompt.uid) for prompt in prompts]


class MixedTexts:
  """Supervised batches of several tasks with one tokenizer, by weight."""

  def __init__(
    self,
    parts: Sequence[Callable[[int], SupervisedBatch]],
    weights: Sequence[float],
    supervised: SupervisedConfig,
    *,
    pad_id: int,
  ):
    """Keeps the parts.

    Args:
      parts: the batches of each, addressed by number; all of
        `supervised.batch_size` rows, of one width a part.
      weights: probability that a row is of that part; they sum to 1.
      supervised: batch size and seed.
      pad_id: fills the rows of parts with shorter texts.
    """
    self._parts, self._weights = parts, list(weights)
    self._supervised, self._pad_id = supervised, pad_id

  def batch(self, index: int) -> SupervisedBatch:
    """Batch number `index`, in 0 .. 2³²-1.

    Row r is row r of a batch of one part; each row's part is drawn by weight,
    independently. Part p gives its batch number p·2³² + index, so no two parts
    share random numbers, and the first part's rows are those of its own batch.
    """
    batches = [
      part(number * _BATCHES_OF_PART + index)
      for number, part in enumerate(self._parts)
    ]
    address = len(batches) * _BATCHES_OF_PART + index  # behind the last part's
    rng = stream(self._supervised.seed, Purpose.SUPERVISED, address)
    chosen = rng.choice(
      len(batches), size=self._supervised.batch_size, p=self._weights
    )
    return mix_rows(batches, chosen, pad_id=self._pad_id)


def mix_rows(
  batches: Sequence[SupervisedBatch],
  chosen: Int[np.ndarray, " N"],
  *,
  pad_id: int,
) -> SupervisedBatch:
  """Row r of batch `chosen[r]` for each r, padded to the widest batch.

  Args:
    batches: N rows each; widths may differ.
    chosen: index into `batches`.
    pad_id: fills the rows of narrower batches.

  >>> from scalerl_jax.data.prompts import pad_texts
  >>> one, two, end = (np.array(ids, np.int32) for ids in ([3], [4, 4], [1]))
  >>> narrow = pad_texts([one, one], [end, end], width=2, pad_id=0)
  >>> wide = pad_texts([two, two], [end, end], width=3, pad_id=0)
  >>> mix_rows([narrow, wide], np.array([1, 0]), pad_id=0).tokens.tolist()
  [[4, 4, 1], [3, 1, 0]]
  """
  width = max(batch.tokens.shape[1] for batch in batches)
  rows = np.arange(len(chosen))

  def pick(arrays: Sequence[np.ndarray], fill: int) -> np.ndarray:
    wide = [
      np.pad(a, [(0, 0), (0, width - a.shape[1])], constant_values=fill)
      for a in arrays
    ]
    return np.stack(wide)[chosen, rows]

  return SupervisedBatch(
    tokens=pick([batch.tokens for batch in batches], pad_id),
    mask=pick([batch.mask for batch in batches], False),
    lengths=np.stack([batch.lengths for batch in batches])[chosen, rows],
  )
