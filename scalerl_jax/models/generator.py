"""The generator's copy of a policy: in which dtypes it computes and is held.

The trainer's parameters stay float32; what crosses to the generator need be no
wider than what it is read as there.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from scalerl_jax.config import ModelConfig, SamplerConfig
from scalerl_jax.models.policy import Policy

ROUTER = "router"  # a bfloat16 body reads it in float32 too


def generator_model(model: ModelConfig, sampler: SamplerConfig) -> ModelConfig:
  """The architecture as the generator computes it: in its own dtype.

  Args:
    model: the trainer's.
    sampler: says the dtype; where it is empty, the model does.

  Example:
    >>> generator_model(ModelConfig(), SamplerConfig(dtype="bfloat16")).dtype
    'bfloat16'
    >>> generator_model(ModelConfig(dtype="bfloat16"), SamplerConfig()).dtype
    'bfloat16'
  """
  return dataclasses.replace(model, dtype=sampler.dtype or model.dtype)


def with_head_dtype(
  policy: nnx.GraphDef, params: nnx.State, dtype: str
) -> nnx.GraphDef:
  """The same policy with its head in another dtype, for one side of the run.

  Args:
    policy: graph definition (`nnx.split`).
    params: its parameters, for their structure only.
    dtype: "float32" or "bfloat16".
  """
  merged: Policy = nnx.merge(policy, params)
  merged.head_dtype = dtype
  return nnx.split(merged)[0]


def generator_graph(
  policy: nnx.GraphDef, params: nnx.State, sampler: SamplerConfig
) -> nnx.GraphDef:
  """The same policy with body and head in the generator's dtypes.

  Args:
    policy: graph definition (`nnx.split`) of the trainer's.
    params: its parameters, for their structure only.
    sampler: says the dtypes.
  """
  merged = nnx.merge(policy, params)
  merged.config = generator_model(merged.config, sampler)
  return with_head_dtype(nnx.graphdef(merged), params, sampler.head_dtype)


def weight_dtype(
  name: str, model: ModelConfig, sampler: SamplerConfig
) -> jnp.dtype:
  """The dtype in which the generator holds a parameter.

  That of its body, but float32 for what is read in float32: the table of the
  FP32 head, and a router.

  Args:
    name: of the parameter, as in the plan.
    model: the trainer's architecture.
    sampler: says the dtypes.

  Example:
    >>> sampler = SamplerConfig(dtype="bfloat16")
    >>> for name in ("query", "embedding"):
    ...   print(weight_dtype(name, ModelConfig(tied_head=True), sampler))
    bfloat16
    float32
  """
  table = "embedding" if model.tied_head else "output"
  if name == ROUTER or (name == table and sampler.head_dtype == "float32"):
    return jnp.dtype(jnp.float32)
  return jnp.dtype(generator_model(model, sampler).dtype)


def weight_dtypes(
  params: nnx.State, model: ModelConfig, sampler: SamplerConfig
) -> Any:
  """`weight_dtype` of each parameter, as a pytree of the same structure."""
  return jax.tree_util.tree_map_with_path(
    lambda path, _: weight_dtype(_name(path), model, sampler), params
  )


def cast(params: nnx.State, dtypes: Any) -> nnx.State:
  """Each array in its dtype; one that has it is not copied.

  Args:
    params: parameters.
    dtypes: as `weight_dtypes` gives them.
  """
  return jax.tree.map(lambda x, dtype: x.astype(dtype), params, dtypes)


def _name(path: tuple[Any, ...]) -> str:
  """The plan's name of a parameter: the innermost key of its path."""
  return [key.key for key in path if hasattr(key, "key")][-1]
