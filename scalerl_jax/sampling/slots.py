"""What a decoding device remembers: S slots, half-written completions, KV.

Records are a ring too: all slots write the same column in the same decode
step, and `read_slots` turns the columns of chosen slots back into rows.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from scalerl_jax.models.kv_cache import KVCache, Ring
from scalerl_jax.models.rows import join_rows, split_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Thinking:
  """What is remembered of each completion where thinking is interrupted."""

  budget: Any  # int32 [S], tokens after which the phrase is forced
  ended: Any  # int32 [S], completion tokens when thinking ended; 0: it goes on
  forced: Any  # bool [Tc, S], ring, True where the token was not drawn


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class SlotState:
  """S slots; part of `RunState`, donated from chunk to chunk."""

  cache: Any  # KVCache
  keys: Any  # uint32 [S, 2], key data of (run, prompt uid, sample index)
  last: Any  # int32 [S], the newest token, not yet in the cache
  length: Any  # int32 [S], completion tokens so far
  budget: Any  # int32 [S], completion tokens allowed
  active: Any  # bool [S], still writing
  finish: Any  # int32 [S], types.FinishReason
  tokens: Any  # int32 [Tc, S], ring
  logps: Any  # float32 [Tc, S], ring, nats
  versions: Any  # int32 [Tc, S], ring, policy version that drew the token
  start: Any  # int32 [S], ring column of the slot's first token
  thinking: Any  # Thinking; None where nothing is interrupted


def empty_slots(
  cache: KVCache, *, completion_tokens: int, interrupted: bool = False
) -> SlotState:
  """Slots in which nobody writes.

  Args:
    cache: in which no column belongs to anybody.
    completion_tokens: Tc, tokens of a record.
    interrupted: whether thinking is, in these slots.
  """
  slots, tokens = cache.group.shape[0], completion_tokens

  def zeros(*shape: int, dtype: Any = jnp.int32) -> Array:
    return jnp.zeros(shape, dtype)

  return SlotState(
    cache=cache,
    keys=zeros(slots, 2, dtype=jnp.uint32),
    last=zeros(slots),
    length=zeros(slots),
    budget=zeros(slots),
    active=zeros(slots, dtype=bool),
    finish=zeros(slots),
    tokens=zeros(tokens, slots),
    logps=zeros(tokens, slots, dtype=jnp.float32),
    versions=zeros(tokens, slots),
    start=zeros(slots),
    thinking=Thinking(
      budget=zeros(slots),
      ended=zeros(slots),
      forced=zeros(tokens, slots, dtype=bool),
    )
    if interrupted
    else None,
  )


def logical_axes(state: SlotState) -> SlotState:
  """Logical axis names of every array, as `models.sharding` reads them.

  Args:
    state: arrays or their shapes.
  """
  cache: KVCache = state.cache
  slot, ring = ("batch",), (None, "batch")
  # Prompts stay with their group's slots where slots are kept apart.
  prompt = "batch" if cache.shards > 1 else None

  def columns(part: Any, rows: str | None) -> Any:
    if isinstance(part, tuple):
      return tuple((rows, "kv_heads", None, None) for _ in part)
    return (None, rows, "kv_heads", None, None)

  return SlotState(
    cache=KVCache(
      prompt_k=columns(cache.prompt_k, prompt),
      prompt_v=columns(cache.prompt_v, prompt),
      prompt_length=(prompt,),
      members=(prompt, None),
      group=slot,
      member=slot,
      rings=tuple(
        Ring(k=columns(r.k, "batch"), v=columns(r.v, "batch"))
        for r in cache.rings
      ),
      length=slot,
      clock=(),
      shards=cache.shards,
    ),
    keys=("batch", None),
    last=slot,
    length=slot,
    budget=slot,
    active=slot,
    finish=slot,
    tokens=ring,
    logps=ring,
    versions=ring,
    start=slot,
    thinking=None
    if state.thinking is None
    else Thinking(budget=slot, ended=slot, forced=ring),
  )


def map_slots(
  function: Callable[..., Array], state: SlotState, *others: SlotState
) -> SlotState:
  """`function(array, *arrays of the others, slot axis)` on every array a slot
  has a part of; rings, prompts and the clock are those of `state`.
  """
  names = logical_axes(state)

  def own(state: SlotState) -> dict[str, Any]:
    fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    cache = fields.pop("cache")
    fields["cache"] = {
      name: getattr(cache, name) for name in ("group", "member", "length")
    }
    return fields

  def one(axes: tuple, *arrays: Array) -> Array:
    return function(*arrays, axes.index("batch"))

  found = jax.tree.map(
    one,
    own(names),
    own(state),
    *map(own, others),
    is_leaf=lambda x: isinstance(x, tuple),
  )
  cache = dataclasses.replace(state.cache, **found.pop("cache"))
  return SlotState(cache=cache, **found)


def without_rings(state: SlotState) -> SlotState:
  """What an insertion changes, whatever the plan of the rings."""
  cache = dataclasses.replace(state.cache, rings=())
  return dataclasses.replace(state, cache=cache)


def decoding_slots(state: SlotState) -> SlotState:
  """The slots that are in a ring; those after them do not decode."""
  cache: KVCache = state.cache
  rows, slots, shards = sum(cache.rows), len(cache.group), cache.shards
  if rows == slots:
    return state

  def cut(array: Array, axis: int) -> Array:
    rows_first = jnp.moveaxis(array, axis, 0)
    return jnp.moveaxis(split_rows(rows_first, [rows], shards)[0], 0, axis)

  part = map_slots(cut, state)
  share, kept = slots // shards, rows // shards
  shard, local = cache.members // share, cache.members % share
  # A member that has ended may be outside: any row does.
  members = shard * kept + jnp.minimum(local, kept - 1)
  return dataclasses.replace(
    part, cache=dataclasses.replace(part.cache, members=members)
  )


def put_back(state: SlotState, decoded: SlotState) -> SlotState:
  """`state` with what its `decoding_slots` have become."""
  cache: KVCache = state.cache
  rows, slots, shards = sum(cache.rows), len(cache.group), cache.shards
  if rows == slots:
    return decoded

  def put(array: Array, new: Array, axis: int) -> Array:
    old = jnp.moveaxis(array, axis, 0)
    parts = split_rows(old, [rows, slots - rows], shards)
    joined = join_rows([jnp.moveaxis(new, axis, 0), parts[1]], shards)
    return jnp.moveaxis(joined, 0, axis)

  whole = map_slots(put, state, decoded)
  held: KVCache = decoded.cache
  return dataclasses.replace(
    whole,
    cache=dataclasses.replace(whole.cache, rings=held.rings, clock=held.clock),
  )


def record(
  ring: Shaped[Array, "Tc S"],
  column: Int[Array, ""],
  values: Shaped[Array, " S"],
  where: Bool[Array, " S"],
) -> Shaped[Array, "Tc S"]:
  """One column of a record ring, written where `where` holds."""
  old = jax.lax.dynamic_index_in_dim(ring, column, 0, keepdims=False)
  new = jnp.where(where, values.astype(ring.dtype), old)
  return jax.lax.dynamic_update_index_in_dim(ring, new, column, 0)


@jax.jit
def read_slots(state: SlotState, slots: Int[Array, " N"]) -> dict[str, Array]:
  """Records of N slots as rows `[N, Tc]`, first token first.

  Columns past a slot's length hold 0, and nothing is forced there.
  """
  budget = state.tokens.shape[0]
  column = jnp.arange(budget, dtype=jnp.int32)[None]
  ring = (state.start[slots][:, None] + column) % budget
  length = state.length[slots]
  written = column < length[:, None]

  def rows(record: Array) -> Array:
    return jnp.where(written, record[ring, slots[:, None]], 0)

  thinking: Thinking | None = state.thinking
  none_forced = jnp.zeros(written.shape, bool)

  return {
    "tokens": rows(state.tokens),
    "behavior_logps": rows(state.logps),
    "versions": rows(state.versions),
    "forced": none_forced
    if thinking is None
    else written & thinking.forced[ring, slots[:, None]],
    "length": length,
    "finish": state.finish[slots],
  }
