"""When dispatched work really ended: one thread that waits and never starts."""

import collections
import concurrent.futures
import dataclasses
import time
from typing import Any

import jax

from scalerl_jax.pipeline.timeline import Timeline


@dataclasses.dataclass
class _Piece:
  """Work that was dispatched and is not yet counted."""

  work: str
  began: float
  ended: concurrent.futures.Future[float]
  told: dict[str, Any]
  idle: str  # why the device had nothing to do before


class Stopwatch:
  """Busy seconds of one device role, measured from outside its programs.

  A device runs its pieces in order: one starts when it was dispatched or when
  the piece before it ended, whichever is later. So pieces never overlap, and
  their sum is the busy time. An end is seen when the watching thread runs
  again, which a busy host may delay by some milliseconds.

  Args:
    name: of the role, a track of the timeline.
    timeline: is told every piece, and the idle time before it.
  """

  def __init__(self, name: str, timeline: Timeline | None = None):
    self._name = name
    self._timeline = timeline or Timeline(None)
    self._pool: concurrent.futures.ThreadPoolExecutor | None = None
    self._open: list[_Piece] = []
    self._end: float | None = None  # of the last piece
    self._idle = "host"
    # Of each kind of work, by its name.
    self.seconds: dict[str, float] = collections.defaultdict(float)
    self.pieces: collections.Counter[str] = collections.Counter()

  @property
  def busy_seconds(self) -> float:
    """Of all work that was counted."""
    return float(sum(self.seconds.values()))

  def start(
    self,
    arrays: Any,
    work: str = "work",
    began: float | None = None,
    **told: Any,
  ) -> None:
    """Work that makes `arrays` was dispatched.

    Args:
      arrays: to be waited for; no later program may be given them to reuse.
      work: its name.
      began: when it was dispatched, of `time.perf_counter`; None: just now.
      told: what the timeline shows with it.
    """

    def wait() -> float:
      jax.block_until_ready(arrays)
      return time.perf_counter()

    if self._pool is None:
      self._pool = concurrent.futures.ThreadPoolExecutor(
        1, f"watch-{self._name}"
      )
    began = time.perf_counter() if began is None else began
    self._open.append(
      _Piece(work, began, self._pool.submit(wait), told, self._idle)
    )
    self._idle = "host"

  def idle(self, reason: str) -> None:
    """Why there is nothing to do just now; the last reason before a start."""
    self._idle = reason

  def stop(self, **told: Any) -> None:
    """Counts the open pieces, waiting for their ends; `told`: of the last."""
    pieces, self._open = self._open, []
    if pieces:
      pieces[-1].told |= told
    for piece in pieces:
      self._count(piece)

  def _count(self, piece: _Piece) -> None:
    ended = piece.ended.result()
    start = piece.began
    if self._end is not None:
      start = min(max(start, self._end), ended)
      if start > self._end:
        self._timeline.add(
          self._name, "idle", self._end, start, reason=piece.idle
        )
    self._timeline.add(self._name, piece.work, start, ended, **piece.told)
    self.seconds[piece.work] += ended - start
    self.pieces[piece.work] += 1
    self._end = ended

  def close(self) -> None:
    """Ends the thread; work that was not counted is not."""
    self._open = []
    if self._pool is not None:
      self._pool.shutdown(wait=True, cancel_futures=True)
      self._pool = None
