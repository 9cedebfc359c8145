"""Draws only: a token from warped logits, with its log-prob in the same pass.

Randomness is addressed, not consumed: the key of a token is made of the run's
key, the prompt's uid, the sample index and the token's position.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32


def sample_keys(
  run_key: UInt32[Array, "2"],
  uids: Int[Array, " S"],
  samples: Int[Array, " S"],
) -> UInt32[Array, "S 2"]:
  """Raw key data of each completion: fold_in(fold_in(run, uid), sample)."""

  def one(uid: Array, sample: Array) -> Array:
    key = jax.random.wrap_key_data(run_key, impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, uid), sample)
    return jax.random.key_data(key)

  return jax.vmap(one)(uids, samples)


def token_uniforms(
  keys: UInt32[Array, "S 2"], positions: Int[Array, " S"]
) -> Float[Array, " S"]:
  """One uniform number in [0, 1) for the token at each position."""

  def one(data: Array, position: Array) -> Array:
    key = jax.random.wrap_key_data(data, impl="threefry2x32")
    return jax.random.uniform(jax.random.fold_in(key, position))

  return jax.vmap(one)(keys, positions)


def draw(
  logits: Float[Array, "S V"], uniforms: Float[Array, " S"]
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
  """A token from softmax(logits) by inverse CDF, and its log-prob in nats.

  One uniform a token and two sums of √V terms, where Gumbel noise would take
  V random numbers (14 % of a decode step at V = 1,024). A token whose logit
  is −inf is never drawn.

  >>> draw(jnp.array([[0.0, -jnp.inf, 0.0]]), jnp.array([0.6]))[0]
  Array([2], dtype=int32)
  """
  vocabulary = logits.shape[-1]
  width = math.isqrt(vocabulary - 1) + 1 if vocabulary > 1 else 1
  blocks = -(-vocabulary // width)
  top = jnp.max(logits, axis=-1, keepdims=True)
  mass = jnp.exp(logits - top)
  padding = ((0, 0), (0, blocks * width - vocabulary))
  table = jnp.pad(mass, padding).reshape(-1, blocks, width)

  def first_above(terms: Array, target: Array) -> tuple[Array, Array]:
    """First index whose running sum passes the target; the sum before it."""
    running = jnp.cumsum(terms, axis=-1)
    # Rounding may leave the last sum at the target: fall back to the last
    # term that has mass.
    above = (running > target[:, None]) & (terms > 0)
    last = terms.shape[-1] - 1 - jnp.argmax((terms > 0)[:, ::-1], axis=-1)
    index = jnp.where(above.any(axis=-1), jnp.argmax(above, axis=-1), last)
    index = index.astype(jnp.int32)
    before = jnp.take_along_axis(running - terms, index[:, None], axis=-1)
    return index, before[:, 0]

  block_mass = table.sum(axis=-1)
  total = block_mass.sum(axis=-1)
  target = uniforms * total
  block, before = first_above(block_mass, target)
  inside = jnp.take_along_axis(table, block[:, None, None], axis=1)[:, 0]
  within, _ = first_above(inside, target - before)
  token = block * width + within
  chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
  return token, chosen - top[:, 0] - jnp.log(total)
