"""What is written and shown at a step boundary: metrics, evaluations, forecast.

Only looks at the run; nothing here changes what is trained.
"""

import json
import pathlib
import time
from typing import Any, NamedTuple

import numpy as np

from scalerl_jax.config import Config
from scalerl_jax.data.tasks import Task
from scalerl_jax.pipeline.events import StepEvent, Totals
from scalerl_jax.pipeline.loop import Pipeline
from scalerl_jax.run.accounting import Compute, check_share
from scalerl_jax.run.evaluate import Evaluation, Evaluator
from scalerl_jax.run.metrics import MetricsWriter
from scalerl_jax.run.peaks import Peaks
from scalerl_jax.run.progress import Progress, run_fields
from scalerl_jax.scaling import points
from scalerl_jax.scaling.decisions import EarlyStop, early_stop
from scalerl_jax.scaling.fit import fit_curve
from scalerl_jax.scaling.forecast import Forecast, forecast_from

SHOWN_SAMPLES = 8  # held-out prompts whose completions are kept
CUT_STEPS = 3  # steps of mostly truncated completions before a warning


class Clocks(NamedTuple):
  """What has been counted and timed so far, or between two moments."""

  seconds: float  # of the loop
  learner: float  # busy seconds
  sampler: float
  decode: float  # of the sampler's, without prefill
  publish: float
  tokens: float  # of finished completions
  discarded: float  # of these, of groups that were replaced
  learner_flops: float
  sampler_flops: float
  decode_bytes: float


class Recorder:
  """Follows one run.

  Args:
    config: the experiment.
    workdir: where `samples.json` goes.
    task: its held-out sets are evaluated.
    evaluator: on the generator mesh.
    writer: owns the metric files.
    pipeline: the run's.
    devices: devices that the run holds.
    progress: the live line.
    seconds_before: wall seconds of earlier sittings.
    peaks: what the devices do at best; None: no shares of it are told.
  """

  def __init__(
    self,
    config: Config,
    workdir: pathlib.Path,
    *,
    task: Task,
    evaluator: Evaluator,
    writer: MetricsWriter,
    pipeline: Pipeline,
    devices: int,
    progress: Progress,
    seconds_before: float,
    peaks: Peaks | None = None,
  ):
    self.config, self.workdir, self.task = config, workdir, task
    self.evaluator, self.writer, self.pipeline = evaluator, writer, pipeline
    self.devices, self.progress, self.peaks = devices, progress, peaks
    self._compute = Compute(
      config.model,
      config.sampler,
      config.batch,
      vocab_size=task.tokenizer.vocab_size,
    )
    self._started = time.perf_counter()
    self._seconds_before = seconds_before
    self._forecast: Forecast | None = None
    self.early_stop: EarlyStop | None = None  # as of the last evaluation
    curve = writer.curve(next(iter(task.heldout)))
    rates = curve.get("pass_rate", np.zeros((0,)))
    self._pass_rate = float(rates[-1]) if rates.size else None
    self._before = self._clocks()
    self._cut_steps = 0

  def wall_seconds(self) -> float:
    """Seconds of all sittings, from the end of compilation on."""
    return self._seconds_before + time.perf_counter() - self._started

  def evaluates_at(self, step: int) -> bool:
    """Whether the held-out sets are evaluated at this step."""
    last = self.config.run.steps
    return step % self.config.evaluation.every == 0 or step == last

  def on_step(self, event: StepEvent) -> None:
    """Writes the step's line, evaluates when due, shows the live line."""
    values = {**event.metrics, **self._derived(event)}
    due = self.evaluates_at(event.step)
    if due:
      self.evaluate(event.step)
      values |= self._forecast_fields()
    self.writer.step(event.step, values)
    self._warn(event)
    shown = run_fields({**self._forecast_fields(), **values}, self._pass_rate)
    self.progress.update(event.step, shown, now=due)

  def evaluate(self, step: int) -> None:
    """Every held-out set under the published weights; refits the forecast."""
    _, params = self.pipeline.transport.fetch()
    totals = self.pipeline.totals
    axes = {
      "trained_tokens": totals.trained_tokens,
      "generated_tokens": totals.generated_tokens,
      "flops_full": self._flops_full(step, totals),
      "flops_spent": self._compute.spent(totals),
      "device_seconds": self._device_seconds(),
      "wall_seconds": self.wall_seconds(),
    }
    for number, (name, heldout) in enumerate(self.task.heldout.items()):
      found = self.evaluator.evaluate(params, heldout)
      self.writer.evaluation(
        step,
        name,
        axes,
        found.correct,
        found.samples,
        found.mean_length,
        found.truncated,
      )
      if number == 0:
        self._pass_rate = found.pass_rate
        self._keep_samples(step, found)
        self._forecast = self._forecast_end(name, step)

  def _clocks(self) -> Clocks:
    pipeline, totals = self.pipeline, self.pipeline.totals
    return Clocks(
      seconds=totals.train_seconds,
      learner=pipeline.learner_watch.busy_seconds,
      sampler=pipeline.sampler_watch.busy_seconds,
      decode=pipeline.sampler_watch.seconds["chunk"],
      publish=pipeline.weights_watch.busy_seconds,
      tokens=totals.generated_tokens,
      discarded=totals.discarded_tokens,
      learner_flops=self._compute.spent_on_training(totals),
      sampler_flops=self._compute.spent_on_generation(totals),
      decode_bytes=self._compute.decoded_bytes(totals),
    )

  def _machine_shares(self, passed: Clocks) -> dict[str, float]:
    """Work counted, over busy seconds, over what the devices do at best."""
    if self.peaks is None:
      return {}
    return {
      name: peak.share(name, work / seconds)
      for name, peak, work, seconds in (
        (
          *("time/learner_mfu", self.peaks.learner_matmul),
          *(passed.learner_flops, passed.learner),
        ),
        (
          *("time/sampler_mfu", self.peaks.sampler_matmul),
          *(passed.sampler_flops, passed.sampler),
        ),
        (
          *("time/sampler_bandwidth_share", self.peaks.sampler_copy),
          *(passed.decode_bytes, passed.decode),
        ),
      )
      if seconds  # a side may have no work in a step
    }

  def _derived(self, event: StepEvent) -> dict[str, Any]:
    """Shares and rates of a step; those that follow time are under `time/`."""
    totals, metrics = event.totals, event.metrics
    slots = self.config.sampler.slots
    now, before = self._clocks(), self._before
    self._before = now
    passed = Clocks(*(a - b for a, b in zip(now, before, strict=True)))
    seconds = passed.seconds
    occupancy = totals.drawn_tokens / max(totals.decode_steps * slots, 1)
    # Groups that were replaced are work that taught nothing, too.
    judged = metrics["batch_tokens"] + passed.discarded
    useful = metrics["kept_tokens"] / judged
    return {
      "sampler_occupancy": check_share("sampler_occupancy", occupancy),
      "useful_token_fraction": check_share("useful_token_fraction", useful),
      "generated_tokens": totals.generated_tokens,
      "trained_tokens": totals.trained_tokens,
      "skipped_steps": totals.skipped_steps,
      "discarded_groups": totals.discarded_groups,
      "verifier_timeouts": totals.verifier_timeouts,
      "oldest_wait_share": check_share(
        "oldest_wait_share", totals.waits_for_oldest / max(totals.chunks, 1)
      ),
      "flops_full": self._flops_full(event.step, totals),
      "flops_spent": self._compute.spent(totals),
      "time/step_seconds": seconds,
      "time/sampler_tokens_per_second": passed.tokens / seconds,
      "time/learner_idle_share": max(0.0, 1.0 - passed.learner / seconds),
      "time/sampler_idle_share": max(0.0, 1.0 - passed.sampler / seconds),
      "time/publish_seconds": passed.publish,
      **self._machine_shares(passed),
      "time/device_seconds": self._device_seconds(),
      "time/wall_seconds": self.wall_seconds(),
    }

  def _flops_full(self, step: int, totals: Totals) -> float:
    return self._compute.full(
      step,
      totals.trained_tokens,
      discarded_groups=totals.discarded_groups,
      discarded_tokens=totals.discarded_tokens,
    )

  def _device_seconds(self) -> float:
    """Devices held times training seconds; evaluation is counted apart."""
    return self.devices * self.pipeline.totals.train_seconds

  def _forecast_fields(self) -> dict[str, float]:
    if self._forecast is None:
      return {}
    # A forecast against time differs between equal runs, as time does.
    timed = self.config.run.forecast_axis.endswith("_seconds")
    prefix = "time/forecast" if timed else "forecast"
    names = ("mean", "low", "high")
    fields = {f"{prefix}/{n}": getattr(self._forecast, n) for n in names}
    if self.early_stop is not None:
      fields[f"{prefix}/stop_probability"] = self.early_stop.probability
    return fields

  def _forecast_end(self, name: str, step: int) -> Forecast | None:
    """The run's end as seen from here: its compute scaled by the steps left."""
    if not step:
      return None
    curve = self.writer.curve(name)
    run = self.config.run
    compute = np.asarray(curve[run.forecast_axis], np.float64)
    if not points.enough(compute):
      return None
    fit = fit_curve(
      compute,
      curve["pass_rate"],
      trials=curve["prompts"] * curve["samples_per_prompt"],
    )
    end = float(compute[-1]) * run.steps / step
    if run.early_stop_gain and step < run.steps:
      self.early_stop = early_stop(
        fit, end, run.early_stop_gain, run.early_stop_confidence
      )
    return forecast_from(fit, end, run.forecast_level)

  def _keep_samples(self, step: int, found: Evaluation) -> None:
    """The same held-out prompts before and after, for the report."""
    path = self.workdir / "samples.json"
    when = "after" if step else "before"
    heldout = next(iter(self.task.heldout.values()))[:SHOWN_SAMPLES]
    rows: list[dict[str, Any]] = (
      json.loads(path.read_text())
      if step
      else [{"prompt": p.text, "answer": p.answer} for p in heldout]
    )
    for n, row in enumerate(rows):
      row[when] = {
        "text": found.texts[n],
        "correct": bool(found.first_correct[n]),
      }
    path.write_text(json.dumps(rows, indent=1))

  def _budget(self) -> str:
    """The setting that completions run out of, with its value."""
    if self.config.length.control == "interruption":
      # Thinking is always interrupted in time: what is cut is the answer.
      return f"length.answer_tokens ({self.config.length.answer_tokens})"
    budget = self.config.sampler.max_completion_tokens
    return f"sampler.max_completion_tokens ({budget})"

  def _warn(self, event: StepEvent) -> None:
    """One sentence when most completions are cut for three steps."""
    share = event.metrics["truncated"]
    self._cut_steps = self._cut_steps + 1 if share > 0.5 else 0
    if self._cut_steps == CUT_STEPS:
      self.progress.say(
        f"warning: {share:.0%} of the completions ran out of budget for"
        f" {CUT_STEPS} steps; raise {self._budget()}"
      )
