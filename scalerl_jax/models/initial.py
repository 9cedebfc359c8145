"""Weights of a policy that nothing has trained yet."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from scalerl_jax.config import ModelConfig
from scalerl_jax.models.plan import parameter_plan
from scalerl_jax.models.sharding import named_sharding


def initial_weights(
  config: ModelConfig, vocab_size: int, key: Array, mesh: Mesh
) -> dict[str, Array]:
  """Initial weights, each on its devices from the first moment on.

  Args:
    config: the architecture.
    vocab_size: V.
    key: of all of them.
    mesh: where they are created.

  Returns:
    float32 arrays by the plan's names.
  """
  plan = parameter_plan(config, vocab_size)

  def create(key: Array) -> dict[str, Array]:
    keys = jax.random.split(key, len(plan))
    return {
      name: part.deviation * jax.random.normal(keys[i], part.shape, jnp.float32)
      if part.deviation
      else jnp.full(part.shape, part.mean, jnp.float32)
      for i, (name, part) in enumerate(plan.items())
    }

  shardings = {
    name: named_sharding(part.axes, part.shape, mesh)
    for name, part in plan.items()
  }
  # One program, with out_shardings: no device ever holds a whole array.
  return jax.jit(create, out_shardings=shardings)(key)
