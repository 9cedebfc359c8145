"""AdamW after a clip by global norm, with the paper's tiny epsilon."""

import functools
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

from scalerl_jax.config import OptimizerConfig
from scalerl_jax.models.sharding import replicated


def warmup_constant(learning_rate: float, warmup_steps: int) -> optax.Schedule:
  """Linear from 0 over the warm-up, constant after it.

  The first update already moves: step n uses (n + 1) / warmup_steps.

  >>> float(warmup_constant(1.0, 4)(1))
  0.5
  """
  if not warmup_steps:
    return optax.constant_schedule(learning_rate)
  ramp = optax.linear_schedule(0.0, learning_rate, warmup_steps)
  return lambda count: ramp(count + 1)


@functools.cache  # equal rules are one rule, and one compiled train step
def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
  """The update rule of reinforcement learning.

  Reference: ScaleRL, arXiv 2510.13786, section 2: AdamW, constant rate,
  epsilon 1e-15, weight decay 0.01, linear warm-up. The betas and the clip are
  not given there.
  """
  return optax.chain(
    optax.clip_by_global_norm(config.clip_norm),
    optax.adamw(
      warmup_constant(config.learning_rate, config.warmup_steps),
      b1=config.beta1,
      b2=config.beta2,
      eps=config.epsilon,
      weight_decay=config.weight_decay,
    ),
  )


def init_sharded(
  optimizer: optax.GradientTransformation, params: nnx.State, mesh: Mesh
) -> Any:
  """The optimiser's first state, moments cut as their parameters are.

  A jitted init alone would give every device all of them.
  """
  shardings = optax.tree_utils.tree_map_params(
    optimizer,
    lambda _, param: param.sharding,
    jax.eval_shape(optimizer.init, params),
    params,
    transform_non_params=lambda _: replicated(mesh),
  )
  return jax.jit(optimizer.init, out_shardings=shardings)(params)
