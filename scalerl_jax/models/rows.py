"""Rows of slots and prompts that come in shards, each of which stays apart.

The devices of a generator mesh hold equal parts of the slots and of the
prompts. Rows are read and written within a part only, so that a decode step
moves nothing between devices.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


def pick(
  x: Shaped[Array, "N *B"], index: Int[Array, " M"], shards: int
) -> Shaped[Array, "M *B"]:
  """`x[index]`, where each of `shards` equal parts reads its own part only.

  Args:
    x: N rows.
    index: in range; of a row in the part that asks.
    shards: divides N and M.
  """

  def take(rows: Array, index: Array) -> Array:
    return rows.at[index].get(mode="promise_in_bounds")

  if shards == 1:
    return take(x, index)
  parts = x.reshape(shards, -1, *x.shape[1:])
  first = jnp.arange(shards, dtype=index.dtype)[:, None] * parts.shape[1]
  local = jnp.clip(index.reshape(shards, -1) - first, 0, parts.shape[1] - 1)
  return jax.vmap(take)(parts, local).reshape(-1, *x.shape[1:])


def put_rows(
  x: Shaped[Array, "N *B"],
  index: Int[Array, " M"],
  rows: Shaped[Array, "M *B"],
  shards: int,
) -> Shaped[Array, "N *B"]:
  """`x` with `rows` at `index`, each part written from its own part only.

  Args:
    x: N rows.
    index: of a row in the part that writes; N or more: dropped.
    rows: cast to the dtype of `x`.
    shards: divides N and M.
  """

  def put(x: Array, index: Array, rows: Array) -> Array:
    return x.at[index].set(rows.astype(x.dtype), mode="drop")

  if shards == 1:
    return put(x, index, rows)
  parts = x.reshape(shards, -1, *x.shape[1:])
  share = parts.shape[1]
  first = jnp.arange(shards, dtype=index.dtype)[:, None] * share
  local = index.reshape(shards, -1) - first
  new = rows.reshape(shards, -1, *rows.shape[1:])
  return jax.vmap(put)(parts, local, new).reshape(x.shape)


def split_rows(
  x: Shaped[Array, "N *B"], sizes: Sequence[int], shards: int
) -> list[Array]:
  """Rows of each ring, out of those of all slots; the rest is left out.

  Args:
    x: a row a slot.
    sizes: rows of each part, divisible by `shards`.
    shards: each holds its share of every part, one part after the other.
  """
  if list(sizes) == [x.shape[0]]:
    return [x]
  parts, first = x.reshape(shards, -1, *x.shape[1:]), 0
  found = []
  for size in sizes:
    share = size // shards
    part = jax.lax.slice_in_dim(parts, first, first + share, axis=1)
    found.append(part.reshape(size, *x.shape[1:]))
    first += share
  return found


def join_rows(parts: Sequence[Array], shards: int) -> Shaped[Array, "N *B"]:
  """The inverse of `split_rows`."""
  if len(parts) == 1:
    return parts[0]
  shape = parts[0].shape[1:]
  joined = jnp.concatenate(
    [part.reshape(shards, -1, *shape) for part in parts], axis=1
  )
  return joined.reshape(-1, *shape)
