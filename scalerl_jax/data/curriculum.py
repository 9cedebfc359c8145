"""The order in which training prompts are given out; a restorable cursor.

Uniform order only: every prompt once an epoch, shuffled anew each time.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scalerl_jax.data.streams import Purpose, stream
from scalerl_jax.types import Prompt


class PromptStream:
  """An endless order of prompts, shuffled per epoch by (seed, epoch).

  The cursor is one number, so a restored stream goes on identically, in the
  middle of an epoch too.

  >>> prompts = [
  ...   Prompt(uid, str(uid), np.zeros(1, np.int32), "") for uid in range(3)
  ... ]
  >>> given = PromptStream(prompts, seed=0).next(6)
  >>> sorted((prompt.uid, visit) for prompt, visit in given)
  [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
  """

  def __init__(self, prompts: Sequence[Prompt], *, seed: int):
    """Starts before the first prompt of epoch 0.

    Args:
      prompts: what is given out; at least one.
      seed: decides the order, and nothing else.

    Raises:
      ValueError: no prompts.
    """
    if not prompts:
      raise ValueError("a prompt stream needs at least one prompt, got none")
    self._prompts = prompts
    self._seed = seed
    self._position = 0  # prompts given out so far, over all epochs
    self._shuffled: tuple[int, np.ndarray] | None = None  # epoch, its order

  def next(self, count: int) -> list[tuple[Prompt, int]]:
    """The next `count` prompts, each with how often it was given before.

    That number is the visit: sample g of a group has sample index
    visit·G + g, so no completion's random numbers are used twice.
    """
    given = []
    for _ in range(count):
      visit, offset = divmod(self._position, len(self._prompts))
      given.append((self._prompts[self._order(visit)[offset]], visit))
      self._position += 1
    return given

  def state(self) -> dict[str, int]:
    """The cursor: all that changes, as plain integers."""
    return {"position": self._position}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Continues where `state()` was taken, over the same prompts and seed.

    Raises:
      ValueError: `state` is not what `state()` gives.
    """
    if set(state) != {"position"} or int(state["position"]) < 0:
      raise ValueError(
        "a prompt stream's cursor must be {'position': 0 or more}, got"
        f" {dict(state)!r}"
      )
    self._position = int(state["position"])

  def _order(self, epoch: int) -> np.ndarray:
    if self._shuffled is None or self._shuffled[0] != epoch:
      rng = stream(self._seed, Purpose.ORDER, epoch)
      self._shuffled = epoch, rng.permutation(len(self._prompts))
    return self._shuffled[1]
