"""Supervised steps on texts: the warm start of a base policy."""

import functools
from collections.abc import Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from scalerl_jax.config import SupervisedConfig
from scalerl_jax.learning.optimizer import init_sharded
from scalerl_jax.models.policy import Policy
from scalerl_jax.models.sharding import batch_sharding, replicated
from scalerl_jax.models.static import with_settings
from scalerl_jax.objectives.logprobs import token_logps


@functools.cache
def supervised_optimizer(
  config: SupervisedConfig,
) -> optax.GradientTransformation:
  """AdamW with a linear warm-up and a cosine to 0."""
  warmup = max(1, round(config.warmup_fraction * config.steps))
  schedule = optax.warmup_cosine_decay_schedule(
    0.0, config.learning_rate, warmup, max(config.steps, warmup + 1)
  )
  return optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.01),
  )


def cross_entropy(
  policy: Policy,
  tokens: Int[Array, "N T"],
  mask: Bool[Array, "N T"],
  lengths: Int[Array, " N"],
) -> Float[Array, ""]:
  """Mean negative log-prob of the tokens in `mask`, nats."""
  columns = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
  segments = (columns < lengths[:, None]).astype(jnp.int32)
  hidden = policy.hidden(tokens, None, segments)[:, :-1]
  logps = token_logps(policy.head(hidden), tokens[:, 1:])
  counted = mask[:, 1:]
  total = jnp.sum(jnp.where(counted, logps, 0.0))
  return -total / jnp.maximum(counted.sum(), 1)


def supervised_step(
  params: nnx.State,
  optimizer_state: Any,
  tokens: Int[Array, "N T"],
  mask: Bool[Array, "N T"],
  lengths: Int[Array, " N"],
  *,
  policy: Any,
  optimizer: optax.GradientTransformation,
) -> tuple[nnx.State, Any, Float[Array, ""]]:
  """One update; the first two arguments are donated."""

  def objective(params: nnx.State) -> Array:
    return cross_entropy(nnx.merge(policy, params), tokens, mask, lengths)

  loss, gradients = jax.value_and_grad(objective)(params)
  updates, optimizer_state = optimizer.update(
    gradients, optimizer_state, params
  )
  params = cast(nnx.State, optax.apply_updates(params, updates))
  return params, optimizer_state, loss


def train_supervised(
  policy: Any,
  params: nnx.State,
  config: SupervisedConfig,
  batches: Iterator[Any],
  mesh: Mesh,
) -> Iterator[tuple[int, nnx.State, jax.Array]]:
  """Trains; yields (steps done, parameters, loss) after each step.

  The loss is a device array: read it seldom, and the host stays ahead.
  """
  optimizer = supervised_optimizer(config)
  with jax.set_mesh(mesh):
    params = jax.tree.map(jnp.copy, params)
    state = init_sharded(optimizer, params, mesh)
    held = jax.tree.map(lambda x: x.sharding, (params, state))
    # Left to itself, the compiler would shard what comes out as it likes.
    step = jax.jit(
      with_settings(supervised_step, policy=policy, optimizer=optimizer),
      donate_argnums=(0, 1),
      out_shardings=(*held, replicated(mesh)),
    )
    for done in range(1, config.steps + 1):
      batch = next(batches)
      rows = batch_sharding(mesh, len(batch.tokens))
      tokens, mask, lengths = (
        jax.device_put(np.asarray(x), rows)
        for x in (batch.tokens, batch.mask, batch.lengths)
      )
      params, state, loss = step(params, state, tokens, mask, lengths)
      yield done, params, loss
