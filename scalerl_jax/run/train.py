"""A whole run: everything is built and checked, then trained, then reported."""

import dataclasses
import os
import pathlib
import signal
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from scalerl_jax import config as config_lib
from scalerl_jax.config import Config
from scalerl_jax.data.curriculum import PromptStream
from scalerl_jax.data.tasks import load_task
from scalerl_jax.learning.batching import collate
from scalerl_jax.learning.learner import Learner
from scalerl_jax.learning.optimizer import make_optimizer
from scalerl_jax.learning.train_step import TrainSettings
from scalerl_jax.models.generator import (
  cast,
  generator_graph,
  weight_dtypes,
  with_head_dtype,
)
from scalerl_jax.models.sharding import make_mesh, shardings_on
from scalerl_jax.pipeline.events import NonFiniteError, StepEvent
from scalerl_jax.pipeline.journal import Journal
from scalerl_jax.pipeline.loop import Pipeline
from scalerl_jax.pipeline.phases import PhaseLedger
from scalerl_jax.pipeline.schedule import StalenessLedger
from scalerl_jax.pipeline.store import no_rollout
from scalerl_jax.pipeline.timeline import Timeline
from scalerl_jax.pipeline.transport import InProcess, Transport
from scalerl_jax.run.checkpoint import Checkpoints
from scalerl_jax.run.evaluate import Evaluator
from scalerl_jax.run.meshes import make_meshes
from scalerl_jax.run.metrics import MetricsWriter
from scalerl_jax.run.peaks import Peaks, measure_peaks
from scalerl_jax.run.progress import Progress
from scalerl_jax.run.recorder import Recorder
from scalerl_jax.run.report import Summary, write_report
from scalerl_jax.run.wandb_mirror import check_wandb, make_mirror
from scalerl_jax.run.warm_start import (
  base_policy,
  cache_folder,
  check_vocabulary,
  resolved,
)
from scalerl_jax.run.workdir import (
  check_workdir,
  claim_task,
  claim_workdir,
)
from scalerl_jax.sampling.interruption import make_interruption
from scalerl_jax.sampling.sampler import Sampler, warp_settings


class Run:
  """Everything of one run; `Run(...)` checks, `train()` works.

  Args:
    config: the experiment.
    workdir: where everything is written; a workdir of the same config is
      resumed.

  Raises:
    ValueError: anything about the config, the task or the workdir that would
      not work, before any work starts.
  """

  def __init__(self, config: Config, workdir: str | pathlib.Path):
    # What was asked for names the workdir; the rest sees what it comes to.
    self._asked, config = config, resolved(config)
    self.config = config
    self.workdir = pathlib.Path(workdir)
    self.meshes = make_meshes(config)
    check_wandb(config)
    check_workdir(self.workdir, self._asked)
    stored = self.workdir / "tokenizer.model"
    self.task = load_task(
      config.task,
      config.supervised,
      stored if stored.exists() else None,
      max_prompt_tokens=config.sampler.max_prompt_tokens,
      checkpoint=self._asked.model.checkpoint,
    )
    if self.task.max_turns != 1:
      raise ValueError(
        f"task {self.task.name!r} takes {self.task.max_turns} turns; this"
        " version trains on tasks of one turn"
      )
    self.interruption = make_interruption(
      config.length,
      self.task.tokenizer,
      max_completion_tokens=config.sampler.max_completion_tokens,
    )
    check_vocabulary(self._asked.model, self.task)
    claim_workdir(self.workdir, self._asked)
    claim_task(self.workdir, self._task_fingerprint())
    self.task.tokenizer.store(self.workdir)
    self._stop = self._training = False
    self.peaks: Peaks | None = None

  def _task_fingerprint(self) -> str:
    """Of prompts and answers, and of difficulties where they give the order."""
    found = self.task.fingerprint()
    if self.config.curriculum.order == "easy_to_hard":
      difficulties = [float(p.difficulty) for p in self.task.train]
      found += f"-{config_lib.fingerprint(difficulties)}"
    return found

  def train(
    self, wrap_transport: Callable[[Transport], Transport] = lambda t: t
  ) -> Summary:
    """Trains to the end or to a clean stop; writes the report in any case.

    Ctrl-C and SIGTERM stop at the next step boundary and save the state; the
    same command goes on from there.

    Args:
      wrap_transport: puts a transport of the caller's around the run's own.

    Raises:
      FloatingPointError: an update was not finite; its batch is saved.
    """
    enable_compilation_cache()
    handlers = {
      number: signal.signal(number, self._on_signal)
      for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
      self._build(wrap_transport)
      try:
        self._train()
      except NonFiniteError as error:
        path = self._save_batch(error)
        raise FloatingPointError(f"{error}; its batch is in {path}") from error
      finally:
        self._close()
        summary = self._report()
    finally:
      for number, handler in handlers.items():
        signal.signal(number, handler)
    return summary

  def _build(self, wrap_transport: Callable[[Transport], Transport]) -> None:
    """Policy, both sides, the pipeline between them; restored and compiled."""
    config, meshes, task = self.config, self.meshes, self.task
    graph, base = base_policy(
      task,
      task_config=config.task,
      supervised=config.supervised,
      model=self._asked.model,
      # A checkpoint may be too large for a whole copy on each device.
      mesh=meshes.trainer
      if self._asked.model.checkpoint
      else make_mesh(jax.local_devices()),
    )
    on_generator = shardings_on(meshes.generator, base)
    held_in = weight_dtypes(base, config.model, config.sampler)
    generator_params = jax.device_put(cast(base, held_in), on_generator)
    self.learner = Learner(
      jax.device_put(base, shardings_on(meshes.trainer, base)),
      TrainSettings(
        policy=with_head_dtype(graph, base, config.loss.head_dtype),
        optimizer=make_optimizer(config.optimizer),
        loss=config.loss,
        warp=tuple(sorted(warp_settings(config.sampler).items())),
        group_size=config.batch.group_size,
        micro_batch=config.batch.micro_batch,
        max_completion_tokens=config.sampler.max_completion_tokens,
        packing=config.batch.packing,
        width_buckets=config.batch.width_buckets,
        share_prompts=config.batch.share_prompts,
      ),
      meshes.trainer,
    )
    graph = generator_graph(graph, base, config.sampler)
    sampler = Sampler(
      graph,
      generator_params,
      config.sampler,
      group_size=config.batch.group_size,
      eos_ids=task.tokenizer.eos_ids,
      seed=config.run.seed,
      mesh=meshes.generator,
      interruption=self.interruption,
    )
    self.evaluator = Evaluator(
      task,
      graph,
      generator_params,
      config.evaluation,
      config.sampler,
      meshes.generator,
      self.interruption,
    )
    steps = config.run.trace_steps
    self.timeline = Timeline(
      self.workdir / "trace.json" if steps else None, steps=steps
    )
    self.pipeline = Pipeline(
      task=task,
      stream=PromptStream(
        task.train,
        seed=config.run.seed,
        curriculum=config.curriculum,
        weights=config.task.weights,
      ),
      sampler=sampler,
      learner=self.learner,
      transport=wrap_transport(InProcess(on_generator, held_in)),
      ledger=make_ledger(config),
      schedule=config.pipeline.schedule,
      chunks_per_step=config.pipeline.chunks_per_step,
      length=config.length,
      refill_limit=refill_limit(config),
      timeline=self.timeline,
    )
    self._restore()
    if not self.pipeline.ledger.done:
      self._compile(sampler, generator_params)

  def _restore(self) -> None:
    """The newest saved state, if any, and files cut back to it."""
    self.checkpoints = Checkpoints(
      self.workdir / "checkpoints", keep=self.config.checkpoint.keep
    )
    self.resumed = self.checkpoints.latest
    self._seconds_before = 0.0
    if self.resumed is not None:
      state = self.checkpoints.restore(self.resumed, self._state(0.0))
      self._seconds_before = float(state["wall_seconds"])
      self.pipeline.load_state_dict(state["run"])
    self.writer = MetricsWriter(
      self.workdir,
      resume_step=self.resumed,
      mirror=make_mirror(self._asked, self.workdir),
    )
    self.pipeline.journal = Journal(
      self.workdir / "journal.jsonl", events=self.pipeline.events
    )

  def _compile(self, sampler: Sampler, params: nnx.State) -> None:
    """Every program, before the clock of training starts."""
    config = self.config
    sampler.compile(params)
    self.evaluator.compile(params)
    shape = (config.batch.prompts, config.batch.group_size)
    nobody = no_rollout(config.batch.group_size, config.sampler)
    zeros = np.zeros(shape, np.int32)
    self.learner.compile(
      collate([nobody] * config.batch.prompts, zeros, zeros.astype(float))
    )
    self.peaks = measure_peaks(
      config, self.meshes, self.task.tokenizer.vocab_size
    )

  def _train(self) -> None:
    with Progress(self.config.run.steps, "ScaleRL") as progress:
      self.recorder = Recorder(
        self.config,
        self.workdir,
        task=self.task,
        evaluator=self.evaluator,
        writer=self.writer,
        pipeline=self.pipeline,
        devices=self.meshes.devices,
        progress=progress,
        seconds_before=self._seconds_before,
        peaks=self.peaks,
      )
      if self.task.dropped:
        limit = self.config.sampler.max_prompt_tokens
        progress.say(
          f"{self.task.dropped} prompts of more than {limit} tokens"
          " (sampler.max_prompt_tokens) were dropped"
        )
      for name in self.writer.set_aside:
        progress.say(f"{name} of an earlier run is now {name}.old")
      if self.resumed is None:
        self.pipeline.publish_weights()
        self.recorder.evaluate(0)  # version 0, before the first update
        self._save()
      else:
        progress.say(f"going on from step {self.resumed}")
      self._training = True
      self.pipeline.run(
        self._on_step,
        lambda: self._stop,
        lambda step: self.recorder.evaluates_at(step) or self._saves_at(step),
      )
      if not self.pipeline.ledger.done:
        self._save()
        progress.say(
          f"stopped at step {self.pipeline.ledger.version}; the same command"
          " goes on from there"
        )

  def _on_step(self, event: StepEvent) -> None:
    self.recorder.on_step(event)
    if self._saves_at(event.step):
      self._save()
    found = self.recorder.early_stop
    if found is not None and found.stop and not self._stop:
      self._stop = True
      self.recorder.progress.say(
        f"early stop at step {event.step}: with probability"
        f" {found.probability:.3f} the rest of the run gains less than"
        f" {self.config.run.early_stop_gain:g} (expected"
        f" {found.gain.mean:+.4f}); set run.early_stop_gain to 0 in a new"
        " workdir to run to the end"
      )

  def _saves_at(self, step: int) -> bool:
    every, last = self.config.checkpoint.every, self.config.run.steps
    return step % every == 0 or step == last

  def _on_signal(self, number: int, frame: Any) -> None:
    del frame
    if self._stop or not self._training:  # asked twice, or nothing to save
      raise KeyboardInterrupt
    self._stop = True
    # Not print: it may be what was interrupted.
    name = signal.Signals(number).name
    os.write(1, f"\n{name}: stopping at the next step boundary\n".encode())

  def _state(self, wall_seconds: float) -> dict[str, Any]:
    return {
      "run": self.pipeline.state_dict(),
      "wall_seconds": np.asarray(wall_seconds),
    }

  def _save(self) -> None:
    self.checkpoints.save(
      self.pipeline.ledger.version, self._state(self.recorder.wall_seconds())
    )
    if self.pipeline.journal is not None:
      self.pipeline.journal.flush()

  def _save_batch(self, error: NonFiniteError) -> pathlib.Path:
    """The batch of an update that was not finite."""
    path = self.workdir / f"nonfinite_step_{error.step}.npz"
    fields = [f.name for f in dataclasses.fields(error.batch[0].rollout)]
    arrays = {
      name: np.stack([getattr(s.rollout, name) for s in error.batch])
      for name in fields
    }
    arrays["correct"] = np.stack([s.correct for s in error.batch])
    np.savez(path, allow_pickle=False, **arrays)
    return path

  def _close(self) -> None:
    self.writer.close()
    self.timeline.close()
    if self.pipeline.journal is not None:
      self.pipeline.journal.close()
    self.checkpoints.close()

  def _report(self) -> Summary:
    return write_report(
      self.workdir,
      title=f"ScaleRL on {self.task.name}",
      config=config_lib.to_dict(self.config),
      level=self.config.run.forecast_level,
      axis=self.config.run.forecast_axis,
    )


def make_ledger(config: Config) -> StalenessLedger:
  """Which groups may start and be used, by `pipeline.algorithm`."""
  prompts = config.batch.prompts
  total = config.run.steps * prompts
  if config.pipeline.algorithm == "ppo_off_policy":
    return PhaseLedger(prompts, config.pipeline.updates_per_phase, total)
  return StalenessLedger(prompts, config.pipeline.max_staleness, total)


def refill_limit(config: Config) -> int:
  """Groups of zero variance that may be replaced before a batch is taken.

  PPO-off-policy-k generates k batches before it takes the first.
  """
  if config.loss.zero_variance != "refill":
    return 0
  phases = config.pipeline.algorithm == "ppo_off_policy"
  batches = config.pipeline.updates_per_phase if phases else 1
  return config.loss.refill_limit * config.batch.prompts * batches


def enable_compilation_cache() -> None:
  """Keeps compiled programs between runs, beside the base policies."""
  jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
