"""When an update ends under the logical schedule: after a count of chunks.

Counting only. What may start and what may be trained on is in `schedule.py`.
"""

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any, SupportsIndex

from scalerl_jax.pipeline.schedule import check_fields, check_integer


@dataclasses.dataclass(eq=False)
class LogicalClock:
  """The logical schedule: an update lasts a fixed number of decode chunks.

  An update that starts at chunk n is published at chunk n + chunks_per_step
  exactly, or as soon as the sampler has nothing at all to do; never by the
  wall's time, so that a run is deterministic. (The wall schedule has no clock:
  it publishes when the update is ready.)

  Args:
    chunks_per_step: Decode chunks an update lasts, at least 1.

  Raises:
    TypeError: `chunks_per_step` is not an int.
    ValueError: `chunks_per_step` is below 1.

  Example:
    >>> clock = LogicalClock(chunks_per_step=2)
    >>> clock.start_update(chunk=5)
    >>> [clock.due(chunk, sampler_idle=False) for chunk in (5, 6, 7)]
    [False, False, True]
    >>> clock.due(5, sampler_idle=True)
    True
    >>> clock.publish()
    >>> clock.due(7, sampler_idle=True)
    False
  """

  chunks_per_step: int

  def __post_init__(self):
    check_integer("chunks_per_step", self.chunks_per_step, 1)
    self._started_at: int | None = None

  def start_update(self, chunk: SupportsIndex) -> None:
    """An update starts after `chunk` decoded chunks, ≥ 0.

    Raises:
      ValueError: One is running, or `chunk` is negative.
    """
    chunk = operator.index(chunk)
    check_integer("chunk", chunk, 0)
    if self._started_at is not None:
      raise ValueError(
        f"an update must not start at chunk {chunk}: that of chunk "
        f"{self._started_at} is running; publish it first."
      )
    self._started_at = chunk

  def due(self, chunk: SupportsIndex, sampler_idle: bool) -> bool:
    """Whether the running update is to be published now, if there is one.

    Args:
      chunk: Decoded chunks so far.
      sampler_idle: Nothing is in flight and nothing may be admitted.

    Raises:
      ValueError: `chunk` lies before the update's start or after the chunk at
        which it was due: it could no longer be published in its place.
    """
    if self._started_at is None:
      return False
    chunk = operator.index(chunk)
    end = self._started_at + self.chunks_per_step
    if not self._started_at <= chunk <= end:
      raise ValueError(
        f"chunk must be in {self._started_at}..{end} while the update of chunk "
        f"{self._started_at} is running, got {chunk}; ask at every chunk."
      )
    return sampler_idle or chunk == end

  def publish(self) -> None:
    """The update's weights are out.

    Raises:
      ValueError: No update is running.
    """
    if self._started_at is None:
      raise ValueError(
        "the clock must not publish: no update is running; start one first."
      )
    self._started_at = None

  def state_dict(self) -> dict[str, int]:
    """Everything that changes; `started_at` is −1 while nothing runs."""
    started_at = -1 if self._started_at is None else self._started_at
    return {
      "chunks_per_step": int(self.chunks_per_step),
      "started_at": started_at,
    }

  def load_state_dict(self, state: Mapping[str, Any]) -> None:
    """Goes on from `state` exactly.

    Raises:
      ValueError: A field is missing or unknown, or the state is that of
        another `chunks_per_step`.
    """
    check_fields("clock state", state, self.state_dict())
    if int(state["chunks_per_step"]) != self.chunks_per_step:
      raise ValueError(
        f"chunks_per_step of the clock state must be {self.chunks_per_step}, "
        f"got {int(state['chunks_per_step'])}; resume with the configuration "
        "that saved it."
      )
    started_at = int(state["started_at"])
    self._started_at = None if started_at < 0 else started_at
