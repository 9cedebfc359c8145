"""Several completions in one row of the forward pass, and back again.

Only the forward pass knows of it: log-probs return to `[B, T]`, a completion
a row, before any loss, so losses, weights and filters stay as they are.
"""

import dataclasses

import numpy as np
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from scalerl_jax.objectives.filters import zero_variance_keep
from scalerl_jax.types import Batch, Packed


def first_fit(lengths: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
  """Rows of `width` tokens, the longest first, each where it fits first.

  Deterministic, and at most 11/9 of the fewest rows that would do, and one.

  Args:
    lengths: tokens of each, int `[N]`; 0 takes no place.
    width: tokens of a row.

  Returns:
    Row (−1 for a length of 0) and first column of each, int32 `[N]`.

  Raises:
    ValueError: a length above the width.

  Example:
    >>> row, start = first_fit(np.array([3, 0, 4, 2]), 6)
    >>> row.tolist(), start.tolist()
    ([1, -1, 0, 0], [0, 0, 0, 4])

  Reference:
    Johnson et al., 1974, SIAM Journal on Computing 3(4): first-fit decreasing.
  """
  if lengths.size and lengths.max() > width:
    raise ValueError(
      f"batch.packing must be at least the {lengths.max()} tokens of the"
      f" longest row, got {width}"
    )
  row = np.full(lengths.shape, -1, np.int32)
  start = np.zeros(lengths.shape, np.int32)
  free = np.full(lengths.shape, width)  # a row each is the worst that can be
  for item in np.argsort(-lengths, kind="stable"):
    if length := lengths[item]:
      place = np.argmax(free >= length)
      row[item], start[item] = place, width - free[place]
      free[place] -= length
  return row, start


def trained_rows(
  mask: Bool[Array, "B T"],
  correct: Int[Array, " B"],
  *,
  group_size: int,
  drop: bool,
) -> Bool[Array, " B"]:
  """True on completions that a step learns from.

  Args:
    mask: True on sampled tokens that count.
    correct: 0/1.
    group_size: G.
    drop: whether groups that are all right or all wrong are left out.
  """
  keep = mask.any(axis=1)
  if drop:
    keep &= zero_variance_keep(correct, group_size=group_size, counted=keep)
  return keep


def pack(batch: Batch, keep: np.ndarray, width: int) -> Batch:
  """The batch with its kept completions side by side in rows, on the host.

  Here and not in the compiled step: first-fit is a sequence of decisions, the
  filter's answer is known, and what it dropped need not be moved at all.

  Args:
    batch: numpy arrays, B rows.
    keep: bool `[B]`, completions that are learnt from.
    width: W, tokens of a packed row.

  Returns:
    `batch` with `packed`: B rows, since as many may be needed; those in use
    come first.
  """
  rows = len(keep)
  present = (batch.segment_ids != 0) & keep[:, None]
  lengths = present.sum(axis=1)
  row, start = first_fit(lengths, width)
  tokens = np.zeros((rows, width), np.int32)
  segment_ids = np.zeros((rows, width), np.int32)
  used = np.zeros(rows, np.int32)  # completions of a row so far
  for item in np.flatnonzero(row >= 0):
    place = row[item], slice(start[item], start[item] + lengths[item])
    used[row[item]] += 1
    tokens[place] = batch.tokens[item, present[item]]
    segment_ids[place] = used[row[item]]
  return dataclasses.replace(
    batch,
    packed=Packed(tokens=tokens, segment_ids=segment_ids, row=row, start=start),
  )


def unpack(
  values: tuple[Float[Array, "R W"], ...],
  packed: Packed,
  *,
  first: Int[Array, ""],
  length: int,
) -> tuple[tuple[Float[Array, "B T"], ...], Bool[Array, " B"]]:
  """Per-token values of some packed rows, a completion a row again.

  Args:
    values: of the packed rows `first` .. `first` + R − 1.
    packed: where each completion stands.
    first: the first of these rows.
    length: T.

  Returns:
    `[B, T]` each, and True on the completions that stand in these rows. What
    is not theirs holds 0, and so does position 0, before which nothing is;
    padding holds anything finite.
  """
  rows, width = values[0].shape
  row = packed.row - first
  here = (packed.row >= 0) & (row >= 0) & (row < rows)
  place = jnp.arange(length, dtype=jnp.int32)[None]
  column = jnp.minimum(packed.start[:, None] + place, width - 1)
  index = jnp.clip(row, 0, rows - 1)[:, None] * width + column
  there = here[:, None] & (place > 0)
  return tuple(
    jnp.where(there, jnp.take(x.reshape(-1), index, axis=0), 0.0)
    for x in values
  ), here
