"""Asynchronous against synchronous: `python -m benchmarks.bench overlap`.

The same pipeline, policy and work on two single-threaded devices, the sampler
on the first and the learner on the second. Every completion is written to its
budget; how many groups of a batch are mixed sets the learner's share of the
work, since the train step leaves constant groups out. A first phase measures
the cost of a step at two such shares and takes the one of the wanted ratio.
Synchronous is `max_staleness` 0. All figures are of one process, the two
schedules in turn. XLA's products take an idle core's thread, whatever was asked
for, so while only one side runs the process is kept on one core: a device is a
thread. Without that (`..._on_both_cores`) a half alone has two.
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

GROUPS, GROUP = 32, 8  # a step: 256 completions
PROMPT, BUDGET, CHUNK = 64, 32, 8
STEPS, WARM = 14, 4  # of a run; its first and its last two do not count
REPEATS = 3  # odd: the median is one of them
SPLITS = {"1:1": 1.0, "generation 4:1": 0.25, "training 4:1": 4.0}


@contextlib.contextmanager
def one_core() -> Iterator[None]:
  """Keeps all threads that this process has now on one core."""
  everywhere = os.sched_getaffinity(0)
  core = min(everywhere)
  before: dict[int, set[int]] = {}
  for task in map(int, os.listdir("/proc/self/task")):
    with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
      before[task] = os.sched_getaffinity(task)
      os.sched_setaffinity(task, {core})
  try:
    yield
  finally:
    for task in map(int, os.listdir("/proc/self/task")):
      cores = before.get(task, everywhere)  # born here, it has the one
      with contextlib.suppress(ProcessLookupError):
        os.sched_setaffinity(task, cores)


class Ration:
  """A judge that has so many groups of every batch mixed, unread."""

  timeouts = 0

  def __init__(self):
    self.mixed, self._seen = 0, 0

  def judge(self, prompts, completions, ended):
    """Half of a mixed group is right, and all of another."""
    del completions, ended
    numbers = self._seen + np.arange(len(prompts)) // GROUP
    self._seen += len(prompts) // GROUP
    # Spread over the batch, so that any P groups in a row have as many.
    place = numbers % GROUPS
    mixed = (place + 1) * self.mixed // GROUPS > place * self.mixed // GROUPS
    return ~mixed | (np.arange(len(prompts)) % 2 == 0)


class Sides:
  """Sampler and learner, compiled once, for one pipeline after another."""

  def __init__(self):
    import jax
    from flax import nnx

    from scalerl_jax.config import Config
    from scalerl_jax.data.tasks import load_task
    from scalerl_jax.learning.learner import Learner
    from scalerl_jax.learning.optimizer import make_optimizer
    from scalerl_jax.learning.train_step import TrainSettings
    from scalerl_jax.models.policy import Policy
    from scalerl_jax.models.sharding import make_mesh, shardings_on
    from scalerl_jax.sampling.sampler import Sampler

    config = Config()
    self.ration = Ration()
    task = load_task(config.task, config.supervised, max_prompt_tokens=PROMPT)
    self.task = dataclasses.replace(task, verifier=self.ration)
    first, second = (make_mesh([d]) for d in jax.local_devices()[:2])
    graph, params = nnx.split(
      Policy(
        config.model,
        vocab_size=task.tokenizer.vocab_size,
        rngs=nnx.Rngs(0),
        mesh=second,
      )
    )
    self.learner = Learner(
      params,
      TrainSettings(
        policy=graph,
        optimizer=make_optimizer(config.optimizer),
        loss=config.loss,
        warp=(),
        group_size=GROUP,
        micro_batch=GROUP,
        max_completion_tokens=BUDGET,
      ),
      second,
    )
    self.shardings = shardings_on(first, params)
    params = jax.device_put(params, self.shardings)
    self.sampler = Sampler(
      graph,
      params,
      dataclasses.replace(
        config.sampler,
        slots=GROUPS * GROUP,
        chunk=CHUNK,
        max_prompt_tokens=PROMPT,
        max_completion_tokens=BUDGET,
      ),
      group_size=GROUP,
      eos_ids=(task.tokenizer.vocab_size,),  # never drawn
      seed=0,
      mesh=first,
    )
    self.sampler.compile(params)

  def run(self, mixed: int, max_staleness: int) -> dict[str, float]:
    """Seconds of a step in a run with so many mixed groups a batch."""
    from scalerl_jax.data.curriculum import PromptStream
    from scalerl_jax.pipeline.loop import Pipeline
    from scalerl_jax.pipeline.schedule import StalenessLedger
    from scalerl_jax.pipeline.transport import InProcess

    self.ration.mixed = mixed
    pipeline = Pipeline(
      task=self.task,
      stream=PromptStream(self.task.train, seed=0),
      sampler=self.sampler,
      learner=self.learner,
      transport=InProcess(self.shardings),
      ledger=StalenessLedger(GROUPS, max_staleness, STEPS * GROUPS),
      schedule="wall",
      chunks_per_step=1,
    )
    moments: list[np.ndarray] = []

    def look(event: Any) -> None:
      del event
      sampler = pipeline.sampler_watch
      moments.append(
        np.array(
          [
            time.perf_counter(),
            pipeline.learner_watch.busy_seconds,
            sampler.busy_seconds,
            pipeline.weights_watch.busy_seconds,
            sampler.seconds["chunk"],
            sampler.pieces["chunk"],
          ]
        )
      )

    pipeline.run(look, pauses_at=lambda step: False)
    passed = moments[-3] - moments[WARM - 1]
    step, training, generation, publish = passed[:4] / (len(moments) - 2 - WARM)
    return {
      "step": step,
      "training": training,
      "generation": generation,
      "publish": publish,
      "chunk": passed[4] / passed[5],
    }


def _medians(runs: list[dict[str, float]]) -> dict[str, float]:
  return {name: float(np.median([r[name] for r in runs])) for name in runs[0]}


def mixed_groups(sides: Sides) -> dict[str, int]:
  """How many groups of a batch must be mixed for each split of the work."""
  few, many = 2, GROUPS - 2
  sides.run(few, 0)  # what compiles outside of sampler and learner
  # The quicker of two runs each: what else runs only ever slows one down.
  with one_core():
    low, high = (
      min((sides.run(n, 0) for _ in range(2)), key=lambda run: run["step"])
      for n in (few, many)
    )
  slope = (high["training"] - low["training"]) / (many - few)
  generation = (low["generation"] + high["generation"]) / 2
  return {
    name: int(
      np.clip(
        round(few + (ratio * generation - low["training"]) / slope), 1, GROUPS
      )
    )
    for name, ratio in SPLITS.items()
  }


def overlap(tell: Any) -> None:
  """Steps of both schedules for each split, one line a split.

  Args:
    tell: prints a line of figures.
  """
  sides = Sides()
  for split, mixed in mixed_groups(sides).items():
    runs: dict[str, list[dict[str, float]]] = {}
    for _ in range(REPEATS):
      with one_core():
        runs.setdefault("alone", []).append(sides.run(mixed, 0))
      runs.setdefault("both cores", []).append(sides.run(mixed, 0))
      runs.setdefault("beside", []).append(sides.run(mixed, 2))
    alone, beside = _medians(runs["alone"]), _medians(runs["beside"])
    both = _medians(runs["both cores"])
    larger = max(alone["training"], alone["generation"])
    tell(
      "overlap",
      split=split,
      mixed_groups=mixed,
      generation_seconds=alone["generation"],
      training_seconds=alone["training"],
      synchronous_step=alone["step"],
      asynchronous_step=beside["step"],
      asynchronous_over_larger_half=beside["step"] / larger,
      asynchronous_over_synchronous=beside["step"] / alone["step"],
      asynchronous_over_synchronous_on_both_cores=beside["step"] / both["step"],
      asynchronous_over_larger_half_beside_each_other=beside["step"]
      / max(beside["training"], beside["generation"]),
      generation_seconds_on_both_cores=both["generation"],
      training_seconds_on_both_cores=both["training"],
      synchronous_step_on_both_cores=both["step"],
      sampler_waits=1 - beside["generation"] / beside["step"],
      learner_waits=1 - beside["training"] / beside["step"],
      publish_over_chunk=beside["publish"] / beside["chunk"],
    )
