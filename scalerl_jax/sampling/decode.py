"""The two programs of the decode side: prefill new groups, decode a chunk.

Pure functions of (parameters, version, state): jitted once for each shape,
whatever the version. No buffer of `[slots, length, vocabulary]` exists.
"""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, UInt32

from scalerl_jax.models import kv_cache
from scalerl_jax.models.policy import Policy
from scalerl_jax.objectives.logprobs import warp_logits
from scalerl_jax.sampling import distribution
from scalerl_jax.sampling.interruption import (
  Interruption,
  answer_budget,
  first_ends,
  interrupt,
  thinking_budgets,
)
from scalerl_jax.sampling.slots import SlotState, Thinking, record
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
  held = state.cache
  opened = kv_cache.open_cache(held, unrolled=policy.unrolled)

  def more(carry: tuple) -> Array:
    step, _, state = carry
    return (step < settings.chunk) & state.active.any()

  def step(carry: tuple) -> tuple:
    steps, drawn, state = carry
    cache = state.cache
    column = cache.cursor
    position = cache.prompt_length + state.length - 1
    hidden, cache = policy.decode_opened(state.last, position, cache)
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
    return steps + 1, drawn + active.sum(dtype=jnp.int32), state

  zero = jnp.zeros((), jnp.int32)
  carry = (zero, zero, dataclasses.replace(state, cache=opened))
  steps, drawn, state = jax.lax.while_loop(more, step, carry)
  opened = cast(kv_cache.OpenCache, state.cache)
  state = dataclasses.replace(state, cache=kv_cache.close_cache(held, opened))
  return state, jnp.stack([steps, drawn])


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
    prompts: right-padded.
    prompt_lengths: 1 or more; rows of padding have any.
    uids: of the prompts.
    first_samples: sample index of each group's first completion.
    budgets: completion tokens allowed.
    places: prompt place of each; out of range for rows of padding.
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

  enters = source >= 0
  row = jnp.maximum(source, 0)

  def enter(values: Array, old: Array) -> Array:
    picked = jnp.take(values, row, axis=0)
    where = enters.reshape(-1, *[1] * (old.ndim - 1))
    return jnp.where(where, picked.astype(old.dtype), old)

  cache, thinking = state.cache, state.thinking
  before = (cache.cursor - 1) % state.tokens.shape[0]
  cache = dataclasses.replace(
    cache,
    prompt_k=cache.prompt_k.at[:, places].set(key, mode="drop"),
    prompt_v=cache.prompt_v.at[:, places].set(value, mode="drop"),
    prompt_length=cache.prompt_length.at[places].set(
      prompt_lengths, mode="drop"
    ),
    group=enter(each(places), cache.group),
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
    tokens=record(state.tokens, before, jnp.take(token, row), enters),
    logps=record(state.logps, before, jnp.take(logp, row), enters),
    versions=record(
      state.versions, before, jnp.broadcast_to(version, enters.shape), enters
    ),
    start=jnp.where(enters, before, state.start),
    thinking=thinking,
  )
