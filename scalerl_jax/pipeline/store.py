"""Groups between their admission and their update, as restorable arrays."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from scalerl_jax.config import SamplerConfig
from scalerl_jax.sampling.sampler import (
  RECORDED,
  Finished,
  Group,
  empty_rollout,
)
from scalerl_jax.types import FinishReason, Rollout

EMPTY, IN_FLIGHT, QUEUED = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Scored:
  """A finished group with its verdicts, ready for the learner."""

  index: int  # admission number, names the group
  rollout: Rollout
  correct: np.ndarray  # int32 [G], 0/1


class RolloutStore:
  """Groups in flight (filling row by row) and queued (scored).

  Args:
    capacity: groups that can be outstanding at once.
    like: a rollout of the shapes that all have.
  """

  def __init__(self, capacity: int, like: Rollout):
    self.capacity = capacity
    self.in_flight: dict[int, Rollout] = {}
    self.queued: dict[int, Scored] = {}
    self._like = like

  def write(self, ended: Finished) -> None:
    """Completions that ended, into the rows of their groups."""
    for n, (group, row) in enumerate(
      zip(ended.groups.tolist(), ended.rows.tolist(), strict=True)
    ):
      rollout = self.in_flight[group]
      for name in RECORDED:
        getattr(rollout, name)[row] = getattr(ended, name)[n]

  def complete(self) -> list[int]:
    """Groups in flight whose completions have all ended, in admission order."""
    return [
      index
      for index, rollout in sorted(self.in_flight.items())
      if (rollout.finish != FinishReason.RUNNING).all()
    ]

  def state_dict(self) -> dict[str, np.ndarray]:
    """Fixed-shape arrays `[capacity, ...]`; places of nobody hold 0."""
    names = [field.name for field in dataclasses.fields(Rollout)]
    state: dict[str, np.ndarray] = {
      name: np.zeros(
        (self.capacity, *np.shape(getattr(self._like, name))),
        np.asarray(getattr(self._like, name)).dtype,
      )
      for name in names
    }
    group_size = self._like.length.shape[0]
    state["index"] = np.zeros((self.capacity,), np.int64)
    state["status"] = np.full((self.capacity,), EMPTY, np.int32)
    state["correct"] = np.zeros((self.capacity, group_size), np.int32)
    held = [(i, r, None) for i, r in sorted(self.in_flight.items())]
    held += [(i, s.rollout, s) for i, s in sorted(self.queued.items())]
    for place, (index, rollout, scored) in enumerate(held):
      for name in names:
        state[name][place] = getattr(rollout, name)
      state["index"][place] = index
      state["status"][place] = IN_FLIGHT if scored is None else QUEUED
      if scored is not None:
        state["correct"][place] = scored.correct
    return state

  def load_state_dict(self, state: Mapping[str, Any]) -> None:
    """Back to what `state_dict` said."""
    names = [field.name for field in dataclasses.fields(Rollout)]
    self.in_flight, self.queued = {}, {}
    for place in np.flatnonzero(np.asarray(state["status"]) != EMPTY):
      rollout = Rollout(
        **{name: np.array(state[name][place]) for name in names}
      )
      index = int(state["index"][place])
      if state["status"][place] == IN_FLIGHT:
        self.in_flight[index] = rollout
      else:
        self.queued[index] = Scored(
          index, rollout, np.array(state["correct"][place])
        )


def no_rollout(group_size: int, config: SamplerConfig) -> Any:
  """A rollout of nobody, for shapes."""
  group = Group(0, 0, 0, np.zeros((0,), np.int32))
  return empty_rollout(group, group_size, config)
