"""Who sees whom in whole rows of tokens, in either layout of a batch."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from scalerl_jax.models import attention

# Of queries, keys and values of a layer; its first argument says whether the
# layer rotates, since one that does may see a chunk of positions only.
Attend = Callable[[bool, Array, Array, Array], Array]


def attention_mask(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
  """True where query t may see key u: u ≤ t, same segment, not padding (0)."""
  length = segment_ids.shape[1]
  causal = jnp.tril(jnp.ones((length, length), bool))
  same = segment_ids[:, :, None] == segment_ids[:, None, :]
  return same & (segment_ids[:, None, :] != 0) & causal[None]


def chunk_mask(
  query: Int[Array, "*B t"], key: Int[Array, "*B u"], chunk: int
) -> Bool[Array, "*B t u"]:
  """True where query and key lie in the same chunk of positions."""
  return (query // chunk)[..., :, None] == (key // chunk)[..., None, :]


def among_rows(
  segment_ids: Int[Array, "B T"],
  positions: Int[Array, "B T"],
  *,
  chunk: int,
  kernel: str = "einsum",
) -> Attend:
  """Attention in rows of segments.

  Args:
    segment_ids: 0 on padding; tokens see only their own segment.
    positions: within the segment.
    chunk: positions that layers which rotate see together; 0: all.
    kernel: `model.attention`.
  """
  mask = near = attention_mask(segment_ids)
  if chunk:
    near = mask & chunk_mask(positions, positions, chunk)

  def attend(rotates: bool, query: Array, key: Array, value: Array) -> Array:
    sees = near if rotates else mask
    return attention.attend(query, key, value, sees, kernel=kernel)

  return attend


def _later(prompt_length: Array, length: int) -> Array:
  """Positions of completions, `[P, length]`."""
  return prompt_length[:, None] + jnp.arange(length, dtype=jnp.int32)[None]


def group_positions(
  prompt_length: Int[Array, " P"], *, prompt: int, group: int, length: int
) -> Int[Array, "P T"]:
  """Positions in rows of a group: its prompt, then its completions, each of
  which goes on where the prompt ends.

  Args:
    prompt_length: tokens of each prompt.
    prompt: columns of a prompt.
    group: completions.
    length: columns of a completion.
  """
  first = jnp.arange(prompt, dtype=jnp.int32)
  first = jnp.broadcast_to(first, (len(prompt_length), prompt))
  later = _later(prompt_length, length)
  return jnp.concatenate([first, jnp.tile(later, (1, group))], axis=1)


def within_groups(
  prompt_length: Int[Array, " P"],
  *,
  prompt: int,
  group: int,
  length: int,
  chunk: int,
  kernel: str = "einsum",
) -> Attend:
  """Attention in rows of a group: completions see its prompt and themselves.

  Args:
    prompt_length: tokens of each prompt.
    prompt: columns of a prompt.
    group: completions.
    length: columns of a completion; what follows its tokens is seen by none.
    chunk: positions that layers which rotate see together; 0: all.
    kernel: `model.attention`.
  """
  count = len(prompt_length)
  own = jnp.arange(prompt, dtype=jnp.int32)[None]
  inside = own < prompt_length[:, None]
  own = jnp.broadcast_to(own, inside.shape)
  later = _later(prompt_length, length)

  def masks(near: bool) -> tuple[Array, Array, Array]:
    among = attention_mask(inside.astype(jnp.int32))
    before = inside[:, None, None]
    after = jnp.tril(jnp.ones((1, 1, length, length), bool))
    if near:
      among &= chunk_mask(own, own, chunk)
      before = before & chunk_mask(later, own, chunk)[:, None]
      after = after & chunk_mask(later, later, chunk)[:, None]
    return among, before, after

  far, near = masks(False), masks(bool(chunk))

  def attend(rotates: bool, query: Array, key: Array, value: Array) -> Array:
    among, before, after = near if rotates else far

    def apart(x: Array) -> tuple[Array, Array]:
      written = x[:, prompt:].reshape(count, group, length, *x.shape[2:])
      return x[:, :prompt], written

    (q, queries), (k, keys), (v, values) = map(apart, (query, key, value))
    held = attention.Before(k, v, before)
    mixed = attention.attend_groups(
      queries, keys, values, after, held, kernel=kernel
    )
    mixed = mixed.reshape(count, group * length, *query.shape[2:])
    asked = attention.attend(q, k, v, among, kernel=kernel)
    return jnp.concatenate([asked, mixed], axis=1)

  return attend
