"""The pipeline-asynchronous loop: one thread that dispatches everything.

Decode chunks and updates run on their devices while the host admits prompts,
judges completions and publishes weights between chunks.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalerl_jax.config import SCHEDULES, LengthConfig
from scalerl_jax.data.curriculum import PromptStream
from scalerl_jax.data.tasks import Task
from scalerl_jax.learning.batching import make_batch
from scalerl_jax.learning.learner import Learner
from scalerl_jax.pipeline.clock import LogicalClock
from scalerl_jax.pipeline.events import (
  NonFiniteError,
  StepEvent,
  Totals,
  batch_metrics,
)
from scalerl_jax.pipeline.groups import Groups
from scalerl_jax.pipeline.journal import Journal
from scalerl_jax.pipeline.judging import Judging
from scalerl_jax.pipeline.refill import Refill
from scalerl_jax.pipeline.schedule import StalenessLedger
from scalerl_jax.pipeline.stopwatch import Stopwatch
from scalerl_jax.pipeline.store import Scored
from scalerl_jax.pipeline.timeline import Timeline
from scalerl_jax.pipeline.transport import Transport
from scalerl_jax.sampling.sampler import Finished, Sampler
from scalerl_jax.types import RunState

POLL_SECONDS = 5e-4
# Why the learner has no batch, by what the ledger says.
_WAITS = {
  "queue": "too few finished groups",
  "oldest": "waits for an old group",
  None: "the run is done",
}


class Pipeline:
  """PipelineRL-k in one process.

  At a step boundary no update runs and no chunk is in the air; `state_dict`
  then holds everything that changes.

  Args:
    task: prompts and verdicts.
    stream: the order of training prompts.
    sampler: on the generator mesh.
    learner: on the trainer mesh.
    transport: carries weights and scored groups.
    ledger: which group may start, which batch may be used.
    length: what becomes of long and truncated completions.
    refill_limit: groups of zero variance that are replaced for each batch.
    schedule: one of `SCHEDULES`.
    chunks_per_step: logical schedule: chunks between an update's start and
      its publication.
    journal: where the schedule is written, if anywhere.
    timeline: where what ran when is written, if anywhere.
  """

  def __init__(
    self,
    *,
    task: Task,
    stream: PromptStream,
    sampler: Sampler,
    learner: Learner,
    transport: Transport,
    ledger: StalenessLedger,
    schedule: str,
    chunks_per_step: int,
    length: LengthConfig = LengthConfig(),
    refill_limit: int = 0,
    journal: Journal | None = None,
    timeline: Timeline | None = None,
  ):
    if schedule not in SCHEDULES:
      raise ValueError(
        f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}"
      )
    self.stream = stream
    self.sampler, self.learner = sampler, learner
    self.transport, self.ledger = transport, ledger
    self.journal = journal
    self._length = length
    self.clock = (
      LogicalClock(chunks_per_step) if schedule == "logical" else None
    )
    self.totals = Totals()
    self.events = 0  # journal lines of the state that the run goes on from
    self.timeline = timeline = timeline or Timeline(None)
    self.learner_watch = Stopwatch("learner", timeline)
    self.sampler_watch = Stopwatch("sampler", timeline)
    self.weights_watch = Stopwatch("weights", timeline)
    self.judging = Judging(task, beside=self.clock is None, timeline=timeline)
    self.groups = Groups(
      stream=stream,
      ledger=ledger,
      transport=transport,
      judging=self.judging,
      refill=Refill(refill_limit),
      totals=self.totals,
      length=length,
      sampler=sampler.config,
      group_size=sampler.group_size,
      write=self._write,
    )
    self.store = self.groups.store
    self._pending: dict[str, Any] = {}  # host metrics of the running update
    self._examples: list[Scored] = []
    self._on_step: Callable[[StepEvent], None] = lambda event: None
    self._pauses_at: Callable[[int], bool] = lambda step: True
    self._should_stop: Callable[[], bool] = lambda: False
    self._chunk_in_air = False
    self._ended: Finished | None = None
    self._resumed_at = 0.0
    self._published = self._running = False

  def run(
    self,
    on_step: Callable[[StepEvent], None],
    should_stop: Callable[[], bool] = lambda: False,
    pauses_at: Callable[[int], bool] = lambda step: True,
  ) -> None:
    """Trains until all steps are done or `should_stop()`.

    Args:
      on_step: called at each step boundary, its time not counted.
      should_stop: asked between chunks; the run stops at a step boundary, or
        where no update is running.
      pauses_at: whether `on_step` of this step needs the sampler still; the
        wall schedule waits for the chunk in the air then.
    """
    self._on_step, self._pauses_at = on_step, pauses_at
    self._should_stop = should_stop
    self._resumed_at = time.perf_counter()
    self._running = True
    try:
      if not self._published:
        self.publish_weights()
      while not self.ledger.done:
        self._collect()
        if self._due():
          self._finish_update()
        if should_stop() and not self.learner.running:
          break
        self._start_update()
        self._advance_sampler()
        self._score()
        self._check_alive()
      self.groups.file(wait=True)
      self.weights_watch.stop()
    finally:
      self._count_seconds()
      self._running = False
      self.judging.close()
      for watch in (self.learner_watch, self.sampler_watch, self.weights_watch):
        watch.close()

  @property
  def _idle(self) -> bool:
    """The sampler has nothing to do and nothing may start."""
    return not self.sampler.busy and not self.ledger.admissible()

  def _due(self) -> bool:
    if not self.learner.running:
      return False
    if self.clock is not None:
      return self.clock.due(self.totals.chunks, self._idle)
    return self.learner.ready or self._idle

  def _collect(self) -> None:
    """Waits for the chunk in the air and reads what ended in it."""
    if not self._chunk_in_air:
      return
    while self.clock is None and not self.sampler.ready:
      # The wall schedule does not let the learner wait for a chunk's end.
      # A stop needs a moment without an update.
      stop = self._should_stop()
      pause = stop or self._pauses_at(self.ledger.version + 1)
      if self.learner.running and self.learner.ready and not pause:
        self._finish_update()
        self._start_update()
      if self.judging.ready:
        self.groups.file()
        if not stop:
          self._start_update()
      time.sleep(POLL_SECONDS)
    with self.timeline.span("wait for the chunk"):
      steps, drawn = self.sampler.chunk_stats()
      self.sampler_watch.stop(steps=steps, tokens=drawn)
    self._chunk_in_air = False
    self.totals.decode_steps += steps
    self.totals.drawn_tokens += drawn
    self.totals.count_sampled(self.sampler.take_work())
    with self.timeline.span("read"):
      ended = self.sampler.finished()
    if ended is not None:
      self.totals.generated_tokens += int(ended.length.sum())
      self._ended = ended

  def _advance_sampler(self) -> None:
    """Admits what may start, prefills it, and dispatches the next chunk."""
    version, params = self.transport.fetch()
    count = min(self.ledger.admissible(), self.sampler.room)
    if count:
      with self.timeline.span("admit", groups=count):
        groups = self.groups.admit(count, version)
      began = time.perf_counter()
      with self.timeline.span("dispatch the prefill"):
        self.sampler.insert(params, version, groups)
        # A copy, for the chunk is given the slots to write into.
        inserted = jnp.copy(self.sampler.state.active)
      self.sampler_watch.start(
        inserted, "prefill", began, prompts=count, version=version
      )
    if self.sampler.busy:
      began = time.perf_counter()
      with self.timeline.span("dispatch the chunk"):
        self.sampler.start_chunk(params, version)
      self.sampler_watch.start(
        self.sampler.chunk_arrays, "chunk", began, version=version
      )
      self._chunk_in_air = True
      self.totals.chunks += 1
      self.totals.waits_for_oldest += self.ledger.blocked_on() == "oldest"
      self._write("chunk", version=version)
    else:
      self.sampler_watch.idle("nothing may start before a publication")

  def _score(self) -> None:
    """Files what ended and has whole groups judged."""
    with self.timeline.span("file"):
      self._settle()
      self.groups.judge()
      # Where neither side works, verdicts are all there is to wait for.
      self.groups.file(not self._chunk_in_air and not self.learner.running)

  def _settle(self) -> None:
    """Files what ended: after the next chunk was dispatched, so that the
    sampler does not wait for it."""
    if self._ended is not None:
      self.store.write(self._ended)
      self._ended = None

  def _start_update(self) -> None:
    """Dispatches an update if the learner is free and a batch may be used."""
    if self.learner.running:
      return
    indices = self.ledger.next_batch()
    if indices is None:
      self.learner_watch.idle(_WAITS[self.ledger.blocked_on()])
      return
    staleness = self.ledger.take(indices)
    scored = self.groups.take(indices)
    # Where the update will run: the sampler's device is busy with a chunk.
    with (
      self.timeline.span("collate"),
      jax.default_device(self.learner.mesh.devices.flat[0]),
    ):
      batch = make_batch(
        [s.rollout for s in scored],
        np.stack([s.correct for s in scored]),
        self._length,
      )
    k = self.ledger.max_staleness
    self._pending = batch_metrics(scored, staleness, k, self._length)
    self._pending["retired_share"] = self.stream.retired_share
    self._examples = scored
    self.totals.trained_tokens += self._pending["batch_tokens"]
    began = time.perf_counter()
    with self.timeline.span("dispatch the update"):
      self.learner.start(batch)
    step = self.ledger.version + 1
    self.learner_watch.start(
      self.learner.metrics_arrays, "update", began, step=step
    )
    if self.clock is not None:
      self.clock.start_update(self.totals.chunks)
    self._write("update", step=self.ledger.version, groups=indices)

  def _finish_update(self) -> None:
    """Waits for the update, publishes its weights and tells the run."""
    with self.timeline.span("wait for the update"):
      metrics = self.learner.collect()
      self.learner_watch.stop(micro_batches=int(metrics["micro_batches"]))
    if self.clock is not None:
      self.clock.publish()
    if not all(np.isfinite(metrics[n]) for n in ("loss", "gradient_norm")):
      raise NonFiniteError(
        self.ledger.version + 1,
        f"loss {metrics['loss']} and gradient norm {metrics['gradient_norm']}",
        self._examples,
      )
    self.ledger.publish()
    self.publish_weights()
    self.totals.skipped_steps += int(metrics["skipped"])
    self.totals.count_computed(metrics)
    step = self.ledger.version
    if self._pauses_at(step):
      self.groups.file(wait=True)
    self._count_seconds()
    self.timeline.step()
    with self.timeline.span("step boundary", step=step):
      self._on_step(
        StepEvent(
          step=step,
          metrics={**self._pending, **metrics},
          totals=self.totals,
          examples=self._examples,
        )
      )
    self._resumed_at = time.perf_counter()

  def publish_weights(self) -> None:
    """Makes the learner's weights the ones that are sampled from."""
    version = self.ledger.version
    self.weights_watch.stop()
    began = time.perf_counter()
    with self.timeline.span("dispatch the publication"):
      arrays = self.transport.publish(version, self.learner.state.params)
    if self._running:
      self.weights_watch.start(arrays, "publish", began, version=version)
    self._published = True
    self._write("publish", version=version)

  def _check_alive(self) -> None:
    if self.ledger.done or self._chunk_in_air or self.learner.running:
      return
    if self.ledger.admissible() or self.ledger.next_batch() is not None:
      return
    raise RuntimeError(
      "the pipeline has stopped: nothing is in flight, nothing may start and"
      f" no batch may be used ({self.ledger.state_dict()})"
    )

  def _count_seconds(self) -> None:
    now = time.perf_counter()
    self.totals.train_seconds += now - self._resumed_at
    self._resumed_at = now

  def _write(self, event: str, **fields: Any) -> None:
    if self.journal is not None:
      self.journal.write(event, self.totals.chunks, **fields)

  def state_dict(self) -> RunState:
    """Everything that changes, at a step boundary."""
    if self.learner.running or self._chunk_in_air:
      raise ValueError("the state is whole at a step boundary only")
    self._settle()
    self.groups.file(wait=True)
    counters = {
      name: np.asarray(value)
      for name, value in dataclasses.asdict(self.totals).items()
    }
    sampler = self.sampler.state_dict()
    return RunState(
      learner=self.learner.state,
      slots=sampler["slots"],
      occupancy=sampler["occupancy"],
      store=self.store.state_dict(),
      ledger=self.ledger.state_dict(),
      stream=self.stream.state(),
      counters={
        **counters,
        "admitted": np.asarray(self.groups.admitted),
        "events": np.asarray(self.journal.events if self.journal else 0),
        "replaced": np.asarray(self.groups.refill.replaced),
      },
    )

  def load_state_dict(self, state: RunState) -> None:
    """Back to what `state_dict` said, and publishes its weights."""
    self.learner.load_state(state["learner"])
    self.sampler.load_state_dict(
      {"slots": state["slots"], "occupancy": state["occupancy"]}
    )
    self.store.load_state_dict(state["store"])
    self.ledger.load_state_dict(state["ledger"])
    self.stream.restore(state["stream"])
    counters = {name: v.item() for name, v in state["counters"].items()}
    self.groups.admitted = counters.pop("admitted")
    self.events = counters.pop("events")
    self.groups.refill.replaced = counters.pop("replaced")
    for name, value in counters.items():
      setattr(self.totals, name, value)
    self.publish_weights()
