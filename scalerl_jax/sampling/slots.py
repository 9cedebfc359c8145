"""What a decoding device remembers: S slots, half-written completions, KV.

Records are rings like the cache's: all slots write the same column in the same
decode step, and `read_slots` turns the columns of chosen slots back into rows.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from scalerl_jax.models.kv_cache import KVCache


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

  cache: Any  # KVCache; OpenCache inside a decode loop
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


def empty_slots(cache: KVCache, *, interrupted: bool = False) -> SlotState:
  """Slots in which nobody writes.

  Args:
    cache: in which no column belongs to anybody.
    interrupted: whether thinking is, in these slots.
  """
  slots, tokens = cache.group.shape[0], cache.k.shape[-1]

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


def logical_axes(*, interrupted: bool = False) -> SlotState:
  """Logical axis names of every array, as `models.sharding` reads them."""
  slot, ring = ("batch",), (None, "batch")
  prompt = (None, None, "kv_heads", None, None)
  completion = (None, "batch", "kv_heads", None, None)
  return SlotState(
    cache=KVCache(
      prompt_k=prompt,
      prompt_v=prompt,
      prompt_length=(None,),
      group=slot,
      k=completion,
      v=completion,
      length=slot,
      cursor=(),
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
    thinking=Thinking(budget=slot, ended=slot, forced=ring)
    if interrupted
    else None,
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
