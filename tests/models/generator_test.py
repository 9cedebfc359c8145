"""The generator's copy: what is held in which dtype, and what it computes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scalerl_jax.config import SamplerConfig
from scalerl_jax.models.generator import (
  cast,
  generator_graph,
  generator_model,
  weight_dtypes,
)
from tests.helpers import SHAPE, V, small_policy

BFLOAT16 = SamplerConfig(dtype="bfloat16")
EXPERTS = dataclasses.replace(
  SHAPE,
  tied_head=False,
  attention_bias=True,
  qk_norm="scaled",
  num_experts=3,
  expert_width=10,
  dense_layers="0",
)


def _wide(shape, sampler):
  """Names of the parameters that the generator holds in float32."""
  params = nnx.state(small_policy(shape))
  found = nnx.to_pure_dict(weight_dtypes(params, shape, sampler))
  named = found | found.pop("layers")
  assert set(named.values()) <= {np.dtype("float32"), jnp.dtype("bfloat16")}
  return {name for name, dtype in named.items() if dtype == np.float32}


@pytest.mark.parametrize(
  ("shape", "sampler", "wide"),
  [
    (SHAPE, BFLOAT16, {"embedding"}),
    (EXPERTS, BFLOAT16, {"output", "router"}),
    (EXPERTS, dataclasses.replace(BFLOAT16, head_dtype="bfloat16"), {"router"}),
    (SHAPE, dataclasses.replace(BFLOAT16, head_dtype="bfloat16"), set()),
    # The model's own dtype counts where the sampler names none.
    (
      dataclasses.replace(SHAPE, dtype="bfloat16"),
      SamplerConfig(),
      {"embedding"},
    ),
  ],
  ids=["tied", "experts", "rounded_head", "tied_rounded_head", "of_the_model"],
)
def test_only_what_is_read_in_float32_is_held_in_it(shape, sampler, wide):
  assert _wide(shape, sampler) == wide


@pytest.mark.parametrize("dtype", ["", "float32"])
def test_in_the_trainers_dtype_nothing_differs(dtype):
  graph, params = nnx.split(small_policy())
  sampler = SamplerConfig(dtype=dtype)
  assert generator_model(SHAPE, sampler) == SHAPE
  assert generator_graph(graph, params, sampler) == graph
  held = cast(params, weight_dtypes(params, SHAPE, sampler))
  for one, other in zip(
    jax.tree.leaves(held), jax.tree.leaves(params), strict=True
  ):
    assert one is other


def test_a_float32_generator_of_a_bfloat16_trainer_computes_in_float32():
  rounded = dataclasses.replace(SHAPE, dtype="bfloat16")
  graph, params = nnx.split(small_policy(rounded))
  sampler = SamplerConfig(dtype="float32")
  plain = nnx.graphdef(small_policy())
  assert generator_graph(graph, params, sampler) == plain


@pytest.mark.parametrize("shape", [SHAPE, EXPERTS], ids=["tied", "experts"])
def test_held_in_bfloat16_they_compute_what_a_bfloat16_body_computes(shape):
  graph, params = nnx.split(small_policy(shape))
  narrow = generator_graph(graph, params, BFLOAT16)
  held = cast(params, weight_dtypes(params, shape, BFLOAT16))
  tokens = jnp.arange(35).reshape(5, 7) % V

  @jax.jit
  def logits(params):
    return nnx.merge(narrow, params)(tokens)

  assert nnx.merge(narrow, held).dtype == jnp.bfloat16
  np.testing.assert_array_equal(logits(held), logits(params))
  # And not what the trainer's does.
  full = nnx.merge(graph, params)(tokens)
  assert np.abs(np.asarray(full - logits(held))).max() > 1e-3


def test_the_cache_is_in_the_generators_dtype():
  graph, params = nnx.split(small_policy())
  narrow = nnx.merge(generator_graph(graph, params, BFLOAT16), params)
  cache = jax.eval_shape(
    lambda: narrow.empty_cache(
      prompts=2, slots=3, prompt_tokens=5, completion_tokens=7
    )
  )
  held = jax.tree.leaves((cache.prompt_k, cache.prompt_v, cache.rings))
  assert {x.dtype for x in held} == {jnp.dtype(jnp.bfloat16)}
