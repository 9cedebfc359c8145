"""Workers that judge, each under a hard deadline: a hung one is killed.

Verifiers of mathematics hang on some texts, and only the end of their process
stops them. Workers start when there is work and stay warm.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

from scalerl_jax.rewards.worker import Orders

_STARTUP_SECONDS = 120.0  # imports, on a busy machine
_PIPE_BYTES = 1 << 20  # a request fits, so that writing it never waits
_ROOT = pathlib.Path(__file__).parents[2]


class Pool:
  """At most `workers` processes of one kind.

  A verdict that does not come in time is "wrong", counted in `timeouts`; so is
  that of a worker that died, in `crashes`. Another worker takes its place.
  Whether a judgement near the deadline comes in time depends on the machine.

  >>> with Pool("math", workers=1, seconds=5.0) as pool:
  ...   pool.judge([{"answer": "1/2", "text": "It is $0.5$."}])
  array([ True])
  """

  def __init__(
    self,
    kind: str,
    *,
    workers: int,
    seconds: float,
    megabytes: int = 4096,
    fresh: bool = False,
  ):
    """Starts nothing yet.

    Args:
      kind: of judging; one of `worker.JUDGEMENTS`.
      workers: how many at once.
      seconds: a judgement may take.
      megabytes: address space of a worker.
      fresh: each judgement has a process of its own.
    """
    self._orders = Orders(kind, seconds, megabytes)
    self._size, self._fresh = workers, fresh
    self._workers: list[_Worker] = []
    self._finalizer = weakref.finalize(self, _end_all, self._workers)
    self.timeouts = self.crashes = 0

  def __enter__(self) -> "Pool":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def close(self) -> None:
    """Ends the workers; the pool may be used again."""
    _end_all(self._workers)

  def judge(
    self, requests: Sequence[Mapping[str, Any]]
  ) -> Bool[np.ndarray, " N"]:
    """Correctness of each request, in their order.

    Args:
      requests: arguments of the judgement, by name.

    Raises:
      RuntimeError: a worker does not start; what it said is in the message.
    """
    correct = np.zeros(len(requests), bool)
    waiting = deque(range(len(requests)))
    try:
      while waiting or any(worker.job is not None for worker in self._workers):
        self._assign(waiting, requests)
        for worker in self._next_events():
          self._hear(worker, correct)
        self._end_late()
    except BaseException:  # Ctrl-C, too: nothing half done is left behind
      self.close()
      raise
    return correct

  def _hear(self, worker: "_Worker", correct: Bool[np.ndarray, " N"]) -> None:
    """Files what a worker says."""
    job = worker.job
    try:
      verdict = worker.read()
    except EOFError as error:
      if not worker.ready:
        raise self._no_start(worker, "it ended") from error
      self._replace(worker)
      self.crashes += job is not None
      return
    if verdict is not None and job is not None:
      correct[job] = verdict
      if self._fresh:
        self._replace(worker)

  def _assign(
    self, waiting: deque[int], requests: Sequence[Mapping[str, Any]]
  ) -> None:
    """Gives requests to idle workers, and starts workers for the others."""
    for worker in [w for w in self._workers if w.ended and w.job is None]:
      if worker.ready:  # it died with nothing to do
        self._replace(worker)
    for worker in self._workers:
      if waiting and worker.ready and worker.job is None:
        worker.send(waiting.popleft(), requests, self._orders.seconds)
    starting = sum(not worker.ready for worker in self._workers)
    room = self._size - len(self._workers)
    for _ in range(min(room, len(waiting) - starting)):
      self._workers.append(_Worker(self._orders, fresh=self._fresh))

  def _next_events(self) -> list["_Worker"]:
    """Workers that have said something, by the next deadline."""
    with selectors.DefaultSelector() as selector:
      for worker in self._workers:
        selector.register(worker.output, selectors.EVENT_READ, worker)
      deadline = min((worker.deadline for worker in self._workers), default=0.0)
      found = selector.select(max(0.0, deadline - time.monotonic()))
    return [key.data for key, _ in found]

  def _end_late(self) -> None:
    now = time.monotonic()
    for worker in [w for w in self._workers if w.deadline <= now]:
      if not worker.ready:
        raise self._no_start(worker, f"{_STARTUP_SECONDS:g} seconds passed")
      self._replace(worker)
      self.timeouts += 1

  def _replace(self, worker: "_Worker") -> None:
    """Ends a worker; the next round starts another if there is work."""
    self._workers.remove(worker)
    worker.end()

  def _no_start(self, worker: "_Worker", why: str) -> RuntimeError:
    said = worker.said()
    self.close()
    return RuntimeError(
      f"a worker that judges {self._orders.kind!r} must start, but {why};"
      f" it said {said!r}"
    )


class _Worker:
  """One process, and what it is at."""

  def __init__(self, orders: Orders, *, fresh: bool):
    self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `end`)
    self._scratch = tempfile.TemporaryDirectory() if fresh else None
    if self._scratch is not None:
      orders = dataclasses.replace(orders, scratch=self._scratch.name)
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    path = os.pathsep.join(
      [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    self._process = subprocess.Popen(
      [
        *(sys.executable, "-B", "-m", "scalerl_jax.rewards.worker"),
        json.dumps(dataclasses.asdict(orders)),
      ],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=self._errors,
      env={**os.environ, **threads, "PYTHONPATH": path},
      cwd=orders.scratch or None,
      start_new_session=True,  # Ctrl-C is for the run; and to kill a group
    )
    assert self._process.stdin is not None
    assert self._process.stdout is not None
    self._input = self._process.stdin
    self.output = self._process.stdout
    with contextlib.suppress(OSError, AttributeError):  # not Linux
      fcntl.fcntl(self._input, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    self._buffer = b""
    self._token = "ready"
    self.ready = False
    self.job: int | None = None
    self.deadline = time.monotonic() + _STARTUP_SECONDS

  @property
  def ended(self) -> bool:
    """Whether the process is no more."""
    return self._process.poll() is not None

  def send(
    self, job: int, requests: Sequence[Mapping[str, Any]], seconds: float
  ) -> None:
    """Begins a judgement; its deadline begins too."""
    # Nobody but the judgement knows the token: a reply without it is forged.
    self._token, self.job = secrets.token_hex(8), job
    line = json.dumps({**requests[job], "token": self._token}) + "\n"
    with contextlib.suppress(BrokenPipeError):  # it died: `read` will say so
      self._input.write(line.encode())
      self._input.flush()
    self.deadline = time.monotonic() + seconds

  def read(self) -> bool | None:
    """The verdict, if it is there.

    Raises:
      EOFError: the process has ended, or has said what it should not.
    """
    data = os.read(self.output.fileno(), 65536)
    self._buffer += data
    if not data:
      raise EOFError
    line, found, rest = self._buffer.partition(b"\n")
    if not found:
      return None
    try:
      token, verdict = json.loads(line)
    except ValueError as error:
      raise EOFError from error
    if token != self._token or rest:
      raise EOFError
    self._buffer, self._token = b"", ""
    self.ready, self.job, self.deadline = True, None, float("inf")
    return bool(verdict)

  def said(self) -> str:
    """The end of what it wrote to its error stream."""
    self._errors.seek(0)
    return self._errors.read().decode(errors="replace")[-2000:]

  def end(self) -> None:
    """Kills the process and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self._process.pid, signal.SIGKILL)
    self._process.wait()
    with contextlib.suppress(BrokenPipeError):  # an unsent rest
      self._input.close()
    self.output.close()
    self._errors.close()
    if self._scratch is not None:
      self._scratch.cleanup()


def _end_all(workers: list[_Worker]) -> None:
  while workers:
    workers.pop().end()
