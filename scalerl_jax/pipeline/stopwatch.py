"""When dispatched work really ended: one thread that waits and never starts."""

import concurrent.futures
import time
from typing import Any

import jax


class Stopwatch:
  """Busy seconds of one device role, measured from outside its programs."""

  def __init__(self, name: str):
    self._pool = concurrent.futures.ThreadPoolExecutor(1, f"watch-{name}")
    self._open: concurrent.futures.Future[float] | None = None
    self._started = 0.0
    self.busy_seconds = 0.0

  def start(self, arrays: Any) -> None:
    """Work that makes `arrays` was dispatched just now."""
    self.stop()
    self._started = time.perf_counter()

    def wait() -> float:
      jax.block_until_ready(arrays)
      return time.perf_counter()

    self._open = self._pool.submit(wait)

  def stop(self) -> None:
    """Adds the last piece of work, waiting for its end if need be."""
    if self._open is not None:
      self.busy_seconds += self._open.result() - self._started
      self._open = None

  def close(self) -> None:
    """Ends the thread."""
    self._pool.shutdown(wait=True, cancel_futures=True)
