"""The two programs of the decode side: prefill new groups, decode a chunk.

Pure functions of (parameters, version, state): jitted once for each shape,
whatever the version. No buffer of `[slots, length, vocabulary]` exists.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, UInt32

from scalerl_jax.models.kv_cache import KVCache
from scalerl_jax.models.policy import Policy
from scalerl_jax.models.rows import pick, put_rows
from scalerl_jax.objectives.logprobs import warp_logits
from scalerl_jax.sampling import distribution
from scalerl_jax.sampling.interruption import (
  Interruption,
  answer_budget,
  first_ends,
  interrupt,
  thinking_budgets,
)
from scalerl_jax.sampling.slots import (
  SlotState,
  Thinking,
  decoding_slots,
  put_back,
  record,
)
from scalerl_jax.types import FinishReason


@dataclasses.dataclass(frozen=True)
class DecodeSettings:
  """What a compiled decode program depends on besides shapes."""

  policy: Any  # nnx.GraphDef of the policy
  warp: tuple[tuple[str, Any], ...]  # keywords of `warp_logits`
  eos_ids: tuple[int, ...]
  group_size: int
  chunk: int  # C, decode steps of a chunk at most
  interruption: Interruption | None = None  # of thinking


def warped(
  policy: Policy, hidden: Float[Array, "S D"], settings: DecodeSettings
) -> Float[Array, "S V"]:
  """Logits of the distribution really sampled from."""
  return warp_logits(policy.head(hidden), **dict(settings.warp))


def finish_reason(
  tokens: Int[Array, " S"],
  length: Int[Array, " S"],
  budget: Int[Array, " S"],
  eos_ids: tuple[int, ...],
) -> Int[Array, " S"]:
  """Whether a completion ended with its newest token, and why."""
  ends = jnp.isin(tokens, jnp.asarray(eos_ids, jnp.int32))
  spent = jnp.where(length >= budget, FinishReason.BUDGET, FinishReason.RUNNING)
  return jnp.where(ends, FinishReason.EOS, spent).astype(jnp.int32)


def decode_chunk(
  params: nnx.State,
  version: Int[Array, ""],
  state: SlotState,
  *,
  settings: DecodeSettings,
) -> tuple[SlotState, Int[Array, "2"]]:
  """At most C tokens more in each active slot; ends early when none is.

  Args:
    params: of the policy version `version`.
    version: recorded with every token of the chunk.
    state: donated.
    settings: static.

  Returns:
    The new state, and (decode steps run, tokens drawn or forced) of the chunk.
  """
  policy: Policy = nnx.merge(settings.policy, params)

  def more(carry: tuple) -> Array:
    step, state = carry
    # Devices that share the slots would have to meet at each step to know
    # that nobody is left; they only do before the first.
    left = state.active.any() if shards == 1 else True
    return (step < limit) & left

  def step(carry: tuple) -> tuple:
    steps, state = carry
    cache: KVCache = state.cache
    column = cache.clock % state.tokens.shape[0]
    position = prompt_length + state.length - 1
    hidden, cache = policy.decode(state.last, position, cache, shared)
    uniforms = distribution.token_uniforms(state.keys, state.length)
    token, logp = distribution.draw(warped(policy, hidden, settings), uniforms)
    active, budget, thinking = state.active, state.budget, state.thinking
    if settings.interruption is not None:
      token, logp, thinking = interrupt(
        state, column, token, logp, settings.interruption
      )
      budget = answer_budget(budget, thinking.ended, settings.interruption)
    length = state.length + active
    finish = finish_reason(token, length, budget, settings.eos_ids)
    finish = jnp.where(active, finish, state.finish)
    state = dataclasses.replace(
      state,
      cache=cache,
      last=jnp.where(active, token, state.last),
      length=length,
      budget=budget,
      finish=finish,
      active=active & (finish == FinishReason.RUNNING),
      tokens=record(state.tokens, column, token, active),
      logps=record(state.logps, column, logp, active),
      versions=record(
        state.versions, column, jnp.broadcast_to(version, token.shape), active
      ),
      thinking=thinking,
    )
    return steps + 1, state

  begun = decoding_slots(state)
  held: KVCache = begun.cache
  shards = held.shards
  prompt_length = pick(held.prompt_length, held.group, shards)
  columns = held.prompt_tokens + state.tokens.shape[0]
  shared = policy.prepare(columns)
  left = jnp.where(begun.active, begun.budget - begun.length, 0)
  limit = jnp.minimum(left.max(), settings.chunk)
  zero = jnp.zeros((), jnp.int32)
  steps, decoded = jax.lax.while_loop(more, step, (zero, begun))
  drawn = (decoded.length - begun.length).sum(dtype=jnp.int32)
  return put_back(state, decoded), jnp.stack([steps, drawn])


def insert_groups(
  params: nnx.State,
  version: Int[Array, ""],
  state: SlotState,
  run_key: UInt32[Array, "2"],
  prompts: Int[Array, "P Tp"],
  prompt_lengths: Int[Array, " P"],
  uids: Int[Array, " P"],
  first_samples: Int[Array, " P"],
  budgets: Int[Array, " P"],
  places: Int[Array, " P"],
  members: Int[Array, "P G"],
  source: Int[Array, " S"],
  *,
  settings: DecodeSettings,
) -> SlotState:
  """Prefills P prompts once each and starts G completions of every one.

  Draws the first token of each completion from the prompt's last position, so
  no completion begins with a decode step of its own.

  Args:
    params: of the policy version `version`.
    version: recorded with the first tokens.
    state: donated.
    run_key: key data.
    prompts: right-padded, to any width up to the cache's.
    prompt_lengths: 1 or more; rows of padding have any.
    uids: of the prompts.
    first_samples: sample index of each group's first completion.
    budgets: completion tokens allowed.
    places: prompt place of each; out of range for rows of padding. Prompts,
      places and slots come in `cache.shards` equal parts: a prompt stays in
      its part.
    members: slots of each group, first row first.
    source: for each slot the completion (row of P·G) that enters, or −1.
    settings: static.
  """
  policy: Policy = nnx.merge(settings.policy, params)
  group_size = settings.group_size
  columns = jnp.arange(prompts.shape[1], dtype=jnp.int32)[None]
  segment_ids = (columns < prompt_lengths[:, None]).astype(jnp.int32)
  hidden, key, value = policy.prefill(prompts, segment_ids)
  newest = jnp.take_along_axis(
    hidden, (prompt_lengths - 1)[:, None, None], axis=1
  )[:, 0]
  logits = jnp.repeat(warped(policy, newest, settings), group_size, axis=0)

  def each(values: Array) -> Array:
    return jnp.repeat(values, group_size)

  member = jnp.tile(jnp.arange(group_size, dtype=jnp.int32), prompts.shape[0])
  keys = distribution.sample_keys(
    run_key, each(uids), each(first_samples) + member
  )
  first = jnp.zeros(member.shape, jnp.int32)
  token, logp = distribution.draw(
    logits, distribution.token_uniforms(keys, first)
  )
  budget = each(budgets)
  if settings.interruption is not None:
    ended = first_ends(token, settings.interruption)
    budget = answer_budget(budget, ended, settings.interruption)
  finish = finish_reason(token, first + 1, budget, settings.eos_ids)

  cache: KVCache = state.cache
  thinking, shards = state.thinking, cache.shards
  enters = source >= 0
  # A slot that nobody enters reads any row of its own part.
  part = jnp.arange(len(source), dtype=jnp.int32) * shards // len(source)
  row = jnp.where(enters, source, part * (len(member) // shards))

  def enter(values: Array, old: Array) -> Array:
    picked = pick(values, row, shards)
    where = enters.reshape(-1, *[1] * (old.ndim - 1))
    return jnp.where(where, picked.astype(old.dtype), old)

  def put(old: Any, new: Array, axis: int) -> Any:
    """Layers in a tuple, or in one array; short prompts are filled up."""
    missing = [(0, 0)] * new.ndim
    missing[axis] = (0, cache.prompt_tokens - new.shape[axis])
    new = jnp.pad(new, missing)
    if isinstance(old, tuple):
      layers = zip(old, new, strict=True)
      return tuple(put_rows(x, places, rows, shards) for x, rows in layers)
    held = [jnp.moveaxis(x, 1, 0) for x in (old, new)]
    return jnp.moveaxis(put_rows(held[0], places, held[1], shards), 0, 1)

  before = (cache.clock - 1) % state.tokens.shape[0]
  cache = dataclasses.replace(
    cache,
    prompt_k=put(cache.prompt_k, key, 4),
    prompt_v=put(cache.prompt_v, value, 3),
    prompt_length=put_rows(cache.prompt_length, places, prompt_lengths, shards),
    members=put_rows(cache.members, places, members, shards),
    group=enter(each(places), cache.group),
    member=enter(member, cache.member),
    length=jnp.where(enters, 0, cache.length),
  )
  if settings.interruption is not None:
    allowed = thinking_budgets(keys, settings.interruption)
    thinking = Thinking(
      budget=enter(allowed, thinking.budget),
      ended=enter(ended, thinking.ended),
      forced=record(
        thinking.forced, before, jnp.zeros(enters.shape, bool), enters
      ),
    )
  return dataclasses.replace(
    state,
    cache=cache,
    keys=enter(keys, state.keys),
    last=enter(token, state.last),
    length=jnp.where(enters, 1, state.length),
    budget=enter(budget, state.budget),
    active=enter(finish == FinishReason.RUNNING, state.active),
    finish=enter(finish, state.finish),
    tokens=record(state.tokens, before, pick(token, row, shards), enters),
    logps=record(state.logps, before, pick(logp, row, shards), enters),
    versions=record(
      state.versions, before, jnp.broadcast_to(version, enters.shape), enters
    ),
    start=jnp.where(enters, before, state.start),
    thinking=thinking,
  )
