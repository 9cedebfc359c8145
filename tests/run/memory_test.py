"""Bytes in closed form against XLA's own, and against arrays that exist."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from scalerl_jax.config import (
  LossConfig,
  ModelConfig,
  OptimizerConfig,
  SamplerConfig,
)
from scalerl_jax.learning.buckets import Bucket
from scalerl_jax.learning.optimizer import make_optimizer
from scalerl_jax.learning.train_step import (
  LearnerState,
  TrainSettings,
  train_step,
)
from scalerl_jax.models.generator import (
  cast,
  generator_graph,
  weight_dtypes,
)
from scalerl_jax.models.policy import UNROLL_LAYERS
from scalerl_jax.models.sharding import make_mesh
from scalerl_jax.run import memory
from scalerl_jax.sampling.sampler import Sampler
from scalerl_jax.types import Batch
from tests.helpers import small_policy
from tests.runs import TINY

V, ROWS, T = 131, 8, 48
BOUND = 0.25  # of what XLA says
MODEL = ModelConfig(
  width=64,
  num_layers=2,
  num_heads=6,
  num_kv_heads=2,
  head_width=16,
  mlp_width=160,
)


def _told(model, loss, rows=ROWS):
  return memory.learner_bytes(
    model,
    loss,
    vocab_size=V,
    bucket=Bucket(T, rows),
    mesh=make_mesh(),
  )


def _measured(model, loss):
  """Bytes of arguments and temporaries of the compiled step."""
  graph, params = nnx.split(small_policy(model, vocab_size=V))
  optimizer = make_optimizer(OptimizerConfig())

  def array(*shape, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype)

  params = jax.eval_shape(lambda x: x, params)
  state = LearnerState(params, jax.eval_shape(optimizer.init, params), array())
  batch = Batch(
    tokens=array(ROWS, T),
    segment_ids=array(ROWS, T),
    mask=array(ROWS, T, dtype=bool),
    behavior_logps=array(ROWS, T, dtype=jnp.float32),
    correct=array(ROWS),
    rewards=array(ROWS, dtype=jnp.float32),
  )
  settings = TrainSettings(
    policy=graph,
    optimizer=optimizer,
    loss=loss,
    warp=(),
    group_size=ROWS,
    micro_batch=ROWS,
    max_completion_tokens=T,
  )
  step = functools.partial(train_step, settings=settings)
  found = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
  analysis = found.memory_analysis()
  return analysis.argument_size_in_bytes + analysis.temp_size_in_bytes


@pytest.mark.parametrize(
  ("depth", "remat", "chunk"),
  [
    (2, "none", 0),
    pytest.param(2, "none", 64, marks=pytest.mark.slow),
    pytest.param(6, "none", 0, marks=pytest.mark.slow),
    pytest.param(6, "block", 64, marks=pytest.mark.slow),
  ],
)
def test_a_train_step_holds_what_xla_says(depth, remat, chunk):
  assert (depth <= UNROLL_LAYERS) == (depth == 2)
  model = dataclasses.replace(MODEL, num_layers=depth, remat=remat)
  loss = LossConfig(logprob_chunk=chunk)
  told = sum(_told(model, loss).values())
  assert told == pytest.approx(_measured(model, loss), rel=BOUND)


def test_activations_and_logits_alone_follow_the_micro_batch():
  one, two = (_told(MODEL, LossConfig(), rows) for rows in (4, 8))
  for name in one:
    follows = name in ("activations", "logits")
    assert two[name] == (2 if follows else 1) * one[name], name


def test_chunks_bound_the_logits_and_remat_the_activations():
  deep = dataclasses.replace(MODEL, num_layers=12)
  chunked = _told(deep, LossConfig(logprob_chunk=48))
  whole = _told(deep, LossConfig())["logits"]
  assert chunked["logits"] * ROWS * (T - 1) == whole * 48
  again = _told(dataclasses.replace(deep, remat="block"), LossConfig())
  # What enters a layer is all that is kept of it.
  assert again["activations"] == 4 * 12 * ROWS * T * deep.width
  assert sum(again.values()) < 0.5 * sum(_told(deep, LossConfig()).values())


def test_parameters_are_those_of_a_policy_on_its_mesh():
  mesh = make_mesh(jax.devices()[:4], fsdp=2, tensor=2)
  params = nnx.state(small_policy(MODEL, vocab_size=V, mesh=mesh))
  leaves = jax.tree.leaves(params)
  assert memory.parameter_count(MODEL, V) == sum(x.size for x in leaves)
  assert memory.parameter_bytes(MODEL, V, mesh) == sum(
    x.addressable_shards[0].data.nbytes for x in leaves
  )
  # 131 words on two devices: the table is on both.
  assert memory.replicated_parameters(MODEL, V, mesh) == (
    "embedding: vocab 131 on tensor 2",
  )


@pytest.mark.parametrize(
  ("model", "sampler"),
  [
    ("float32", {}),
    ("bfloat16", {}),
    ("float32", {"dtype": "bfloat16"}),
    ("float32", {"kv_dtype": "bfloat16"}),
  ],
)
def test_weights_cross_as_the_generator_holds_them(model, sampler):
  model = dataclasses.replace(MODEL, dtype=model)
  config = SamplerConfig(**sampler)
  _, params = nnx.split(small_policy(model, vocab_size=V))
  weights = cast(params, weight_dtypes(params, model, config))
  assert memory.published_bytes(model, config, V, make_mesh()) == sum(
    x.nbytes for x in jax.tree.leaves(weights)
  )


@pytest.mark.parametrize(
  ("dtype", "own", "ways"),
  [
    ("float32", {}, 1),
    ("bfloat16", {}, 2),
    ("float32", {"dtype": "bfloat16"}, 1),
    ("float32", {"kv_dtype": "bfloat16"}, 1),
  ],
)
def test_a_cache_holds_what_its_arrays_do(dtype, own, ways):
  model = dataclasses.replace(MODEL, dtype=dtype)
  mesh = make_mesh(jax.devices()[:ways])
  graph, params = nnx.split(small_policy(model, vocab_size=V, mesh=mesh))
  for completion in (7, 64):
    config = SamplerConfig(
      slots=24, max_prompt_tokens=5, max_completion_tokens=completion, **own
    )
    widest, changing = memory.cache_bytes(
      model, config, group_size=5, mesh=mesh
    )
    sampler = Sampler(
      generator_graph(graph, params, config),
      params,
      config,
      group_size=5,
      eos_ids=(2,),
      seed=0,
      mesh=mesh,
    )
    layout = sampler._layout
    cache = sampler.state_dict()["slots"].cache  # as wide as it can be

    def held(*parts):
      arrays = jax.tree.leaves(parts)
      return sum(x.addressable_shards[0].data.nbytes for x in arrays)

    rings = held(cache.rings)
    assert widest == held(cache.prompt_k, cache.prompt_v) + rings
    assert changing == (rings if len(layout.menu) > 1 else 0)
    assert (len(layout.menu) > 1) == (completion == 64)


def test_prompts_enter_so_many_at_a_time():
  def entering(slots):
    config = SamplerConfig(
      slots=slots, max_prompt_tokens=4000, max_completion_tokens=1
    )
    held = memory.sampler_bytes(
      TINY.model,
      config,
      group_size=1,
      samples=1,
      vocab_size=18,
      mesh=make_mesh(jax.devices()[:1]),
    )
    return held["rings that are made wider, or a prefill"]

  assert entering(128) == 2 * entering(64)
  assert entering(512) == entering(256) == 2 * entering(128)


def test_experts_count_for_the_tokens_that_they_see():
  shape = {"num_experts": 8, "expert_width": 40}
  few = dataclasses.replace(MODEL, **shape, experts_per_token=1)
  more = dataclasses.replace(MODEL, **shape, experts_per_token=3)
  counts = [
    memory.layer_floats(model, T, tensor=1, sparse=True)
    for model in (few, more)
  ]
  # Five times the expert's width and the token's own, for each expert more.
  assert counts[1] - counts[0] == 2 * 5 * (40 + MODEL.width)


def test_a_device_out_of_memory_is_one_sentence_with_what_to_lower():
  with pytest.raises(jax.errors.JaxRuntimeError) as caught:
    jnp.zeros((10**13,)).block_until_ready()
  told = memory.out_of_memory(caught.value, TINY)
  assert "\n" not in told
  assert "40000000000000 bytes" in told
  for words in (
    "batch.micro_batch (8)",
    "sampler.slots (16)",
    "loss.logprob_chunk",
    "--plan",
  ):
    assert words in told
  assert memory.out_of_memory(RuntimeError("another"), TINY) is None
