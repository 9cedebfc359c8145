"""The explicit KV cache: a prompt part shared by a group, a completion part.

Keys are `[..., K, Dh, T]` and values `[..., K, T, Dh]`, so that both products
of the attention are plain small matmuls. While a chunk is decoded the cache is
*open*: laid out for the loop, a slot's prompt and completion side by side.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from scalerl_jax.models.layers import FLOAT32, MASKED


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class KVCache:
  """Keys and values of L layers for P prompts and S slots.

  The completion part is a ring over its Tc columns. All slots write the same
  column in the same decode step, so a write is one slice and not a scatter;
  a slot's newest `length` columns, counted back from `cursor`, are its own.
  """

  prompt_k: Any  # [L, P, K, Dh, Tp] of the body's dtype, rotated
  prompt_v: Any  # [L, P, K, Tp, Dh]
  prompt_length: Any  # int32 [P], columns that hold a token
  group: Any  # int32 [S], which prompt a slot continues
  k: Any  # [L, S, K, Dh, Tc]
  v: Any  # [L, S, K, Tc, Dh]
  length: Any  # int32 [S], completion columns that are the slot's own
  cursor: Any  # int32 [], the column that the next decode step writes


def empty_cache(
  *,
  layers: int,
  prompts: int,
  slots: int,
  kv_heads: int,
  head_width: int,
  prompt_tokens: int,
  completion_tokens: int,
  dtype: Any,
) -> KVCache:
  """A cache in which no column belongs to anybody yet."""

  def zeros(count: int, *shape: int) -> jax.Array:
    return jnp.zeros((layers, count, kv_heads, *shape), dtype)

  return KVCache(
    prompt_k=zeros(prompts, head_width, prompt_tokens),
    prompt_v=zeros(prompts, prompt_tokens, head_width),
    prompt_length=jnp.zeros((prompts,), jnp.int32),
    group=jnp.zeros((slots,), jnp.int32),
    k=zeros(slots, head_width, completion_tokens),
    v=zeros(slots, completion_tokens, head_width),
    length=jnp.zeros((slots,), jnp.int32),
    cursor=jnp.zeros((), jnp.int32),
  )


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class OpenCache:
  """The cache as a decode loop holds it: Tp + Tc columns a slot.

  One product covers prompt and completion. Layers are a tuple where they are
  unrolled: a matmul cannot read a layer out of a stack in place, and copying
  all keys and values at each step was a third of it (quickstart's shape, one
  thread: 5.9 ms a step stacked, 4.0 ms as tuples, 3.6 ms joined as well).
  """

  k: Any  # L of [S, K, Dh, Tp + Tc]
  v: Any  # L of [S, K, Tp + Tc, Dh]
  prompt_length: Any  # int32 [S]
  length: Any  # int32 [S]
  cursor: Any  # int32 []
  prompt_tokens: int = dataclasses.field(metadata={"static": True})  # Tp

  @property
  def completion_tokens(self) -> int:
    """Tc, columns of the ring."""
    return self.k[0].shape[-1] - self.prompt_tokens


def open_cache(cache: KVCache, *, unrolled: bool) -> OpenCache:
  """Gathers each slot's prompt beside its completion, once a chunk.

  Args:
    cache: as `RunState` holds it.
    unrolled: layers as a tuple; stacked otherwise.
  """

  group = cache.group

  def join(prompt: Array, own: Array, axis: int) -> Array:
    """Leading axes: P and S, or L before them; `axis` counts from the end."""
    stacked = prompt.ndim == 5
    place = prompt.at[:, group] if stacked else prompt.at[group]
    # Kept apart: fused into one loop over elements, gather and concatenation
    # take twice the time on a CPU, and ten times with the layers stacked.
    spread = jax.lax.optimization_barrier(place.get(mode="promise_in_bounds"))
    return jnp.concatenate([spread, own], axis=axis)

  def joined(prompt: Array, own: Array, axis: int) -> Any:
    if not unrolled:
      return join(prompt, own, axis)
    layers = zip(prompt, own, strict=True)
    return tuple(join(part, rest, axis) for part, rest in layers)

  return OpenCache(
    k=joined(cache.prompt_k, cache.k, -1),
    v=joined(cache.prompt_v, cache.v, -2),
    prompt_length=jnp.take(cache.prompt_length, group),
    length=cache.length,
    cursor=cache.cursor,
    prompt_tokens=cache.prompt_k.shape[-1],
  )


def close_cache(cache: KVCache, opened: OpenCache) -> KVCache:
  """`cache` with the completion part of `opened`; its prompt part is kept."""
  columns = opened.prompt_tokens

  def own(part: Any, axis: int) -> Array:
    layers = part if isinstance(part, tuple) else tuple(part)
    return jnp.stack(
      [jax.lax.slice_in_dim(x, columns, None, axis=axis) for x in layers]
    )

  return dataclasses.replace(
    cache,
    k=own(opened.k, 3),
    v=own(opened.v, 2),
    length=opened.length,
    cursor=opened.cursor,
  )


def _age(cache: OpenCache) -> Int[Array, " Tc"]:
  """How many decode steps ago each column of the ring was written."""
  ring = cache.completion_tokens
  return (cache.cursor - jnp.arange(ring, dtype=jnp.int32)) % ring


def visible(cache: OpenCache) -> Float[Array, "S T"]:
  """Additive float32 mask of a step that has written, before `advance`."""
  columns = jnp.arange(cache.prompt_tokens, dtype=jnp.int32)
  prompt = columns[None] < cache.prompt_length[:, None]
  own = _age(cache)[None] < (cache.length + 1)[:, None]
  seen = jnp.concatenate([prompt, own], axis=1)
  return jnp.where(seen, 0.0, MASKED).astype(jnp.float32)


def same_chunk(
  cache: OpenCache, positions: Int[Array, " S"], chunk: int
) -> Bool[Array, "S T"]:
  """Columns whose position lies in the chunk of the slot's newest token.

  Args:
    cache: opened; a prompt's column is its position.
    positions: of the tokens that are being read.
    chunk: positions of a chunk.
  """
  columns = jnp.arange(cache.prompt_tokens, dtype=jnp.int32)[None]
  prompt = jnp.broadcast_to(columns, (len(positions), cache.prompt_tokens))
  own = positions[:, None] - _age(cache)[None]
  where = jnp.concatenate([prompt, own], axis=1)
  return where // chunk == (positions // chunk)[:, None]


def write(
  cache: OpenCache,
  layer: Any,
  key: Float[Array, "S K Dh"],
  value: Float[Array, "S K Dh"],
) -> OpenCache:
  """One token's key and value of each slot into the cursor's column.

  Args:
    cache: opened.
    layer: an index, static where layers are a tuple.
    key: rotated.
    value: as projected.
  """
  zero = jnp.zeros((), jnp.int32)
  column = cache.cursor + cache.prompt_tokens

  def put(part: Any, token: Array, axis: int) -> Any:
    index = [zero] * token.ndim
    index[axis] = column
    if isinstance(part, tuple):
      token = token.astype(part[layer].dtype)
      new = jax.lax.dynamic_update_slice(part[layer], token, index)
      return (*part[:layer], new, *part[layer + 1 :])
    token = token[None].astype(part.dtype)
    return jax.lax.dynamic_update_slice(part, token, [layer, *index])

  return dataclasses.replace(
    cache,
    k=put(cache.k, key[..., None], 3),
    v=put(cache.v, value[:, :, None, :], 2),
  )


def advance(cache: OpenCache) -> OpenCache:
  """The ring one column further; each slot owns one column more."""
  ring = cache.completion_tokens
  return dataclasses.replace(
    cache,
    length=jnp.minimum(cache.length + 1, ring),
    cursor=(cache.cursor + 1) % ring,
  )


def attend_cached(
  query: Float[Array, "S H Dh"],
  cache: OpenCache,
  layer: Any,
  mask: Float[Array, "S T"],
) -> Float[Array, "S H Dh"]:
  """One query a slot against its prompt and its own completion columns."""
  slots, heads, width = query.shape
  key, value = (
    part[layer]
    if isinstance(part, tuple)
    else jax.lax.dynamic_index_in_dim(part, layer, 0, keepdims=False)
    for part in (cache.k, cache.v)
  )
  kv_heads = key.shape[1]
  query = query.reshape(slots, kv_heads, heads // kv_heads, width)
  query = query.astype(jnp.float32) * width**-0.5
  scores = jnp.einsum("skrd,skdt->skrt", query, key, **FLOAT32)
  weights = jax.nn.softmax(scores + mask[:, None, None], axis=-1)
  out = jnp.einsum("skrt,sktd->skrd", weights, value, **FLOAT32)
  return out.reshape(slots, heads, width)
