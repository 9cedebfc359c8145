"""Rows of like length in micro-batches of their own width, compiled once.

A micro-batch has a budget of tokens: `batch.micro_batch` rows of full width,
or more rows of a smaller one. How many of each width a batch needs is data.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from scalerl_jax.models.attention import pairs


class Bucket(NamedTuple):
  """One shape of micro-batch: of rows, or of groups behind their prompts."""

  width: int  # tokens of a row; of a completion where prompts are apart
  rows: int  # rows of a micro-batch, or groups
  group_size: int = 1  # completions of a group
  prompt: int = 0  # tokens of a prompt that a group shares; 0: in the row

  @property
  def tokens(self) -> int:
    """Positions that a micro-batch computes, padding included."""
    return self.rows * (self.prompt + self.group_size * self.width)

  @property
  def logits(self) -> int:
    """Positions that get logits: without prompts apart all but a row's last."""
    width = self.width if self.prompt else self.width - 1
    return self.rows * self.group_size * width

  @property
  def keys(self) -> int:
    """Keys that all these positions are multiplied with, masked ones too."""
    own = pairs(self.width) + self.width * self.prompt
    return self.rows * (pairs(self.prompt) + self.group_size * own)


def make_buckets(
  width: int,
  count: int,
  *,
  micro_batch: int,
  rows: int,
  group_size: int = 1,
  prompt: int = 0,
) -> tuple[Bucket, ...]:
  """Micro-batches of up to `count` evenly spaced widths, the widest first.

  Each holds as many whole multiples of `micro_batch` rows as its width leaves
  room for, in tokens of the widest, and at most the batch's rows.

  Args:
    width: T, tokens of a full row.
    count: N; widths are ⌈T·i / N⌉, i = N .. 1, equal ones once.
    micro_batch: rows of full width that are computed together.
    rows: B, a multiple of `micro_batch`.
    group_size, prompt: as in `Bucket`; rows are groups then.

  Returns:
    Strictly narrower from one to the next.

  Example:
    >>> [bucket[:2] for bucket in make_buckets(10, 3, micro_batch=2, rows=12)]
    [(10, 2), (7, 2), (4, 4)]
  """
  widths = sorted({-(-width * i // count) for i in range(1, count + 1)})
  full = Bucket(width, micro_batch, group_size, prompt)

  def bucket(width: int) -> Bucket:
    narrow = full._replace(width=width)
    times = min(full.tokens // narrow.tokens, rows // micro_batch)
    return narrow._replace(rows=micro_batch * times)

  return tuple(bucket(width) for width in reversed(widths))


def layout(
  *,
  rows: int,
  prompt: int,
  completion: int,
  micro_batch: int,
  width_buckets: int = 1,
  packing: int = 0,
  shared: int = 0,
) -> tuple[Bucket, ...]:
  """The shapes of micro-batch of a step, the widest first.

  Args:
    rows: B, completions of a step.
    prompt: Tp, columns that hold any prompt.
    completion: Tc, columns that hold any completion.
    micro_batch: completions of full width that are computed together.
    width_buckets: widths of rows, or of completions behind a shared prompt.
    packing: tokens of a row that completions share; 0: a row each.
    shared: completions whose prompt is computed once; 0: each has its own.
  """
  if packing:
    return (Bucket(packing, micro_batch),)
  if not shared:
    return make_buckets(
      prompt + completion, width_buckets, micro_batch=micro_batch, rows=rows
    )
  return make_buckets(
    completion,
    width_buckets,
    micro_batch=micro_batch // shared,
    rows=rows // shared,
    group_size=shared,
    prompt=prompt,
  )


def row_lengths(segment_ids: Int[Array, "B T"]) -> Int[Array, " B"]:
  """Tokens of each row up to its last one; 0 for a row of padding alone."""
  place = jnp.arange(1, segment_ids.shape[1] + 1, dtype=jnp.int32)
  return jnp.max(jnp.where(segment_ids != 0, place, 0), axis=1)


def fill_buckets(
  lengths: Int[Array, " B"],
  keep: Bool[Array, " B"],
  buckets: tuple[Bucket, ...],
) -> tuple[Int[Array, " M"], tuple[Int[Array, ""], ...]]:
  """Which rows go where: the widest first, its last micro-batch filled up
  with narrower ones.

  Args:
    lengths: tokens of each row.
    keep: rows that are computed at all.
    buckets: from `layout`; the first one is as wide as the longest row kept.

  Returns:
    Row numbers, kept ones first and wide before narrow, each in the batch's
    order, then what is not computed, padded with 0 so that a micro-batch may
    begin at any kept row; and how many micro-batches of each bucket run, one
    after the other along these numbers.
  """
  narrow = jnp.stack([lengths <= bucket.width for bucket in buckets])
  bucket = narrow.sum(axis=0, dtype=jnp.int32) - 1  # the narrowest that holds
  bucket = jnp.where(keep, bucket, len(buckets))
  order = jnp.argsort(bucket, stable=True)
  counts, first = [], jnp.int32(0)
  for number, bucket_shape in enumerate(buckets):
    rows = bucket_shape.rows
    end = (bucket <= number).sum(dtype=jnp.int32)
    count = jnp.maximum(end - first + rows - 1, 0) // rows
    counts.append(count)
    first += count * rows
  longest = max(bucket.rows for bucket in buckets)
  return jnp.pad(order, (0, longest)), tuple(counts)
