"""Memory of compiled programs: what the compiler says; nothing is run."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.shapes import PEERS
from scalerl_jax.config import (
  LossConfig,
  ModelConfig,
  OptimizerConfig,
  SamplerConfig,
)
from scalerl_jax.learning.optimizer import make_optimizer
from scalerl_jax.learning.train_step import (
  LearnerState,
  TrainSettings,
  train_step,
)
from scalerl_jax.models.plan import parameter_plan
from scalerl_jax.models.policy import Policy
from scalerl_jax.models.sharding import make_mesh
from scalerl_jax.run.memory import parameter_count
from scalerl_jax.sampling.decode import DecodeSettings, decode_chunk
from scalerl_jax.sampling.sampler import Sampler
from scalerl_jax.types import Batch

Tell = Callable[..., Any]  # prints a line of figures


def zero_policy(model, vocab_size: int):
  """A policy of zeros: nothing random to compile."""

  plan = parameter_plan(model, vocab_size)
  values = {name: jnp.zeros(part.shape) for name, part in plan.items()}
  return Policy(model, vocab_size=vocab_size, values=values)


def step_bytes(model, *, vocab_size: int, rows: int, width: int, chunk: int):
  """(bytes of state and batch, of temporaries) of a compiled train step.

  What the compiler says; nothing is run.
  """

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


def memory(tell: Tell) -> None:
  """Peak memory of a train step of 16 x 512 tokens, 0.135 B parameters.

  What the compiler says of the compiled program; nothing is run.
  """

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


def memory_growth(tell: Tell) -> None:
  """Bytes a token of a micro-batch and a column of a slot, at three sizes.

  Equal figures are linear growth. The learner's are temporaries of the train
  step: with more rows of one width they grow as the tokens do; with wider rows
  of as many tokens by the attention's weights, H·T a layer and token. The
  sampler's are its state and a chunk's temporaries.
  """

  model = PEERS

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
