"""Slots: what a decoding device remembers, and how it is read back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.models import kv_cache
from scalerl_jax.sampling import slots

S, P, TC = 5, 3, 7


def _empty(*, interrupted=False, shards=1, unrolled=True):
  return slots.empty_slots(
    kv_cache.empty_cache(
      layers=2,
      unrolled=unrolled,
      prompts=P * shards,
      slots=S * shards,
      kv_heads=2,
      head_width=4,
      prompt_tokens=8,
      completion_tokens=TC + 2,
      dtype=jnp.float32,
      shards=shards,
    ),
    completion_tokens=TC,
    interrupted=interrupted,
  )


def test_nobody_writes_in_empty_slots():
  state = _empty()
  assert not state.active.any()
  assert not state.length.any()
  assert state.tokens.shape == state.logps.shape == state.versions.shape
  assert state.tokens.shape == (TC, S)
  assert state.keys.dtype == jnp.uint32
  assert state.logps.dtype == jnp.float32
  assert state.thinking is None
  thinking = _empty(interrupted=True).thinking
  assert not any(x.any() for x in jax.tree.leaves(thinking))
  assert thinking.forced.shape == (TC, S)


@pytest.mark.parametrize(
  ("interrupted", "shards", "unrolled"),
  [(False, 1, True), (True, 1, False), (True, 2, True), (False, 2, False)],
)
def test_every_array_has_a_name_for_each_axis(interrupted, shards, unrolled):
  state = _empty(interrupted=interrupted, shards=shards, unrolled=unrolled)
  names = slots.logical_axes(state)
  # Whatever has an axis of slots is cut along it, and prompts with them.
  cut = {S * shards} | ({P * shards} if shards > 1 else set())

  def check(x, axes):
    assert x.ndim == len(axes)
    assert ("batch" in axes) == bool(cut & set(x.shape))
    if "batch" in axes:
      assert x.shape[axes.index("batch")] in cut

  jax.tree.map(check, state, names)


def _random(shards):
  """Slots in two rings that leave two of each five out, random content."""
  rng = np.random.default_rng(shards)
  state = _empty(interrupted=True, shards=shards)
  ring = state.cache.rings[0]
  rings = tuple(
    jax.tree.map(lambda x, rows=rows: x[: rows * shards], ring)
    for rows in (1, 2)
  )
  state = dataclasses.replace(
    state, cache=dataclasses.replace(state.cache, rings=rings)
  )

  def fill(x):
    return jnp.asarray(
      rng.integers(0, 2 if x.dtype == bool else 99, x.shape), x.dtype
    )

  state = jax.tree.map(fill, state)
  members = np.arange(P * shards) // P * S + rng.integers(0, S, P * shards)
  cache = dataclasses.replace(
    state.cache, members=jnp.asarray(members[:, None], jnp.int32)
  )
  return dataclasses.replace(state, cache=cache)


def _by_slot(state):
  """Every array that a slot has a part of, slots first, on the host."""
  found = []

  def keep(x, axis):
    found.append(np.moveaxis(np.asarray(x), axis, 0))
    return x

  slots.map_slots(keep, state)
  return found


@pytest.mark.parametrize("shards", [1, 3])
def test_slots_of_no_ring_are_left_out_of_a_chunk_and_stay(shards):
  state = _random(shards)
  inside = np.array([n for n in range(S * shards) if n % S < 3])
  outside = np.setdiff1d(np.arange(S * shards), inside)
  part = jax.jit(slots.decoding_slots)(state)
  whole, kept = _by_slot(state), _by_slot(part)
  assert len(whole) == 16
  for array, cut in zip(whole, kept, strict=True):
    np.testing.assert_array_equal(cut, array[inside])
  for new, old in zip(
    part.cache.members.tolist(), state.cache.members.tolist(), strict=True
  ):
    # Those outside have ended; whoever stands for them is of the same shard.
    assert new[0] // 3 == old[0] // S
    assert old[0] in outside or inside[new[0]] == old[0]

  # What has become of them is put back, and nothing else.
  became = jax.tree.map(lambda x: ~x if x.dtype == bool else x + 1, part)
  after = jax.jit(slots.put_back)(state, became)
  for array, new, found in zip(
    whole, _by_slot(became), _by_slot(after), strict=True
  ):
    expected = array.copy()
    expected[inside] = new
    np.testing.assert_array_equal(found, expected)
  for name, source in (
    *(("rings", became), ("clock", became)),
    *((name, state) for name in ("members", "prompt_length", "prompt_v")),
  ):
    jax.tree.map(
      np.testing.assert_array_equal,
      getattr(after.cache, name),
      getattr(source.cache, name),
    )


def test_slots_that_are_all_in_rings_are_the_state_itself():
  state = _empty()
  assert slots.decoding_slots(state) is state
  other = _empty()
  assert slots.put_back(state, other) is other


def test_a_state_without_rings_has_the_rest():
  state = _random(2)
  bare = slots.without_rings(state)
  assert bare.cache.rings == ()
  cache = dataclasses.replace(bare.cache, rings=state.cache.rings)
  jax.tree.map(
    np.testing.assert_array_equal,
    dataclasses.replace(bare, cache=cache),
    state,
  )


def test_a_column_of_the_records_is_written_where_it_is_said():
  rng = np.random.default_rng(0)
  ring = rng.integers(0, 50, (TC, S)).astype(np.int32)
  values = np.arange(100, 100 + S, dtype=np.int32)
  where = rng.random(S) < 0.5
  assert 0 < where.sum() < S
  written = slots.record(
    jnp.asarray(ring), jnp.int32(3), jnp.asarray(values), jnp.asarray(where)
  )
  ring[3, where] = values[where]
  np.testing.assert_array_equal(written, ring)


@pytest.mark.parametrize("interrupted", [False, True])
def test_records_are_read_back_as_rows_from_their_first_token(interrupted):
  rng = np.random.default_rng(0)
  length = np.array([0, 3, 7, 1, 5], np.int32)
  start = np.array([2, 5, 4, 6, 0], np.int32)
  forced = interrupted & (rng.random((TC, S)) < 0.5)
  state = _empty(interrupted=interrupted)
  if interrupted:
    thinking = dataclasses.replace(state.thinking, forced=jnp.asarray(forced))
    state = dataclasses.replace(state, thinking=thinking)
  state = dataclasses.replace(
    state,
    tokens=jnp.asarray(rng.integers(1, 50, (TC, S)), jnp.int32),
    logps=jnp.asarray(-rng.random((TC, S)), jnp.float32),
    versions=jnp.asarray(rng.integers(1, 9, (TC, S)), jnp.int32),
    length=jnp.asarray(length),
    start=jnp.asarray(start),
    finish=jnp.arange(S, dtype=jnp.int32),
  )
  chosen = np.array([4, 1, 2, 0, 3, 1], np.int32)
  records = slots.read_slots(state, chosen)
  np.testing.assert_array_equal(records["length"], length[chosen])
  np.testing.assert_array_equal(records["finish"], chosen)
  for name, ring in (
    ("tokens", state.tokens),
    ("behavior_logps", state.logps),
    ("versions", state.versions),
    ("forced", forced),
  ):
    assert records[name].shape == (len(chosen), TC)
    assert records[name].dtype == ring.dtype
    for row, slot in zip(records[name], chosen, strict=True):
      expected = [
        ring[(start[slot] + place) % TC, slot] if place < length[slot] else 0
        for place in range(TC)
      ]
      np.testing.assert_array_equal(row, expected)
