"""The cache: rings of completion columns, prompts shared by a group."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.models import kv_cache
from tests.reference import transformer as reference

L, K, H, DH, TP = 2, 2, 6, 4, 7


class Form(NamedTuple):
  """Shape of a cache: everything divisible by `shards`."""

  rings: tuple  # (slots, columns) of each
  prompts: int
  group_size: int
  shards: int = 1
  unrolled: bool = True

  @property
  def slots(self):
    return sum(rows for rows, _ in self.rings)

  def places(self):
    """(ring, its row, its columns) of each slot, shard by shard."""
    return [
      (number, shard * (rows // self.shards) + row, columns)
      for shard in range(self.shards)
      for number, (rows, columns) in enumerate(self.rings)
      for row in range(rows // self.shards)
    ]


FORMS = {
  "groups": Form(((5, 8),), prompts=4, group_size=3, unrolled=False),
  "rings": Form(((3, 4), (2, 8)), prompts=3, group_size=2),
  "shards": Form(((8, 3), (4, 5), (2, 9)), prompts=6, group_size=5, shards=2),
  "stacked_shards": Form(
    ((6, 4), (2, 9)), prompts=4, group_size=3, shards=2, unrolled=False
  ),
}
EVERY_FORM = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
CLOCKS = (0, 23)


def _cache(form, clock=0):
  """Random content, also in the columns that belong to nobody.

  Some members of most groups have left, and others sit in their slots.
  """
  rng = np.random.default_rng(form.slots)

  def normal(*shape):
    layers = [
      jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(L)
    ]
    return tuple(layers) if form.unrolled else jnp.stack(layers)

  prompts, size, shards = form.prompts, form.group_size, form.shards
  share, held = form.slots // shards, prompts // shards
  members = np.zeros((shards, held * size), np.int32)
  taken = np.zeros((shards, share), np.int32)
  for shard in range(shards):
    taken[shard] = rng.permutation(held * size)[:share]
    members[shard] = rng.integers(share, size=held * size)
    members[shard, taken[shard]] = np.arange(share)
  first = np.arange(shards)[:, None]
  columns = np.array([columns for *_, columns in form.places()])
  return kv_cache.KVCache(
    prompt_k=normal(prompts, K, DH, TP),
    prompt_v=normal(prompts, K, TP, DH),
    prompt_length=jnp.asarray(rng.integers(1, TP + 1, prompts), jnp.int32),
    members=jnp.asarray((members + first * share).reshape(prompts, size)),
    group=jnp.asarray((taken // size + first * held).reshape(-1)),
    member=jnp.asarray((taken % size).reshape(-1)),
    rings=tuple(
      kv_cache.Ring(k=normal(n, K, DH, w), v=normal(n, K, w, DH))
      for n, w in form.rings
    ),
    length=jnp.asarray(rng.integers(0, columns + 1), jnp.int32),
    clock=jnp.int32(clock),
    shards=shards,
  )


def _own(clock, length, columns):
  """Columns of a slot's newest `length` tokens, newest first, and this one."""
  return [(clock - age) % columns for age in range(min(length + 1, columns))]


def _slots(form, cache):
  """(slot, prompt, member, ring, row, own columns) of each slot."""
  for slot, (ring, row, columns) in enumerate(form.places()):
    own = _own(int(cache.clock), int(cache.length[slot]), columns)
    yield slot, int(cache.group[slot]), int(cache.member[slot]), ring, row, own


def _positions(cache):
  return cache.prompt_length[cache.group] + cache.length


@EVERY_FORM
def test_an_empty_cache_holds_nobodys_columns(form):
  cache = kv_cache.empty_cache(
    layers=L,
    unrolled=form.unrolled,
    prompts=form.prompts,
    slots=form.slots,
    group_size=form.group_size,
    kv_heads=K,
    head_width=DH,
    prompt_tokens=TP,
    completion_tokens=9,
    dtype=jnp.bfloat16,
    shards=form.shards,
  )
  like = _cache(form._replace(rings=((form.slots, 9),)))

  def check(empty, other):
    assert empty.shape == other.shape
    assert not np.asarray(empty, np.float32).any()

  jax.tree.map(check, cache, like)
  parts = (cache.prompt_k, cache.prompt_v, cache.rings[0].k, cache.rings[0].v)
  assert {x.dtype for x in jax.tree.leaves(parts)} == {jnp.dtype(jnp.bfloat16)}
  assert cache.rows == (form.slots,)
  assert (cache.prompt_tokens, cache.rings[0].columns) == (TP, 9)


@EVERY_FORM
@pytest.mark.parametrize("clock", CLOCKS)
def test_a_slot_sees_its_prompt_and_its_own_columns_of_the_ring(form, clock):
  cache = _cache(form, clock)
  seen = kv_cache.visible(cache)
  for slot, prompt, _, ring, row, own in _slots(form, cache):
    columns = np.arange(TP) < cache.prompt_length[prompt]
    np.testing.assert_array_equal(seen.prompt[prompt, 0] == 0.0, columns, slot)
    mask = seen.own[ring][row]
    np.testing.assert_array_equal(
      mask == 0.0, np.isin(np.arange(len(mask)), own), slot
    )
  for mask in jax.tree.leaves(seen):
    assert mask.dtype == jnp.float32
    assert set(np.unique(mask)) <= {np.float32(-1e30), np.float32(0.0)}


@EVERY_FORM
@pytest.mark.parametrize("clock", CLOCKS)
def test_a_chunk_is_told_by_positions_of_prompt_and_ring(form, clock):
  cache = _cache(form, clock)
  positions = _positions(cache)
  same = kv_cache.same_chunk(cache, positions, 4)
  for slot, prompt, member, ring, row, own in _slots(form, cache):
    newest = int(positions[slot])
    for column in range(TP):
      found = same.prompt[prompt, member, column] == 0.0
      assert found == (column // 4 == newest // 4)
    for age, column in enumerate(own):
      found = same.own[ring][row, column] == 0.0
      assert found == ((newest - age) // 4 == newest // 4)


@EVERY_FORM
@pytest.mark.parametrize(("layer", "clock"), [(0, 0), (1, 5), (1, 23)])
def test_a_write_touches_one_column_of_one_layer(form, layer, clock):
  cache = _cache(form, clock)
  rng = np.random.default_rng(1)
  key, value = rng.standard_normal((2, form.slots, K, DH)).astype(np.float32)
  written = kv_cache.write(cache, layer, jnp.asarray(key), jnp.asarray(value))
  rings = [
    [np.stack([np.array(x) for x in part]) for part in (ring.k, ring.v)]
    for ring in cache.rings
  ]
  for slot, (ring, row, columns) in enumerate(form.places()):
    k, v = rings[ring]
    k[layer, row, :, :, clock % columns] = key[slot]
    v[layer, row, :, clock % columns] = value[slot]
  for ring, (k, v) in zip(written.rings, rings, strict=True):
    np.testing.assert_array_equal(np.stack(ring.k), k)
    np.testing.assert_array_equal(np.stack(ring.v), v)
  kept = dataclasses.replace(written, rings=cache.rings)
  jax.tree.map(np.testing.assert_array_equal, kept, cache)


@EVERY_FORM
def test_a_slot_owns_one_column_more_and_no_more_than_the_widest_ring(form):
  cache = _cache(form, 23)
  later = kv_cache.advance(cache)
  assert int(later.clock) == 24
  widest = max(columns for _, columns in form.rings)
  expected = [min(length + 1, widest) for length in cache.length.tolist()]
  assert later.length.tolist() == expected
  assert later.rings == cache.rings


@jax.jit
def _attend(cache, query):
  return kv_cache.attend_cached(query, cache, 1, kv_cache.visible(cache))


@jax.jit
def _attend_near(cache, query):
  near = kv_cache.same_chunk(cache, _positions(cache), 4)
  seen = jax.tree.map(jnp.minimum, kv_cache.visible(cache), near)
  return kv_cache.attend_cached(query, cache, 1, seen)


def _query(form):
  rng = np.random.default_rng(9)
  return jnp.asarray(rng.standard_normal((form.slots, H, DH)), jnp.float32)


@EVERY_FORM
@pytest.mark.parametrize("clock", CLOCKS)
def test_cached_attention_equals_the_scalar_loop(form, clock):
  cache, query = _cache(form, clock), _query(form)
  whole, near = _attend(cache, query), _attend_near(cache, query)
  query, prompt_k, prompt_v = (
    np.asarray(x, np.float64)
    for x in (query, cache.prompt_k[1], cache.prompt_v[1])
  )
  for slot, prompt, _, ring, row, own in _slots(form, cache):
    k, v = (
      np.asarray(part[1], np.float64)[row]
      for part in (cache.rings[ring].k, cache.rings[ring].v)
    )
    newest = int(_positions(cache)[slot])
    length = int(cache.prompt_length[prompt])
    places = np.array([*range(length), *(newest - np.arange(len(own)))])
    close = places // 4 == newest // 4
    for h in range(H):
      kv = h // (H // K)
      keys = np.array([*prompt_k[prompt, kv].T[:length], *k[kv].T[own]])
      values = np.array([*prompt_v[prompt, kv, :length], *v[kv][own]])
      for found, kept in ((whole, places >= 0), (near, close)):
        expected = reference.attend(query[slot, h], keys[kept], values[kept])
        np.testing.assert_allclose(
          found[slot, h], expected, rtol=1e-5, atol=1e-5
        )


@EVERY_FORM
def test_what_belongs_to_nobody_is_never_read(form):
  cache, query = _cache(form, 23), _query(form)
  prompt_k, prompt_v = (
    np.stack([np.array(x) for x in part])
    for part in (cache.prompt_k, cache.prompt_v)
  )
  for prompt, length in enumerate(cache.prompt_length.tolist()):
    prompt_k[:, prompt, ..., length:] = 1e6
    prompt_v[:, prompt, :, length:] = -1e6
  rings = [
    [np.stack([np.array(x) for x in part]) for part in (ring.k, ring.v)]
    for ring in cache.rings
  ]
  for *_, ring, row, own in _slots(form, cache):
    k, v = rings[ring]
    others = np.setdiff1d(np.arange(k.shape[-1]), own)
    k[:, row, :, :, others] = 1e6
    v[:, row, :, others] = -1e6

  def held(part):
    layers = [jnp.asarray(x) for x in part]
    return tuple(layers) if form.unrolled else jnp.stack(layers)

  dirty = dataclasses.replace(
    cache,
    prompt_k=held(prompt_k),
    prompt_v=held(prompt_v),
    rings=tuple(kv_cache.Ring(k=held(k), v=held(v)) for k, v in rings),
  )
  for attend in (_attend, _attend_near):
    np.testing.assert_array_equal(attend(dirty, query), attend(cache, query))
