"""Rows in shards: read, written, split and joined as numpy does it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.models.rows import join_rows, pick, put_rows, split_rows

SHARDS = pytest.mark.parametrize("shards", [1, 2, 3])


def _ids(index):
  return jnp.asarray(index, jnp.int32)


def _rows(count, seed=0):
  rng = np.random.default_rng(seed)
  return rng.standard_normal((count, 2, 4)).astype(np.float32)


@SHARDS
def test_rows_are_picked_within_their_shard(shards):
  rng = np.random.default_rng(shards)
  x = _rows(5 * shards)
  shard = np.repeat(np.arange(shards), 7)
  index = shard * 5 + rng.integers(0, 5, 7 * shards)
  found = pick(jnp.asarray(x), _ids(index), shards)
  np.testing.assert_array_equal(found, x[index])
  flat = pick(jnp.asarray(x[:, 0, 0]), _ids(index), shards)
  np.testing.assert_array_equal(flat, x[index, 0, 0])


@SHARDS
def test_rows_are_put_within_their_shard_and_others_dropped(shards):
  x, rows = _rows(5 * shards), _rows(3 * shards, seed=1)
  # Each shard writes its last row and its second; its third row is padding.
  shard = np.arange(shards)[:, None]
  index = np.hstack([shard * 5 + [[4, 1]], np.full((shards, 1), 5 * shards)])
  index = index.reshape(-1)
  found = put_rows(jnp.asarray(x), _ids(index), jnp.asarray(rows), shards)
  expected = x.copy()
  kept = index < 5 * shards
  expected[index[kept]] = rows[kept]
  assert found.dtype == x.dtype
  np.testing.assert_array_equal(found, expected)


@SHARDS
def test_rows_cast_to_what_they_are_put_into(shards):
  x = jnp.zeros((2 * shards, 3), jnp.bfloat16)
  rows = np.full((shards, 3), 1.001, np.float32)
  index = _ids(2 * np.arange(shards))
  found = put_rows(x, index, jnp.asarray(rows), shards)
  assert found.dtype == jnp.bfloat16
  np.testing.assert_array_equal(found[::2], np.ones((shards, 3)))


@SHARDS
@pytest.mark.parametrize("shares", [(5,), (3, 2), (1, 1, 3), (2, 1)])
def test_parts_are_shares_of_each_shard(shards, shares):
  x = _rows(5 * shards)
  sizes = [share * shards for share in shares]
  parts = split_rows(jnp.asarray(x), sizes, shards)
  by_shard = x.reshape(shards, 5, 2, 4)
  first = 0
  for part, share in zip(parts, shares, strict=True):
    expected = by_shard[:, first : first + share].reshape(-1, 2, 4)
    np.testing.assert_array_equal(part, expected)
    first += share
  # Joined again: the shares of a shard stand side by side, none is lost.
  joined = join_rows(parts, shards)
  expected = by_shard[:, :first].reshape(-1, 2, 4)
  np.testing.assert_array_equal(joined, expected)
  again = split_rows(joined, sizes, shards)
  jax.tree.map(np.testing.assert_array_equal, again, parts)
