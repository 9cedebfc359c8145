"""Runs of a study in processes of their own, a few at a time, each pinned.

What is done is left alone, what was interrupted goes on, what fails is told
by name while the others go on. Imports nothing heavy: the cores are the runs'.
"""

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from experiments.studies.worker import DONE
from scalerl_jax import config as config_lib
from scalerl_jax.config import Config
from scalerl_jax.run.host import visible_cores

WORKER = (sys.executable, "-m", "experiments.studies.worker")
MOST_PROCESSES = 2
GRACE_SECONDS = 20.0  # to save a state; then the process is killed


@dataclasses.dataclass(frozen=True)
class Job:
  """One run of a study."""

  variant: str
  seed: int
  config: Config
  folder: pathlib.Path  # the run's workdir; its log stands beside it

  @property
  def name(self) -> str:
    """As a person calls it."""
    return f"{self.variant}, seed {self.seed}"

  @property
  def log(self) -> pathlib.Path:
    """What the run printed, in all its sittings."""
    return self.folder.with_suffix(".log")

  @property
  def done(self) -> bool:
    """Whether the run has reached its last step."""
    return (self.folder / DONE).exists()

  def line(self) -> str:
    """As the worker reads it."""
    values = {
      "config": config_lib.to_dict(self.config),
      "workdir": str(self.folder),
      "log": str(self.log),
    }
    return json.dumps(values) + "\n"


@dataclasses.dataclass
class Outcome:
  """How the runs of one sitting ended."""

  failed: dict[str, str]  # last line of the log, by the run's name
  stopped: bool  # told to stop before all had ended


class _Worker:
  """A process, and the run that it was given last."""

  def __init__(
    self, command: Sequence[str], cores: Sequence[int], flags: str, job: Job
  ):
    self.cores = cores
    self.job: Job | None = None
    job.log.parent.mkdir(parents=True, exist_ok=True)
    text = ",".join(map(str, cores))
    with job.log.open("a") as log:
      self.process = subprocess.Popen(
        [*command, text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,  # until the worker has the log of a run
        text=True,
        env=_environment(len(cores), flags),
        process_group=0,
      )
    assert self.process.stdin is not None
    assert self.process.stdout is not None
    self.questions, self.answers = self.process.stdin, self.process.stdout
    self.give(job)

  def give(self, job: Job | None) -> None:
    """Hands over the next run; None: there is no more."""
    self.job = job
    # A worker that has died is found at the end of its answers.
    with contextlib.suppress(BrokenPipeError):
      if job is None:
        self.questions.close()
      else:
        job.log.parent.mkdir(parents=True, exist_ok=True)
        self.questions.write(job.line())
        self.questions.flush()

  def answer(self) -> dict[str, Any] | None:
    """How the run ended; None: the process has."""
    line = self.answers.readline()
    return json.loads(line) if line.endswith("\n") else None

  def signal(self, number: int) -> None:
    """Sent to the process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self.process.pid, number)

  def close(self) -> None:
    """Waits for the end; pipes closed."""
    for pipe in (self.questions, self.answers):
      with contextlib.suppress(BrokenPipeError):
        pipe.close()
    self.process.wait()


def core_sets(cores_of_a_run: int) -> list[list[int]]:
  """The cores of each process: at most two processes, no core twice."""
  affinity = getattr(os, "sched_getaffinity", None)  # macOS has none
  cores = sorted(affinity(0)) if affinity else list(range(visible_cores()))
  each = min(cores_of_a_run, len(cores))
  count = min(len(cores), MOST_PROCESSES) // each
  return [cores[i * each : (i + 1) * each] for i in range(count)]


def run_jobs(
  jobs: Sequence[Job],
  *,
  cores: Sequence[Sequence[int]],
  reuse: bool,
  flags: str,
  tell: Callable[[str], None],
  command: Sequence[str] = WORKER,
) -> Outcome:
  """Runs what is not done yet, in this order; tells a line a finished run.

  Args:
    jobs: all runs of the study.
    cores: of each process.
    reuse: a process takes one run after another, so that it imports and
      compiles once; otherwise each run has a process of its own.
    flags: XLA flags besides those that follow from the cores.
    tell: prints a line.
    command: starts a worker; the cores are put behind it.

  Returns:
    Which runs failed, and whether Ctrl-C or SIGTERM came.
  """
  waiting = collections.deque(job for job in jobs if not job.done)
  left = len(waiting)
  free = [list(each) for each in cores]
  outcome = Outcome({}, False)
  live: list[_Worker] = []

  def ended(worker: _Worker, answer: dict[str, Any] | None) -> None:
    nonlocal left
    job, worker.job = worker.job, None
    if job is None:
      return
    if answer and answer["state"] == "done":
      left -= 1
      rates = [f"{rate:.3f}" for rate in answer["pass_rate"].values()]
      tell(
        f"{job.name}: {answer['seconds']:.0f} s, pass rate"
        f" {' and '.join(rates)}, {left} left"
      )
    elif not outcome.stopped:
      left -= 1
      why = _last_line(job.log)
      if answer is None:
        why = f"its process ended with code {worker.process.wait()}: {why}"
      outcome.failed[job.name] = why
      tell(f"{job.name}: failed ({why}), {left} left")

  with _stop_signals() as asked, selectors.DefaultSelector() as selector:
    try:
      deadline = float("inf")
      while live or (waiting and not asked):
        while waiting and free and not asked:
          worker = _Worker(command, free.pop(0), flags, waiting.popleft())
          live.append(worker)
          selector.register(worker.answers, selectors.EVENT_READ, worker)
        for key, _ in selector.select(timeout=0.2):
          worker: _Worker = key.data
          answer = worker.answer()
          ended(worker, answer)
          if answer is None:
            selector.unregister(worker.answers)
            worker.close()
            live.remove(worker)
            free.append(list(worker.cores))
          else:
            more = reuse and waiting and not asked
            worker.give(waiting.popleft() if more else None)
        if asked and not outcome.stopped:
          outcome.stopped = True
          deadline = time.monotonic() + GRACE_SECONDS
          tell("stopping; what the runs have reached is saved")
          for worker in live:
            worker.signal(signal.SIGTERM)
        if len(asked) > 1 or time.monotonic() > deadline:
          for worker in live:
            worker.signal(signal.SIGKILL)
    finally:
      for worker in live:  # of an error here: no process is left behind
        worker.signal(signal.SIGKILL)
        worker.close()
    outcome.stopped |= bool(asked) and bool(waiting)
  return outcome


def _environment(devices: int, flags: str) -> dict[str, str]:
  """One single-threaded device a core, whatever the caller's own are."""
  own = (
    "--xla_cpu_multi_thread_eigen=false"
    f" --xla_force_host_platform_device_count={devices} {flags}"
  )
  return os.environ | {"XLA_FLAGS": own.strip(), "JAX_PLATFORMS": "cpu"}


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
  """The signals that have come: SIGINT and SIGTERM are remembered, no more."""
  asked: list[int] = []
  numbers = (signal.SIGINT, signal.SIGTERM)
  before = {
    number: signal.signal(number, lambda came, _: asked.append(came))
    for number in numbers
  }
  try:
    yield asked
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


def _last_line(log: pathlib.Path) -> str:
  lines = log.read_text(errors="replace").split("\n") if log.exists() else []
  told = [line.strip() for line in lines if line.strip()]
  return told[-1] if told else "nothing in its log"
