"""Speed of each side and of their overlap: `python -m benchmarks.bench`.

One JSON line a figure, with the machine's measured matmul peak beside it.
Sampling and learning run in a process of their own, pinned to one core and
single-threaded, at the quickstart's 0.10 M shape; the rest uses two cores.
A rate is that of the fastest repeat, as the peak is (what else runs on the
host only ever slows one down); the median and the slowest stand beside it.
Run it on a quiet machine: a timing made beside another job is worthless.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from scalerl_jax.run.host import prepare_cpu, visible_cores

REPEATS = 15  # odd: the median is one of them


def run_alone(name: str, cores: list[int]) -> None:
  """Runs one measurement in a fresh process pinned to `cores`."""
  command = [sys.executable, "-m", "benchmarks.bench", name]
  environment = os.environ | {
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"
    f" --xla_force_host_platform_device_count={len(cores)}"
  }

  def pin() -> None:
    os.sched_setaffinity(0, cores)

  subprocess.run(command, env=environment, check=True, preexec_fn=pin)


def tell(name: str, **values: float | int | str) -> None:
  """Prints one figure as a JSON line."""
  rounded = {
    key: float(f"{value:.5g}") if isinstance(value, float) else value
    for key, value in values.items()
  }
  print(json.dumps({"benchmark": name, **rounded}), flush=True)


def median(values: list[float]) -> float:
  """The middle value."""
  return sorted(values)[len(values) // 2]


def matmul_peak() -> float:
  """float32 FLOP/s of a 1024³ product in this process."""
  import jax
  import jax.numpy as jnp

  square = jnp.ones((1024, 1024))
  product = jax.jit(lambda a: a @ a)
  product(square).block_until_ready()
  seconds = []
  for _ in range(REPEATS):
    start = time.perf_counter()
    product(square).block_until_ready()
    seconds.append(time.perf_counter() - start)
  return 2 * 1024**3 / min(seconds)


def make_policy():
  """The quickstart's policy with random weights, on one device."""
  from flax import nnx

  from scalerl_jax.config import Config
  from scalerl_jax.models.policy import Policy
  from scalerl_jax.models.sharding import make_mesh

  config, mesh = Config(), make_mesh()
  policy = Policy(config.model, vocab_size=70, rngs=nnx.Rngs(0), mesh=mesh)
  return config, mesh, *nnx.split(policy)


def sampling() -> None:
  """512 slots, completions of at most 15 tokens, groups of 16, prefill in."""
  import numpy as np

  from scalerl_jax.run.accounting import generation_flops
  from scalerl_jax.sampling.sampler import Group, Sampler

  config, mesh, graph, params = make_policy()
  # Most completions here are 15 tokens long: one drawn by the prefill and a
  # chunk of 14. (The quickstart's end after 8, and chunks of 4 suit them.)
  settings = dataclasses.replace(config.sampler, slots=512, chunk=14)
  sampler = Sampler(
    graph, params, settings, group_size=16, eos_ids=(2,), seed=0, mesh=mesh
  )
  rng = np.random.default_rng(0)
  prompts = rng.integers(4, 70, (256, settings.max_prompt_tokens))
  groups = [Group(i, i, 0, p.astype(np.int32)) for i, p in enumerate(prompts)]
  sampler.compile(params)  # every size of a read, or a repeat compiles one
  sampler.generate(params, 0, groups)
  rates, flops = [], []
  peaks = [matmul_peak()]
  for repeat in range(REPEATS):
    again = [dataclasses.replace(g, first_sample=16 * repeat) for g in groups]
    start = time.process_time()
    rollouts = sampler.generate(params, 0, again)
    seconds = time.process_time() - start
    tokens = int(sum(r.length.sum() for r in rollouts))
    done = generation_flops(
      config.model,
      vocab_size=70,
      prompts=len(groups),
      prompt_tokens=settings.max_prompt_tokens,
      completions=16 * len(groups),
      completion_tokens=tokens,
      context=settings.max_prompt_tokens + settings.max_completion_tokens,
    )
    rates.append(tokens / seconds)
    flops.append(done / seconds)
    peaks.append(matmul_peak())
  tell(
    "sampling",
    tokens_per_cpu_second=max(rates),
    median=median(rates),
    slowest=min(rates),
    share_of_matmul_peak=max(flops) / max(peaks),
    matmul_peak_flops=max(peaks),
  )


def learning() -> None:
  """A step of 512 full rows of 29 tokens, all kept, micro-batches of 64.

  Then with the prompts of groups of 16, 14 tokens, computed once; a row counts
  as 29 tokens all the same.
  """
  for name, share in (("learning", False), ("learning_shared_prompts", True)):
    learn(name, share)


def learn(name: str, share: bool) -> None:
  """One of the two.

  Args:
    name: of the figure.
    share: whether prompts are computed once for their group.
  """
  import numpy as np

  from scalerl_jax.learning.learner import Learner
  from scalerl_jax.learning.optimizer import make_optimizer
  from scalerl_jax.learning.train_step import TrainSettings
  from scalerl_jax.run.accounting import learning_flops
  from scalerl_jax.types import Batch

  config, mesh, graph, params = make_policy()
  learner = Learner(
    params,
    TrainSettings(
      policy=graph,
      optimizer=make_optimizer(config.optimizer),
      loss=config.loss,
      warp=(),
      group_size=16,
      micro_batch=config.batch.micro_batch,
      max_completion_tokens=config.sampler.max_completion_tokens,
      share_prompts=share,
    ),
    mesh,
  )
  rows, width = 512, 29
  rng = np.random.default_rng(0)
  mask = np.tile(np.arange(width) >= 14, (rows, 1))
  correct = (np.arange(rows) % 2).astype(np.int32)
  batch = Batch(
    tokens=rng.integers(4, 70, (rows, width)).astype(np.int32),
    segment_ids=np.ones((rows, width), np.int32),
    mask=mask,
    behavior_logps=np.where(mask, -4.2, 0.0).astype(np.float32),
    correct=correct,
    rewards=np.where(correct, 1.0, -1.0).astype(np.float32),
    prompt_length=np.full(rows, 14, np.int32),
  )
  learner.start(batch)
  did = learner.collect()
  rates = []
  peaks = [matmul_peak()]
  for _ in range(REPEATS):
    start = time.process_time()
    learner.start(batch)
    learner.collect()
    rates.append(rows * width / (time.process_time() - start))
    peaks.append(matmul_peak())
  flops = learning_flops(
    config.model,
    vocab_size=70,
    tokens=did["computed_tokens"],
    keys=did["computed_keys"],
    logits=did["computed_logits"],
  )
  tell(
    name,
    tokens_per_cpu_second=max(rates),
    median=median(rates),
    slowest=min(rates),
    share_of_matmul_peak=max(rates) * flops / (rows * width) / max(peaks),
    matmul_peak_flops=max(peaks),
  )


def memory() -> None:
  """Peak memory of a train step of 0.135 B parameters."""
  from benchmarks import memory as compiled

  compiled.memory(tell)


def memory_growth() -> None:
  """Bytes a token and a column, at several sizes."""
  from benchmarks import memory as compiled

  compiled.memory_growth(tell)


def quickstart() -> None:
  """The recipe's step time over the larger of generation and training time.

  All three from the same run of the quickstart's recipe under the wall
  schedule, after its first steps.
  """
  from experiments import quickstart as recipe
  from scalerl_jax.config import override
  from scalerl_jax.run.metrics import read_metrics
  from scalerl_jax.run.train import Run

  config = override(
    recipe.get_config(),
    {
      "run.steps": 60,
      "evaluation.every": 60,
      "checkpoint.every": 60,
      "pipeline.schedule": "wall",
    },
  )
  with tempfile.TemporaryDirectory() as folder:
    Run(config, pathlib.Path(folder) / "run").train()
    lines = read_metrics(pathlib.Path(folder) / "run")[10:]
  step = sum(line["time/step_seconds"] for line in lines)
  busy = {
    side: sum(
      line["time/step_seconds"] * (1 - line[f"time/{side}_idle_share"])
      for line in lines
    )
    for side in ("sampler", "learner")
  }
  tell(
    "quickstart",
    step_over_larger_side=step / max(busy.values()),
    step_over_sum_of_sides=step / sum(busy.values()),
    step_seconds=step / len(lines),
    generation_seconds=busy["sampler"] / len(lines),
    training_seconds=busy["learner"] / len(lines),
    matmul_peak_flops=matmul_peak(),
  )


def overlap() -> None:
  """Asynchronous against synchronous at equal and at unequal halves."""
  from benchmarks import overlap as both

  both.overlap(tell)


def main() -> None:
  """All figures, each in its own process."""
  cores = list(range(visible_cores()))
  run_alone("sampling", cores[:1])
  run_alone("learning", cores[:1])
  run_alone("quickstart", cores[:2])
  run_alone("overlap", cores[:2])
  run_alone("memory", cores[:1])
  run_alone("memory_growth", cores[:1])


if __name__ == "__main__":
  if len(sys.argv) > 1:
    prepare_cpu()  # what `run_alone` has said wins
    {
      "sampling": sampling,
      "learning": learning,
      "quickstart": quickstart,
      "overlap": overlap,
      "memory": memory,
      "memory_growth": memory_growth,
    }[sys.argv[1]]()
  else:
    main()
