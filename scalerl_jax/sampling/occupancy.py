"""The host's view of the slots: which group holds which slot and place."""

from collections.abc import Sequence

import numpy as np

FREE = -1


class Occupancy:
  """Slots and prompt places, given to whole groups and taken back by rows.

  Args:
    slots: S.
    places: prompt places; a group keeps its own until its last row ends.
    group_size: G.
  """

  def __init__(self, slots: int, places: int, group_size: int):
    self.group_size = group_size
    self.owner = np.full((slots,), FREE, np.int64)  # group of each slot
    self.row = np.zeros((slots,), np.int32)  # its row in the group
    self.place = np.full((places,), FREE, np.int64)  # group of each place

  @property
  def room(self) -> int:
    """Groups that could enter now."""
    slots = int((self.owner == FREE).sum()) // self.group_size
    return min(slots, int((self.place == FREE).sum()))

  @property
  def busy(self) -> bool:
    """Whether any slot is held."""
    return bool((self.owner != FREE).any())

  def enter(self, groups: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Gives G slots and a place to each group.

    Returns:
      The place of each group, int32, and for each slot the completion (row of
      the entering groups laid end to end) that enters it, or −1, int32.

    Raises:
      ValueError: more groups than there is room for.
    """
    if len(groups) > self.room:
      raise ValueError(
        f"{len(groups)} groups cannot enter: there is room for {self.room}"
      )
    count = len(groups) * self.group_size
    slots = np.flatnonzero(self.owner == FREE)[:count]
    places = np.flatnonzero(self.place == FREE)[: len(groups)]
    source = np.full(self.owner.shape, FREE, np.int32)
    source[slots] = np.arange(count)
    self.owner[slots] = np.repeat(np.asarray(groups), self.group_size)
    self.row[slots] = np.tile(np.arange(self.group_size), len(groups))
    self.place[places] = groups
    return places.astype(np.int32), source

  def leave(self, slots: np.ndarray) -> None:
    """Takes back slots whose completions have ended and been read."""
    groups = np.unique(self.owner[slots])
    self.owner[slots] = FREE
    ended = groups[~np.isin(groups, self.owner)]
    self.place[np.isin(self.place, ended)] = FREE

  def state_dict(self) -> dict[str, np.ndarray]:
    """Everything, as arrays."""
    return {
      "owner": self.owner.copy(),
      "row": self.row.copy(),
      "place": self.place.copy(),
    }

  def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
    """Back to what `state_dict` said."""
    self.owner = np.array(state["owner"])
    self.row = np.array(state["row"])
    self.place = np.array(state["place"])
