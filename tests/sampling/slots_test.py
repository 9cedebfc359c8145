"""Slots: what a decoding device remembers, and how it is read back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.models import kv_cache
from scalerl_jax.sampling import slots

S, TC = 5, 7


def _empty(*, interrupted=False):
  return slots.empty_slots(
    kv_cache.empty_cache(
      layers=2,
      prompts=3,
      slots=S,
      kv_heads=2,
      head_width=4,
      prompt_tokens=6,
      completion_tokens=TC,
      dtype=jnp.float32,
    ),
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


@pytest.mark.parametrize("interrupted", [False, True])
def test_every_array_has_a_name_for_each_axis(interrupted):
  state = _empty(interrupted=interrupted)
  names = slots.logical_axes(interrupted=interrupted)
  named = jax.tree.map(lambda x, axes: x.ndim == len(axes), state, names)
  assert all(jax.tree.leaves(named))
  # Whatever has an axis of slots is cut along it.
  cut = jax.tree.map(
    lambda x, axes: ("batch" in axes) == (S in x.shape),
    state,
    names,
  )
  assert all(jax.tree.leaves(cut))


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
