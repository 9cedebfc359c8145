"""Speed of each side and of their overlap: `python -m benchmarks.bench`.

One JSON line a figure, with the machine's measured matmul peak beside it.
Sampling and learning run in a process of their own, pinned to one core and
single-threaded, at the quickstart's 0.10 M shape; the rest uses two cores.
A rate is that of the fastest repeat, as the peak is (what else runs on the
host only ever slows one down); the median and the slowest stand beside it.
Run it on a quiet machine: a timing made beside another job is worthless.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from scalerl_jax.run.host import visible_cores

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
  """A step of 512 full rows of 29 tokens, all kept, micro-batches of 64."""
  import numpy as np

  from scalerl_jax.learning.learner import Learner
  from scalerl_jax.learning.optimizer import make_optimizer
  from scalerl_jax.learning.train_step import TrainSettings
  from scalerl_jax.run.accounting import training_flops
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
  )
  learner.start(batch)
  learner.collect()
  rates = []
  peaks = [matmul_peak()]
  for _ in range(REPEATS):
    start = time.process_time()
    learner.start(batch)
    learner.collect()
    rates.append(rows * width / (time.process_time() - start))
    peaks.append(matmul_peak())
  flops = training_flops(
    config.model, vocab_size=70, rows=rows, row_tokens=width
  )
  tell(
    "learning",
    tokens_per_cpu_second=max(rates),
    median=median(rates),
    slowest=min(rates),
    share_of_matmul_peak=max(rates) * flops / (rows * width) / max(peaks),
    matmul_peak_flops=max(peaks),
  )


def zero_policy(model, vocab_size: int):
  """A policy of zeros: nothing random to compile."""
  import jax.numpy as jnp

  from scalerl_jax.models.plan import parameter_plan
  from scalerl_jax.models.policy import Policy

  plan = parameter_plan(model, vocab_size)
  values = {name: jnp.zeros(part.shape) for name, part in plan.items()}
  return Policy(model, vocab_size=vocab_size, values=values)


def step_bytes(model, *, vocab_size: int, rows: int, width: int, chunk: int):
  """(bytes of state and batch, of temporaries) of a compiled train step.

  What the compiler says; nothing is run.
  """
  import functools

  import jax
  import jax.numpy as jnp
  from flax import nnx

  from scalerl_jax.config import LossConfig, OptimizerConfig
  from scalerl_jax.learning.optimizer import make_optimizer
  from scalerl_jax.learning.train_step import (
    LearnerState,
    TrainSettings,
    train_step,
  )
  from scalerl_jax.types import Batch

  optimizer = make_optimizer(OptimizerConfig())
  graph, params = nnx.split(zero_policy(model, vocab_size))
  params = jax.eval_shape(lambda params: params, params)
  state = LearnerState(
    params=params,
    optimizer=jax.eval_shape(optimizer.init, params),
    step=jax.ShapeDtypeStruct((), jnp.int32),
  )
  row, place = (rows,), (rows, width)
  batch = Batch(
    tokens=jax.ShapeDtypeStruct(place, jnp.int32),
    segment_ids=jax.ShapeDtypeStruct(place, jnp.int32),
    mask=jax.ShapeDtypeStruct(place, bool),
    behavior_logps=jax.ShapeDtypeStruct(place, jnp.float32),
    correct=jax.ShapeDtypeStruct(row, jnp.int32),
    rewards=jax.ShapeDtypeStruct(row, jnp.float32),
  )
  settings = TrainSettings(
    policy=graph,
    optimizer=optimizer,
    loss=LossConfig(logprob_chunk=chunk),
    warp=(),
    group_size=rows,
    micro_batch=rows,
    max_completion_tokens=width,
  )
  step = functools.partial(train_step, settings=settings)
  found = (
    jax.jit(step, donate_argnums=0)
    .lower(state, batch)
    .compile()
    .memory_analysis()
  )
  assert found is not None, "the backend tells no memory"
  return found.argument_size_in_bytes, found.temp_size_in_bytes


def memory() -> None:
  """Peak memory of a train step of 16 x 512 tokens, 0.135 B parameters.

  What the compiler says of the compiled program; nothing is run.
  """
  from scalerl_jax.config import ModelConfig
  from scalerl_jax.run.memory import parameter_count

  model = ModelConfig(
    width=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_width=64,
    mlp_width=1536,
  )
  peaks = {}
  for remat, chunk in itertools.product(("none", "block"), (0, 512)):
    peaks[remat, chunk] = sum(
      step_bytes(
        dataclasses.replace(model, remat=remat),
        vocab_size=49152,
        rows=16,
        width=512,
        chunk=chunk,
      )
    )
  tell(
    "memory",
    parameters=parameter_count(model, 49152),
    step_bytes=peaks["none", 0],
    step_bytes_chunks_of_512_tokens=peaks["none", 512],
    step_bytes_remat=peaks["block", 0],
    step_bytes_remat_chunks=peaks["block", 512],
    saved_share_of_remat=1 - peaks["block", 512] / peaks["block", 0],
  )


def memory_growth() -> None:
  """Bytes a token of a micro-batch and a column of a slot, at three sizes.

  Equal figures are linear growth. The learner's are temporaries of the train
  step: with more rows of one width they grow as the tokens do; with wider rows
  of as many tokens by the attention's weights, H·T a layer and token. The
  sampler's are its state and a chunk's temporaries.
  """
  import functools

  import jax
  import numpy as np
  from flax import nnx

  from scalerl_jax.config import ModelConfig, SamplerConfig
  from scalerl_jax.models.sharding import make_mesh
  from scalerl_jax.sampling.decode import DecodeSettings, decode_chunk
  from scalerl_jax.sampling.sampler import Sampler

  model = ModelConfig(
    width=256,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_width=64,
    mlp_width=768,
    qk_norm="scaled",
  )

  def learner(rows: int, width: int) -> float:
    _, held = step_bytes(
      model, vocab_size=1024, rows=rows, width=width, chunk=0
    )
    return held / (rows * width)

  mesh = make_mesh()
  graph, params = nnx.split(zero_policy(model, 1024))

  def sampler(slots: int, columns: int) -> float:
    config = SamplerConfig(
      slots=slots,
      max_prompt_tokens=columns // 4,
      max_completion_tokens=columns - columns // 4,
    )
    made = Sampler(
      graph, params, config, group_size=8, eos_ids=(2,), seed=0, mesh=mesh
    )
    settings = DecodeSettings(
      policy=graph, warp=(), eos_ids=(2,), group_size=8, chunk=config.chunk
    )
    step = functools.partial(decode_chunk, settings=settings)
    state = made.state_dict()["slots"]  # as wide as it can become
    found = (
      jax.jit(step, donate_argnums=2)
      .lower(params, np.int32(0), state)
      .compile()
      .memory_analysis()
    )
    assert found is not None, "the backend tells no memory"
    held = sum(x.nbytes for x in jax.tree.leaves(state))
    return (held + found.temp_size_in_bytes) / (slots * columns)

  tell(
    "memory_growth",
    **{
      f"learner_bytes_a_token_{rows}x{width}": learner(rows, width)
      for rows, width in ((16, 160), (32, 160), (64, 160), (32, 320), (16, 640))
    },
    **{
      f"sampler_bytes_a_column_{slots}x{columns}": sampler(slots, columns)
      for slots, columns in (
        *((64, 160), (128, 160), (256, 160)),
        *((64, 320), (64, 640)),
      )
    },
  )


def quickstart() -> None:
  """The recipe's step time over the larger of generation and training time.

  All three from the same run of the quickstart's recipe under the wall
  schedule, after its first steps.
  """
  from scalerl_jax.config import Config, override
  from scalerl_jax.run.metrics import read_metrics
  from scalerl_jax.run.train import Run

  config = override(
    Config(),
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
