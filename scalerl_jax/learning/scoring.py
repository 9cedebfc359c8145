"""Log-probs of the tokens of a batch, in either layout of its rows."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from scalerl_jax.models.policy import Policy
from scalerl_jax.objectives.logprobs import (
  entropy,
  score_in_chunks,
  token_logps,
  warp_logits,
)
from scalerl_jax.types import Batch

CUT_LOGP = -1e4  # nats

Warp = tuple[tuple[str, Any], ...]  # keywords of `warp_logits`


def _score(
  policy: Policy, hidden: Array, tokens: Array, warp: Warp, chunk: int
) -> tuple[Array, ...]:
  """log π of tokens `[R, T]` given the states before them, and entropies."""

  def score(hidden: Array, tokens: Array) -> tuple[Array, Array]:
    logits = warp_logits(policy.head(hidden), **dict(warp))
    logps = token_logps(logits, tokens)
    # A token that today's top-k or top-p would cut has log π = −inf; floored,
    # it keeps a ratio of e⁻²⁰ and no gradient, where −inf would end the run.
    logps = jnp.maximum(logps, CUT_LOGP)
    return logps, entropy(jax.lax.stop_gradient(logits))

  return score_in_chunks(score, hidden, tokens, chunk=chunk)


def row_logps(
  policy: Policy,
  tokens: Int[Array, "R T"],
  segment_ids: Int[Array, "R T"],
  warp: Warp,
  *,
  chunk: int = 0,
) -> tuple[Float[Array, "R T"], Float[Array, "R T"]]:
  """log π of each token given those before it, and the entropy it was drawn
  from, under the distribution that the sampler draws from.

  Args:
    policy: its hidden states and its head.
    tokens: rows of one segment or several.
    segment_ids: 0 on padding.
    warp: keywords of `warp_logits`.
    chunk: tokens that have logits at the same time; 0: all.

  Returns:
    `[R, T]` each, nats; position 0 holds 0, padding and the first token of a
    segment hold anything finite.
  """
  hidden = policy.hidden(tokens, None, segment_ids)
  logps, spread = _score(policy, hidden[:, :-1], tokens[:, 1:], warp, chunk)
  shift = ((0, 0), (1, 0))
  return jnp.pad(logps, shift), jnp.pad(spread, shift)


def completion_logps(
  policy: Policy,
  batch: Batch,
  warp: Warp,
  *,
  chunk: int = 0,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  """`row_logps` of a batch with a row a completion."""
  return row_logps(policy, batch.tokens, batch.segment_ids, warp, chunk=chunk)


def group_logps(
  policy: Policy,
  batch: Batch,
  warp: Warp,
  *,
  group_size: int,
  prompt: int,
  width: int,
  chunk: int = 0,
) -> tuple[Float[Array, "R T"], Float[Array, "R T"]]:
  """`completion_logps` with the prompt of a group computed once, not G times.

  The same numbers but for rounding. Only completions get logits.

  Args:
    policy: its hidden states and its head.
    batch: whole groups, with `prompt_length`, each 1 or more.
    warp: keywords of `warp_logits`.
    group_size: G.
    prompt: Tp, columns that hold any prompt.
    width: columns that hold any completion.
    chunk: tokens that have logits at the same time; 0: all.

  Returns:
    `[R, T]` each, nats; 0 on prompts, anything finite on padding.
  """
  rows, length = batch.tokens.shape
  groups = rows // group_size
  first = batch.prompt_length[:, None]  # column of a completion's first token
  place = first + jnp.arange(width, dtype=jnp.int32)[None]
  completions = jnp.take_along_axis(
    batch.tokens, jnp.minimum(place, length - 1), axis=1
  )
  prompts = batch.tokens[::group_size, :prompt]
  prompt_length = batch.prompt_length[::group_size]
  asked, written = policy.hidden_of_groups(
    prompts, prompt_length, completions.reshape(groups, group_size, width)
  )
  # A first token is drawn from the last state of its prompt.
  last = jnp.take_along_axis(asked, prompt_length[:, None, None] - 1, axis=1)
  last = jnp.broadcast_to(last[:, None], (groups, group_size, *last.shape[1:]))
  before = jnp.concatenate([last, written[:, :, :-1]], axis=2)
  scores = _score(
    policy, before.reshape(rows, width, -1), completions, warp, chunk
  )
  column = jnp.arange(length, dtype=jnp.int32)[None] - first
  index = jnp.clip(column, 0, width - 1)
  logps, spread = (
    jnp.where(column < 0, 0.0, jnp.take_along_axis(x, index, axis=1))
    for x in scores
  )
  return logps, spread
