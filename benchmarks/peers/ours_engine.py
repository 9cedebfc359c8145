"""This project: its sampler, and a step of sampler and learner.

    python -m benchmarks.peers.ours_engine --checkpoint=DIR --dtype=float32

Both devices of the CPU share the slots of the sampler and the rows of the
learner, a thread each. `bfloat16_dots`: operands of the body's products are
in bfloat16; sums, activations, KV cache and the head stay in float32.
"""

import argparse
import dataclasses
import importlib.metadata
import pathlib
import sys
import time

# A device for each core before JAX starts.
from scalerl_jax.run.host import prepare_cpu

prepare_cpu()

# The protocol's two files are imported from their folder, as peers do.
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import engine  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import workloads  # noqa: E402
from flax import nnx  # noqa: E402

from scalerl_jax.config import (  # noqa: E402
  LossConfig,
  OptimizerConfig,
  SamplerConfig,
)
from scalerl_jax.learning.batching import collate  # noqa: E402
from scalerl_jax.learning.learner import Learner  # noqa: E402
from scalerl_jax.learning.optimizer import make_optimizer  # noqa: E402
from scalerl_jax.learning.train_step import TrainSettings  # noqa: E402
from scalerl_jax.models import pretrained  # noqa: E402
from scalerl_jax.models.sharding import make_mesh  # noqa: E402
from scalerl_jax.run.train import enable_compilation_cache  # noqa: E402
from scalerl_jax.sampling.sampler import Group, Sampler  # noqa: E402

# Found by trying 8, 16, 32 and 64 (long tail: 4, 8, 16, 32).
CHUNK = 32
LONG_TAIL_CHUNK = 8
MICRO_BATCH = 32  # rows; of 16, 32, 64 and 128


def load(checkpoint: str, dtype: str, mesh):
  """The checkpoint as a policy, in two parts."""
  policy = pretrained.load(checkpoint, dtype="float32", mesh=mesh)
  if dtype == "bfloat16_dots":
    policy.config = dataclasses.replace(policy.config, dot_dtype="bfloat16")
  return nnx.split(policy)


def groups_of(requests: workloads.Requests, repeat: int) -> list[Group]:
  """The requests as the sampler takes them."""
  return [
    Group(i, i, 1000 * repeat, prompt, budget=int(length))
    for i, (prompt, length) in enumerate(
      zip(requests.prompts, requests.lengths, strict=True)
    )
  ]


def make_sampler(
  graph,
  params,
  requests: workloads.Requests,
  mesh,
  *,
  chunk: int,
  group_size: int = 1,
) -> Sampler:
  """256 slots for these requests; nothing ends one before its budget."""
  config = SamplerConfig(
    slots=workloads.SEQUENCES,
    chunk=chunk,
    max_prompt_tokens=max(map(len, requests.prompts)),
    max_completion_tokens=int(requests.lengths.max()),
  )
  sampler = Sampler(
    graph,
    params,
    config,
    group_size=group_size,
    eos_ids=(workloads.END,),
    seed=0,
    mesh=mesh,
  )
  sampler.compile(params)
  return sampler


def sampling(graph, params, mesh):
  """All sequences at once."""
  requests = workloads.sampling()
  sampler = make_sampler(graph, params, requests, mesh, chunk=CHUNK)

  def run(repeat: int) -> engine.Answer:
    groups = groups_of(requests, repeat)
    start = time.perf_counter()
    rollouts = sampler.generate(params, 0, groups)
    seconds = time.perf_counter() - start
    tokens = sum(int(rollout.length.sum()) for rollout in rollouts)
    assert tokens == requests.tokens
    return {"seconds": seconds, "tokens": tokens, "extra": {}}

  return run


def long_tail(graph, params, mesh):
  """First come first served: a slot that is free takes the next request."""
  requests = workloads.long_tail()
  sampler = make_sampler(graph, params, requests, mesh, chunk=LONG_TAIL_CHUNK)

  def run(repeat: int) -> engine.Answer:
    waiting, tokens = groups_of(requests, repeat), 0
    steps = drawn = 0  # while requests wait
    start = time.perf_counter()
    while waiting or sampler.busy:
      entering, waiting = waiting[: sampler.room], waiting[sampler.room :]
      if entering:
        sampler.insert(params, 0, entering)
      sampler.start_chunk(params, 0)
      ended = sampler.finished()
      if ended is not None:
        tokens += int(ended.length.sum())
      more_steps, more_drawn = sampler.chunk_stats()
      if waiting:
        steps, drawn = steps + more_steps, drawn + more_drawn
    seconds = time.perf_counter() - start
    assert tokens == requests.tokens
    occupancy = drawn / (steps * workloads.SEQUENCES)
    return {
      "seconds": seconds,
      "tokens": tokens,
      "extra": {"occupancy_while_waiting": occupancy},
    }

  return run


def step(graph, params, mesh):
  """Rollouts of groups, their rewards, and one update."""
  requests = workloads.step()
  sampler = make_sampler(
    graph, params, requests, mesh, chunk=CHUNK, group_size=workloads.GROUP
  )
  learner = Learner(
    params,
    TrainSettings(
      policy=graph,
      optimizer=make_optimizer(
        OptimizerConfig(learning_rate=workloads.LEARNING_RATE)
      ),
      loss=LossConfig(),
      warp=(("temperature", 1.0),),
      group_size=workloads.GROUP,
      micro_batch=MICRO_BATCH,
      max_completion_tokens=workloads.COMPLETION,
      share_prompts=True,
    ),
    mesh,
  )

  def run(repeat: int) -> engine.Answer:
    groups = groups_of(requests, repeat)
    start = time.perf_counter()
    rollouts = sampler.generate(learner.state.params, 0, groups)
    sampled = time.perf_counter()
    rewards = np.array(
      [[workloads.reward(row) for row in r.tokens] for r in rollouts]
    )
    # 0/1 correctness does not exist here; the filter sees mixed groups.
    mixed = np.tile(np.arange(workloads.GROUP) % 2, (len(rollouts), 1))
    learner.start(collate(rollouts, mixed, rewards))
    metrics = learner.collect()
    end = time.perf_counter()
    assert np.isfinite(metrics["loss"])
    assert metrics["effective_batch"] == workloads.SEQUENCES
    return {
      "seconds": end - start,
      "tokens": workloads.SEQUENCES * workloads.COMPLETION,
      "extra": {"rollout": sampled - start, "update": end - sampled},
    }

  return run


def main() -> None:
  """Answers the runner."""
  parser = argparse.ArgumentParser()
  parser.add_argument("--checkpoint", required=True)
  parser.add_argument("--dtype", choices=("float32", "bfloat16_dots"))
  parser.add_argument("--workloads", required=True)
  options = parser.parse_args()
  enable_compilation_cache()
  mesh = make_mesh(jax.devices())
  graph, params = load(options.checkpoint, options.dtype, mesh)
  known = {"sampling": sampling, "long_tail": long_tail, "step": step}
  engine.serve(
    {
      name: known[name](graph, params, mesh)
      for name in options.workloads.split(",")
    },
    {name: importlib.metadata.version(name) for name in ("jax", "scalerl-jax")},
  )


if __name__ == "__main__":
  main()
