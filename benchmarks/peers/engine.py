"""How an engine talks with the runner: lines in, one JSON line each out.

An engine is a process that loads once, then answers `run WORKLOAD REPEAT` on
its standard input until that closes. Standard library only: it is imported in
every environment from its own folder.
"""

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

Answer = dict[str, Any]


def serve(
  workloads: dict[str, Callable[[int], Answer]],
  versions: dict[str, str],
) -> None:
  """Answers the runner's lines until its end of the pipe closes.

  The first line out is `{"ready": versions}`. Whatever else the process
  prints, C++ included, goes to standard error.

  Args:
    workloads: name -> function of the repeat; repeat 0 is there to compile
      and is not counted. A function times its own work and returns
      `{"seconds": ..., "tokens": ..., "extra": {...}}`, tokens being those
      that were asked for.
    versions: of the packages that do the work.

  Raises:
    ValueError: a line that is no known order.
  """
  out = os.fdopen(os.dup(1), "w", encoding="utf-8")
  os.dup2(2, 1)

  def tell(answer: Answer) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()

  tell({"ready": versions})
  for line in sys.stdin:
    match line.split():
      case ["run", workload, repeat] if workload in workloads:
        tell(workloads[workload](int(repeat)))
      case _:
        raise ValueError(
          f"An order must be 'run WORKLOAD REPEAT' with a workload of "
          f"{sorted(workloads)}, got {line.strip()!r}."
        )


class Turns:
  """A training loop that belongs to a library, one step an order.

  The loop runs in a thread of its own and calls `wait` between two steps.

  Args:
    loop: runs the library's loop; is given `wait`.
  """

  def __init__(self, loop: Callable[[Callable[[], None]], None]):
    self._orders: queue.Queue[None] = queue.Queue()
    self._done: queue.Queue[BaseException | None] = queue.Queue()
    self._loop = loop
    self._thread = threading.Thread(target=self._run, daemon=True)
    self._began = False

  def _run(self) -> None:
    try:
      self._loop(self.wait)
      error = RuntimeError("the library's loop ended before the runner did")
    except BaseException as raised:  # handed to the thread that waits
      error = raised
    self._done.put(error)

  def wait(self) -> None:
    """Ends the step that ran, if one did, and blocks until the next order."""
    if self._began:
      self._done.put(None)
    self._began = True
    self._orders.get()

  def step(self) -> float:
    """Lets the loop take one step; the first also starts the loop.

    Returns:
      The seconds that it took.

    Raises:
      BaseException: whatever ended the loop.
    """
    start = time.perf_counter()
    if not self._thread.is_alive():
      self._thread.start()
    self._orders.put(None)
    error = self._done.get()
    if error is not None:
      raise error
    return time.perf_counter() - start
