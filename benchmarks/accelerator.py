"""What an accelerator is used to: `python -m benchmarks.accelerator`.

Decoding as a share of the memory bandwidth, learning as a share of the matmul
rate, both measured on the same device a moment before, and the forms of
attention against each other. Random policies of published sizes with a body in
bfloat16. One JSON line a figure; one device, nothing else running.

A form of attention that the device does not have is said and left out.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from absl import app, flags

from scalerl_jax.run.host import prepare_cpu

prepare_cpu()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402

from benchmarks.bench import median, tell  # noqa: E402
from scalerl_jax.config import (  # noqa: E402
  ATTENTIONS,
  LossConfig,
  ModelConfig,
  OptimizerConfig,
  SamplerConfig,
)
from scalerl_jax.learning.learner import Learner  # noqa: E402
from scalerl_jax.learning.optimizer import make_optimizer  # noqa: E402
from scalerl_jax.learning.train_step import TrainSettings  # noqa: E402
from scalerl_jax.models import attention  # noqa: E402
from scalerl_jax.models.generator import (  # noqa: E402
  cast,
  generator_graph,
  weight_dtypes,
  with_head_dtype,
)
from scalerl_jax.models.policy import Policy  # noqa: E402
from scalerl_jax.models.sharding import make_mesh  # noqa: E402
from scalerl_jax.run.accounting import (  # noqa: E402
  decode_bytes,
  learning_flops,
)
from scalerl_jax.run.memory import parameter_count  # noqa: E402
from scalerl_jax.run.peaks import copy_rate, matmul_rate  # noqa: E402
from scalerl_jax.sampling.sampler import Group, Sampler  # noqa: E402
from scalerl_jax.types import Batch  # noqa: E402

REPEATS = 5
GROUP = 8
HEADS = ("float32", "bfloat16")  # the recipe's, and what it costs


class Size(NamedTuple):
  """A policy and the work that is measured with it."""

  model: ModelConfig
  vocab_size: int
  slots: int = 256
  context: int = 1024  # tokens of a sequence, half of them its prompt
  rows: int = 64  # of an update
  micro_batch: int = 8
  chunk: int = 32


BODY = ModelConfig(dtype="bfloat16", rope_theta=5e5, norm_epsilon=1e-5)
SIZES = {
  # That of SmolLM2-135M.
  "135m": Size(
    dataclasses.replace(
      BODY,
      width=576,
      num_layers=30,
      num_heads=9,
      num_kv_heads=3,
      head_width=64,
      mlp_width=1536,
    ),
    49_152,
  ),
  # That of Llama 3.2 1B.
  "1b": Size(
    dataclasses.replace(
      BODY,
      width=2048,
      num_layers=16,
      num_heads=32,
      num_kv_heads=8,
      head_width=64,
      mlp_width=8192,
    ),
    128_256,
  ),
  # So that all of this can be tried on a CPU.
  "tiny": Size(BODY, 97, slots=8, context=32, rows=16, micro_batch=8, chunk=4),
}


def make_policy(size: Size):
  """Random float32 parameters, on one device."""
  mesh = make_mesh(jax.local_devices()[:1])
  policy = Policy(
    size.model, vocab_size=size.vocab_size, rngs=nnx.Rngs(0), mesh=mesh
  )
  return mesh, *nnx.split(policy)


def decoding(name: str, size: Size) -> None:
  """Every slot with a prompt of its own, until its budget is used up.

  Tells the whole and its last chunk, when the context is full, as shares of
  the bandwidth: least bytes that must move over the time.
  """
  mesh, graph, params = make_policy(size)
  half = size.context // 2
  config = SamplerConfig(
    slots=size.slots,
    chunk=size.chunk,
    max_prompt_tokens=half,
    max_completion_tokens=half,
  )
  dtypes = weight_dtypes(params, size.model, config)
  held = cast(params, dtypes)
  sampler = Sampler(
    generator_graph(graph, params, config),
    held,
    config,
    group_size=1,
    eos_ids=(size.vocab_size,),
    seed=0,
    mesh=mesh,
  )
  rng = np.random.default_rng(0)
  prompts = rng.integers(0, size.vocab_size, (size.slots, half))
  groups = [
    Group(i, i, 0, row.astype(np.int32)) for i, row in enumerate(prompts)
  ]
  sampler.generate(held, 0, groups)  # compiles every width of the rings
  device = mesh.devices.flat[0]
  per_slot = functools.partial(
    decode_bytes, size.model, vocab_size=size.vocab_size, slots=size.slots
  )
  whole = per_slot(steps=1, columns=size.context)
  rate = copy_rate(device, int(whole))
  sampler.insert(held, 0, groups)
  jax.block_until_ready(sampler.state)
  sampler.take_work()
  seconds, moved, steps = [], [], 0
  while sampler.busy:
    start = time.perf_counter()
    sampler.start_chunk(held, 0)
    jax.block_until_ready(sampler.state)
    seconds.append(time.perf_counter() - start)
    ran, _ = sampler.chunk_stats()
    columns = sampler.take_work().decoded_columns / max(ran * size.slots, 1)
    moved.append(per_slot(steps=ran, columns=columns))
    steps += ran
    sampler.finished()
  tell(
    f"decoding_{name}",
    parameters=parameter_count(size.model, size.vocab_size),
    tokens_per_second=steps * size.slots / sum(seconds),
    share_of_bandwidth=sum(moved) / sum(seconds) / rate,
    share_of_bandwidth_full=moved[-1] / seconds[-1] / rate,
    bandwidth_bytes=rate,
    device=device.device_kind,
  )


def make_batch(size: Size) -> Batch:
  """Full rows of random tokens, half of each its prompt, no group constant."""
  rng = np.random.default_rng(0)
  shape = (size.rows, size.context)
  mask = np.tile(np.arange(size.context) >= size.context // 2, (size.rows, 1))
  correct = (np.arange(size.rows) % 2).astype(np.int32)
  return Batch(
    tokens=rng.integers(0, size.vocab_size, shape).astype(np.int32),
    segment_ids=np.ones(shape, np.int32),
    mask=mask,
    behavior_logps=np.where(mask, -np.log(size.vocab_size), 0).astype(
      np.float32
    ),
    correct=correct,
    rewards=np.where(correct, 1.0, -1.0).astype(np.float32),
    prompt_length=np.full(size.rows, size.context // 2, np.int32),
  )


def learning(name: str, size: Size, kernel: str, head: str) -> None:
  """An update, as a share of what a square product reaches.

  Args:
    name: of the size.
    size: the policy and its batch.
    kernel: `model.attention`.
    head: dtype of the head, `loss.head_dtype`.
  """
  model = dataclasses.replace(size.model, attention=kernel)
  mesh, graph, params = make_policy(size._replace(model=model))
  device = mesh.devices.flat[0]
  learner = Learner(
    params,
    TrainSettings(
      policy=with_head_dtype(graph, params, head),
      optimizer=make_optimizer(OptimizerConfig()),
      # A piece of the logits at a time: all of them are many times the rest.
      loss=LossConfig(logprob_chunk=2 * size.context, head_dtype=head),
      warp=(),
      group_size=GROUP,
      micro_batch=size.micro_batch,
      max_completion_tokens=size.context // 2,
    ),
    mesh,
  )
  batch, seconds = make_batch(size), []
  did: dict[str, float] = {}
  for _ in range(1 + REPEATS):
    start = time.perf_counter()
    learner.start(batch)
    did = learner.collect()
    seconds.append(time.perf_counter() - start)
  flops = learning_flops(
    model,
    vocab_size=size.vocab_size,
    tokens=did["computed_tokens"],
    keys=did["computed_keys"],
    logits=did["computed_logits"],
  )
  rate = matmul_rate(device, "bfloat16")
  middle = median(seconds[1:])
  tell(
    f"learning_{name}",
    attention=kernel,
    head=head,
    tokens_per_second=did["computed_tokens"] / middle,
    mfu=flops / middle / rate,
    matmul_flops=rate,
    device=device.device_kind,
  )


def attending(name: str, size: Size, kernels: list[str]) -> None:
  """Forward and backward of one layer's attention, of a micro-batch."""
  model = size.model
  rng = np.random.default_rng(0)

  def numbers(heads: int) -> jax.Array:
    shape = (size.micro_batch, size.context, heads, model.head_width)
    return jnp.asarray(rng.standard_normal(shape), model.dtype)

  arrays = numbers(model.num_heads), *map(numbers, [model.num_kv_heads] * 2)
  causal = jnp.tril(jnp.ones((1, size.context, size.context), bool))
  mask = jnp.broadcast_to(causal, (size.micro_batch, *causal.shape[1:]))

  def run(kernel: str) -> Callable[[], Any]:
    def mixed(
      query: jax.Array, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
      out = attention.attend(query, key, value, mask, kernel=kernel)
      return jnp.sum(out.astype(jnp.float32) ** 2), out

    step = jax.jit(jax.value_and_grad(mixed, argnums=(0, 1, 2), has_aux=True))
    return functools.partial(step, *arrays)

  times, outs = {}, {}
  for kernel in kernels:
    once = run(kernel)
    (_, out), _ = jax.block_until_ready(once())
    outs[kernel] = np.asarray(out, np.float32)
    seconds = []
    for _ in range(REPEATS):
      start = time.perf_counter()
      jax.block_until_ready(once())
      seconds.append(time.perf_counter() - start)
    times[kernel] = median(seconds)
  for kernel in kernels[1:]:
    tell(
      f"attention_{name}",
      kernel=kernel,
      seconds_over_einsum=times[kernel] / times["einsum"],
      largest_difference=float(np.abs(outs[kernel] - outs["einsum"]).max()),
    )


def kernels_here(model: ModelConfig) -> list[str]:
  """Forms of attention that this device has, `einsum` first."""
  platform, found = jax.local_devices()[0].platform, []
  for kernel in ATTENTIONS:
    asked = dataclasses.replace(model, attention=kernel)
    try:
      attention.check_kernel(asked, platform)
    except ValueError as error:
      print(f"left out: {error}", flush=True)
    else:
      found.append(kernel)
  return found


def measure(name: str, size: Size) -> None:
  """All figures of one size."""
  kernels = kernels_here(size.model)
  decoding(name, size)
  attending(name, size, kernels)
  for kernel in kernels:
    learning(name, size, kernel, HEADS[0])
  learning(name, size, kernels[-1], HEADS[1])


def main(_) -> None:
  """Every size that is asked for."""
  for name in flags.FLAGS.sizes:
    measure(name, SIZES[name])


if __name__ == "__main__":
  flags.DEFINE_list("sizes", "135m,1b", f"Of {', '.join(SIZES)}.")
  flags.register_validator(
    "sizes",
    lambda names: set(names) <= set(SIZES),
    f"--sizes must be of {', '.join(SIZES)}, with commas between.",
  )
  app.run(main)
