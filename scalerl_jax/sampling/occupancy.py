"""The host's view of the slots: which group holds which slot and place."""

from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

FREE = -1


def slot_shards(mesh: Mesh, slots: int, group_size: int) -> int:
  """Parts of the slots that need nothing of each other: one a device of the
  batch axes, if each holds a whole group.
  """
  ways = mesh.shape["data"] * mesh.shape["fsdp"]
  return ways if not slots % ways and slots // ways >= group_size else 1


class Occupancy:
  """Slots and prompt places, given to whole groups and taken back by rows.

  Args:
    slots: S.
    places: prompt places; a group keeps its own until its last row ends.
    group_size: G.
    shards: equal parts of slots and places; a group stays in one.
  """

  def __init__(self, slots: int, places: int, group_size: int, shards: int = 1):
    self.group_size = group_size
    self._shards = shards
    self.owner = np.full((slots,), FREE, np.int64)  # group of each slot
    self.row = np.zeros((slots,), np.int32)  # its row in the group
    self.age = np.zeros((slots,), np.int32)  # chunks since it was given
    self.place = np.full((places,), FREE, np.int64)  # group of each place

  @property
  def room(self) -> int:
    """Groups that could enter now."""
    return int(self._rooms().sum())

  @property
  def busy(self) -> bool:
    """Whether any slot is held."""
    return bool((self.owner != FREE).any())

  @property
  def ages(self) -> np.ndarray:
    """Chunks since each slot was given, −1 where it is free."""
    return np.where(self.owner == FREE, -1, self.age)

  def _rooms(self) -> np.ndarray:
    """Groups that could enter each shard."""
    free = (self.owner == FREE).reshape(self._shards, -1).sum(axis=1)
    places = (self.place == FREE).reshape(self._shards, -1).sum(axis=1)
    return np.minimum(free // self.group_size, places)

  def enter(self, groups: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Gives G slots and a place to each group, in the emptiest shard.

    Returns:
      The place of each group, int32, and its slots `[groups, G]`, int32.

    Raises:
      ValueError: more groups than there is room for.
    """
    if len(groups) > self.room:
      raise ValueError(
        f"{len(groups)} groups cannot enter: there is room for {self.room}"
      )
    rooms, size = self._rooms(), self.group_size
    shards = np.zeros((len(groups),), int)
    for i in range(len(groups)):
      shards[i] = np.argmax(rooms)
      rooms[shards[i]] -= 1
    slots = np.zeros((len(groups), size), np.int32)
    places = np.zeros((len(groups),), np.int32)
    for shard in range(self._shards):
      here = np.flatnonzero(shards == shard)
      free = self._free(self.owner, shard)[: len(here) * size]
      slots[here] = free.reshape(-1, size)
      places[here] = self._free(self.place, shard)[: len(here)]
    self.owner[slots] = np.asarray(groups)[:, None]
    self.row[slots] = np.arange(size)
    self.age[slots] = 0
    self.place[places] = groups
    return places, slots

  def _free(self, holders: np.ndarray, shard: int) -> np.ndarray:
    """Indices that nobody holds in a shard."""
    share = len(holders) // self._shards
    mine = holders[shard * share : (shard + 1) * share]
    return shard * share + np.flatnonzero(mine == FREE)

  def grow_older(self) -> None:
    """A chunk is decoded."""
    self.age += 1

  def move(self, order: np.ndarray) -> None:
    """Slot n is from now on what slot `order[n]` was."""
    self.owner, self.row, self.age = (
      values[order] for values in (self.owner, self.row, self.age)
    )

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
      "age": self.age.copy(),
      "place": self.place.copy(),
    }

  def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
    """Back to what `state_dict` said."""
    self.owner = np.array(state["owner"])
    self.row = np.array(state["row"])
    self.age = np.array(state["age"])
    self.place = np.array(state["place"])
