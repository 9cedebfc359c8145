"""The explicit KV cache: prompts shared by their groups, rings of completions.

Keys are `[..., K, Dh, T]` and values `[..., K, T, Dh]`, so that both products
of the attention are plain small matmuls that read a cache once. Nothing is
copied between decode steps or chunks: a step writes a column in place.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from scalerl_jax.models.layers import MASKED
from scalerl_jax.models.operands import FLOAT32
from scalerl_jax.models.rows import join_rows, pick, split_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Ring:
  """Completion columns of N slots, of which each may own the newest W.

  All slots write the same column in the same decode step, so a write is one
  slice and not a scatter.
  """

  k: Any  # L of [N, K, Dh, W], rotated
  v: Any  # L of [N, K, W, Dh]

  @property
  def rows(self) -> int:
    """N, slots that write here."""
    return jax.tree.leaves(self.k)[0].shape[-4]

  @property
  def columns(self) -> int:
    """W, completion tokens that a slot can own here."""
    return jax.tree.leaves(self.k)[0].shape[-1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class KVCache:
  """Keys and values of L layers for P prompts and S slots.

  A prompt is held once for its group, addressed by a slot's `group`. Slots
  are spread over rings, the first ones over the first ring and so on, so that
  short completions need not be as wide as long ones. A slot's newest `length`
  columns are its own, counted back from `clock` modulo its ring.

  Layers are a tuple where they are unrolled, one array `[L, ...]` where they
  are scanned: a matmul cannot read a layer out of a stack in place, and
  copying all keys and values was a third of a step.
  """

  prompt_k: Any  # L of [P, K, Dh, Tp] of the cache's dtype, rotated
  prompt_v: Any  # L of [P, K, Tp, Dh]
  prompt_length: Any  # int32 [P], columns that hold a token
  members: Any  # int32 [P, G], slots that continue a prompt, first row first
  group: Any  # int32 [S], which prompt a slot continues
  member: Any  # int32 [S], which row of its group a slot is
  rings: Any  # tuple of Ring
  length: Any  # int32 [S], completion columns that are the slot's own
  clock: Any  # int32 [], decode steps so far
  # Shards of slots and prompts that need nothing of each other.
  shards: int = dataclasses.field(default=1, metadata={"static": True})

  @property
  def rows(self) -> tuple[int, ...]:
    """Slots of each ring."""
    return tuple(ring.rows for ring in self.rings)

  @property
  def prompt_tokens(self) -> int:
    """Tp, columns of a prompt."""
    return jax.tree.leaves(self.prompt_k)[0].shape[-1]


class Seen(NamedTuple):
  """What a step sees, for prompts and for each ring."""

  prompt: Any  # [P, G or 1, Tp]
  own: tuple[Any, ...]  # [N, W] each


def empty_ring(
  *,
  layers: int,
  unrolled: bool,
  rows: int,
  columns: int,
  kv_heads: int,
  head_width: int,
  dtype: Any,
) -> Ring:
  """A ring in which no column belongs to anybody yet."""

  def zeros(*shape: int) -> Any:
    if not unrolled:
      return jnp.zeros((layers, rows, kv_heads, *shape), dtype)
    return tuple(
      jnp.zeros((rows, kv_heads, *shape), dtype) for _ in range(layers)
    )

  return Ring(k=zeros(head_width, columns), v=zeros(columns, head_width))


def empty_cache(
  *,
  layers: int,
  unrolled: bool,
  prompts: int,
  slots: int,
  group_size: int = 1,
  kv_heads: int,
  head_width: int,
  prompt_tokens: int,
  completion_tokens: int,
  dtype: Any,
  shards: int = 1,
) -> KVCache:
  """A cache in which no column belongs to anybody yet.

  Args:
    layers: L.
    unrolled: layers as a tuple; stacked otherwise.
    prompts: P, places for prompts.
    slots: S, all in one ring.
    group_size: G.
    kv_heads: K.
    head_width: Dh.
    prompt_tokens: Tp.
    completion_tokens: columns of the ring.
    dtype: of keys and values.
    shards: parts of the slots and of the prompts that stay apart.
  """
  shape = {
    "layers": layers,
    "unrolled": unrolled,
    "kv_heads": kv_heads,
    "head_width": head_width,
    "dtype": dtype,
  }
  prompt = empty_ring(rows=prompts, columns=prompt_tokens, **shape)
  ring = empty_ring(rows=slots, columns=completion_tokens, **shape)
  return KVCache(
    prompt_k=prompt.k,
    prompt_v=prompt.v,
    prompt_length=jnp.zeros((prompts,), jnp.int32),
    members=jnp.zeros((prompts, group_size), jnp.int32),
    group=jnp.zeros((slots,), jnp.int32),
    member=jnp.zeros((slots,), jnp.int32),
    rings=(ring,),
    length=jnp.zeros((slots,), jnp.int32),
    clock=jnp.zeros((), jnp.int32),
    shards=shards,
  )


def _age(cache: KVCache, ring: Ring) -> Int[Array, " W"]:
  """How many decode steps ago each column of a ring was written."""
  columns = jnp.arange(ring.columns, dtype=jnp.int32)
  return (cache.clock - columns) % ring.columns


def visible(cache: KVCache) -> Seen:
  """Additive float32 masks of a step that has written, before `advance`."""
  columns = jnp.arange(cache.prompt_tokens, dtype=jnp.int32)
  prompt = columns[None] < cache.prompt_length[:, None]
  lengths = split_rows(cache.length, cache.rows, cache.shards)
  own = tuple(
    _age(cache, ring)[None] < (length + 1)[:, None]
    for ring, length in zip(cache.rings, lengths, strict=True)
  )
  return _additive(Seen(prompt[:, None], own))


def _additive(seen: Seen) -> Seen:
  return jax.tree.map(
    lambda x: jnp.where(x, 0.0, MASKED).astype(jnp.float32), seen
  )


def same_chunk(cache: KVCache, positions: Int[Array, " S"], chunk: int) -> Seen:
  """Additive masks of columns outside the chunk of the slot's newest token.

  Args:
    cache: a prompt's column is its position.
    positions: of the tokens that are being read.
    chunk: positions of a chunk.
  """
  prompts, group_size = cache.members.shape
  columns = jnp.arange(cache.prompt_tokens, dtype=jnp.int32)
  asking = _to_members(cache, positions).reshape(prompts, group_size, 1)
  prompt = columns[None, None] // chunk == asking // chunk
  parts = split_rows(positions, cache.rows, cache.shards)
  own = tuple(
    (part[:, None] - _age(cache, ring)[None]) // chunk
    == (part // chunk)[:, None]
    for ring, part in zip(cache.rings, parts, strict=True)
  )
  return _additive(Seen(prompt, own))


def write(
  cache: KVCache,
  layer: Any,
  key: Float[Array, "S K Dh"],
  value: Float[Array, "S K Dh"],
) -> KVCache:
  """One token's key and value of each slot, into this column.

  Args:
    cache: its `clock` says which.
    layer: an index, static where layers are a tuple.
    key: rotated.
    value: as projected.
  """
  zero = jnp.zeros((), jnp.int32)

  def put(part: Any, token: Array, axis: int, column: Array) -> Any:
    index = [zero] * token.ndim
    index[axis] = column
    if isinstance(part, tuple):
      token = token.astype(part[layer].dtype)
      new = jax.lax.dynamic_update_slice(part[layer], token, index)
      return (*part[:layer], new, *part[layer + 1 :])
    token = token[None].astype(part.dtype)
    return jax.lax.dynamic_update_slice(part, token, [layer, *index])

  keys = split_rows(key, cache.rows, cache.shards)
  values = split_rows(value, cache.rows, cache.shards)
  rings = []
  for ring, k, v in zip(cache.rings, keys, values, strict=True):
    column = cache.clock % ring.columns
    rings.append(
      Ring(
        k=put(ring.k, k[..., None], 3, column),
        v=put(ring.v, v[:, :, None, :], 2, column),
      )
    )
  return dataclasses.replace(cache, rings=tuple(rings))


def advance(cache: KVCache) -> KVCache:
  """One step further; each slot owns one column more."""
  widest = max(ring.columns for ring in cache.rings)
  return dataclasses.replace(
    cache,
    length=jnp.minimum(cache.length + 1, widest),
    clock=cache.clock + 1,
  )


def _to_members(
  cache: KVCache, x: Shaped[Array, "S *B"]
) -> Shaped[Array, "PG *B"]:
  """Rows of slots as rows of groups; of any slot where nobody is left."""
  return pick(x, cache.members.reshape(-1), cache.shards)


def _to_slots(
  cache: KVCache, x: Shaped[Array, "PG *B"]
) -> Shaped[Array, "S *B"]:
  """Rows of groups as rows of slots."""
  place = cache.group * cache.members.shape[1] + cache.member
  return pick(x, place, cache.shards)


class _Part(NamedTuple):
  """Attention over some of the keys, before it is divided by its total."""

  out: Array  # [..., Dh], Σ exp(score − top)·value
  top: Array  # [...], largest score
  total: Array  # [...], Σ exp(score − top)


def _attend_part(query: Array, key: Array, value: Array, mask: Array) -> _Part:
  """One set of keys: [n, K, M, Dh], [n, K, Dh, T], [n, K, T, Dh], [n,1,M,T]."""
  scores = jnp.einsum("nkmd,nkdt->nkmt", query, key, **FLOAT32) + mask
  top = scores.max(axis=-1)
  weights = jnp.exp(scores - top[..., None])
  out = jnp.einsum("nkmt,nktd->nkmd", weights, value, **FLOAT32)
  return _Part(out, top, weights.sum(axis=-1))


def attend_cached(
  query: Float[Array, "S H Dh"],
  cache: KVCache,
  layer: Any,
  seen: Seen,
) -> Float[Array, "S H Dh"]:
  """One query a slot against its prompt and its own completion columns.

  A prompt's keys are read once for all slots of its group; the two parts are
  merged by their log-sum-exp.

  Args:
    query: a row a slot.
    cache: has been written to.
    layer: an index, static where layers are a tuple.
    seen: additive masks.
  """
  rows, heads, width = query.shape
  prompts, group_size = cache.members.shape

  def of_layer(part: Any) -> Array:
    if isinstance(part, tuple):
      return part[layer]
    return jax.lax.dynamic_index_in_dim(part, layer, 0, keepdims=False)

  prompt_k, prompt_v = of_layer(cache.prompt_k), of_layer(cache.prompt_v)
  kv_heads = prompt_k.shape[1]
  repeat = heads // kv_heads
  query = query.reshape(rows, kv_heads, repeat, width)
  query = query.astype(jnp.float32) * width**-0.5

  def gathered(x: Array) -> Array:
    """[S, K, R, ...] -> [P, K, G·R, ...]"""
    x = _to_members(cache, x).reshape(prompts, group_size, *x.shape[1:])
    x = jnp.swapaxes(x, 1, 2)
    return x.reshape(prompts, kv_heads, group_size * repeat, *x.shape[4:])

  def spread(x: Array) -> Array:
    """[P, K, G·R, ...] -> [S, K, R, ...]"""
    x = x.reshape(prompts, kv_heads, group_size, repeat, *x.shape[3:])
    x = jnp.swapaxes(x, 1, 2)
    return _to_slots(cache, x.reshape(prompts * group_size, *x.shape[2:]))

  mask = jnp.repeat(seen.prompt, repeat, axis=1)
  if seen.prompt.shape[1] == 1:
    mask = seen.prompt
  shared = _attend_part(gathered(query), prompt_k, prompt_v, mask[:, None])
  shared = jax.tree.map(spread, shared)

  queries = split_rows(query, cache.rows, cache.shards)
  parts = [
    _attend_part(q, of_layer(ring.k), of_layer(ring.v), mask[:, None, None])
    for q, ring, mask in zip(queries, cache.rings, seen.own, strict=True)
  ]
  own = jax.tree.map(lambda *x: join_rows(x, cache.shards), *parts)
  top = jnp.maximum(shared.top, own.top)
  left, right = jnp.exp(shared.top - top), jnp.exp(own.top - top)
  total = left * shared.total + right * own.total
  left, right = left / total, right / total
  out = left[..., None] * shared.out + right[..., None] * own.out
  return out.reshape(rows, heads, width)
