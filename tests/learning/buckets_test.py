"""Micro-batches of several widths: each kept row once, in one that holds it."""

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from scalerl_jax.learning.buckets import (
  Bucket,
  fill_buckets,
  layout,
  make_buckets,
  row_lengths,
)


@hypothesis.given(
  width=st.integers(1, 40),
  count=st.integers(1, 9),
  micro_batch=st.integers(1, 5),
  pieces=st.integers(1, 7),
  group_size=st.integers(1, 4),
  prompt=st.integers(0, 40),
)
@hypothesis.settings(max_examples=200)
def test_widths_reach_the_full_one_and_rows_keep_the_budget(
  width, count, micro_batch, pieces, group_size, prompt
):
  rows = micro_batch * pieces
  made = make_buckets(
    width,
    count,
    micro_batch=micro_batch,
    rows=rows,
    group_size=group_size,
    prompt=prompt,
  )
  widths = [bucket.width for bucket in made]
  assert widths[0] == width
  assert made[0].rows == micro_batch
  assert widths == sorted(set(widths), reverse=True)
  assert 1 <= len(made) <= count
  # A row is cut to less than a step above its own length.
  steps = np.diff([0, *reversed(widths)])
  assert steps.max() <= -(-width // count)
  budget = micro_batch * (prompt + group_size * width)
  for bucket in made:
    assert (bucket.group_size, bucket.prompt) == (group_size, prompt)
    assert bucket.rows % micro_batch == 0
    assert bucket.rows <= rows
    own = prompt + group_size * bucket.width
    assert bucket.tokens == bucket.rows * own <= budget
    more = (bucket.rows + micro_batch) * own
    assert more > budget or bucket.rows == rows


def test_groups_count_their_prompt_in_the_budget_of_tokens():
  # The quickstart's: 1,016 positions at most, so 8 groups of 5 tokens, not 12.
  made = layout(
    rows=768,
    prompt=14,
    completion=15,
    micro_batch=64,
    width_buckets=3,
    shared=16,
  )
  assert [tuple(bucket) for bucket in made] == [
    (15, 4, 16, 14),
    (10, 4, 16, 14),
    (5, 8, 16, 14),
  ]
  assert [bucket.tokens for bucket in made] == [1016, 696, 752]


def test_one_bucket_is_the_full_width():
  assert make_buckets(29, 1, micro_batch=64, rows=768) == (Bucket(29, 64),)


def _by_hand(lengths, keep, buckets):
  """Rows of each micro-batch with its width, one row at a time."""
  waiting = [row for row, kept in enumerate(keep) if kept]
  bucket_of = {
    row: max(n for n, b in enumerate(buckets) if b.width >= lengths[row])
    for row in waiting
  }
  waiting.sort(key=lambda row: (bucket_of[row], row))
  runs = []
  for number, bucket in enumerate(buckets):
    while waiting and bucket_of[waiting[0]] <= number:
      runs.append((bucket.width, waiting[: bucket.rows]))
      waiting = waiting[bucket.rows :]
  assert not waiting
  return runs


@hypothesis.given(
  rows=st.lists(
    st.tuples(st.integers(1, 13), st.booleans()), min_size=24, max_size=24
  ),
  count=st.sampled_from([1, 3, 5]),
  micro_batch=st.sampled_from([2, 6]),
)
@hypothesis.settings(max_examples=40)
def test_each_kept_row_is_in_one_micro_batch_that_holds_it(
  rows, count, micro_batch
):
  lengths, keep = (np.array(column) for column in zip(*rows, strict=True))
  buckets = make_buckets(13, count, micro_batch=micro_batch, rows=24)
  order, counts = fill_buckets(jnp.asarray(lengths), jnp.asarray(keep), buckets)
  runs, first = [], 0
  for bucket, number in zip(buckets, map(int, counts), strict=True):
    for _ in range(number):
      last = first + bucket.rows
      # Where the loop slices: never moved back because the end is near.
      assert last <= len(order)
      shown = [row for n, row in enumerate(order[first:last], first)]
      runs.append((bucket.width, shown[: max(keep.sum() - first, 0)]))
      first = last
  expected = _by_hand(lengths, keep, buckets)
  assert [(w, [int(r) for r in shown]) for w, shown in runs] == expected


def test_nothing_kept_is_nothing_to_run():
  buckets = make_buckets(5, 2, micro_batch=3, rows=6)
  lengths = jnp.arange(6)
  _, counts = fill_buckets(lengths, jnp.zeros(6, bool), buckets)
  assert [int(count) for count in counts] == [0, 0]


@pytest.mark.parametrize(
  ("row", "length"),
  [([1, 1, 0, 0], 2), ([0, 0, 0, 0], 0), ([1, 1, 2, 2], 4), ([0, 1, 0, 0], 2)],
)
def test_a_row_ends_with_its_last_token(row, length):
  assert row_lengths(jnp.array([row])).tolist() == [length]
