"""What a decoding device remembers: S slots, half-written completions, KV.

Records are rings like the cache's: all slots write the same column in the same
decode step, and `read_slots` turns the columns of chosen slots back into rows.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from scalerl_jax.models.kv_cache import KVCache


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


def empty_slots(cache: KVCache) -> SlotState:
  """Slots in which nobody writes."""
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
  )


def logical_axes() -> SlotState:
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
  )


@jax.jit
def read_slots(state: SlotState, slots: Int[Array, " N"]) -> dict[str, Array]:
  """Records of N slots as rows `[N, Tc]`, first token first.

  Columns past a slot's length hold 0.
  """
  budget = state.tokens.shape[0]
  column = jnp.arange(budget, dtype=jnp.int32)[None]
  ring = (state.start[slots][:, None] + column) % budget
  length = state.length[slots]
  written = column < length[:, None]

  def rows(record: Array) -> Array:
    return jnp.where(written, record[ring, slots[:, None]], 0)

  return {
    "tokens": rows(state.tokens),
    "behavior_logps": rows(state.logps),
    "versions": rows(state.versions),
    "length": length,
    "finish": state.finish[slots],
  }
