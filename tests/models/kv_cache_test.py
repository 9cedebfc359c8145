"""The cache: a ring of completion columns, prompts shared by a group."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.models import kv_cache
from tests.reference import transformer as reference

L, P, S, K, H, DH, TP, TC = 2, 3, 5, 2, 6, 4, 7, 8
LENGTHS = np.array([0, 3, 8, 5, 1], np.int32)
PROMPT_LENGTHS = np.array([2, 7, 4], np.int32)
GROUP = np.array([1, 0, 2, 2, 1], np.int32)


def _cache(cursor=0, seed=0):
  """Random content, also in the columns that belong to nobody."""
  rng = np.random.default_rng(seed)

  def normal(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)

  return kv_cache.KVCache(
    prompt_k=normal(L, P, K, DH, TP),
    prompt_v=normal(L, P, K, TP, DH),
    prompt_length=jnp.asarray(PROMPT_LENGTHS),
    group=jnp.asarray(GROUP),
    k=normal(L, S, K, DH, TC),
    v=normal(L, S, K, TC, DH),
    length=jnp.asarray(LENGTHS),
    cursor=jnp.int32(cursor),
  )


def _own(cursor, length):
  """Columns of a slot's newest `length` tokens, the cursor's included."""
  return [(cursor - age) % TC for age in range(min(length + 1, TC))]


def test_an_empty_cache_holds_nobodys_columns():
  cache = kv_cache.empty_cache(
    layers=L,
    prompts=P,
    slots=S,
    kv_heads=K,
    head_width=DH,
    prompt_tokens=TP,
    completion_tokens=TC,
    dtype=jnp.bfloat16,
  )
  like = _cache()
  for field in dataclasses.fields(kv_cache.KVCache):
    array = getattr(cache, field.name)
    assert array.shape == getattr(like, field.name).shape
    assert not np.asarray(array, np.float32).any()
  assert cache.k.dtype == cache.prompt_v.dtype == jnp.bfloat16


LAYOUTS = pytest.mark.parametrize(
  "unrolled", [True, False], ids=["unrolled", "scanned"]
)


def _open(cursor=0, *, unrolled=True):
  return kv_cache.open_cache(_cache(cursor), unrolled=unrolled)


@LAYOUTS
def test_an_open_cache_holds_each_slots_prompt_beside_its_completion(unrolled):
  cache, opened = _cache(5), _open(5, unrolled=unrolled)
  assert isinstance(opened.k, tuple) == unrolled
  assert opened.prompt_tokens == TP
  assert opened.completion_tokens == TC
  for layer in range(L):
    for s, group in enumerate(GROUP):
      k, v = opened.k[layer][s], opened.v[layer][s]
      np.testing.assert_array_equal(k[..., :TP], cache.prompt_k[layer, group])
      np.testing.assert_array_equal(v[:, :TP], cache.prompt_v[layer, group])
      np.testing.assert_array_equal(k[..., TP:], cache.k[layer, s])
      np.testing.assert_array_equal(v[:, TP:], cache.v[layer, s])
      assert opened.prompt_length[s] == PROMPT_LENGTHS[group]


@LAYOUTS
def test_closing_gives_back_the_completions_and_keeps_the_prompts(unrolled):
  cache = _cache(5)
  opened = kv_cache.advance(_open(5, unrolled=unrolled))
  opened = jax.tree.map(lambda x: x + 1, opened)
  closed = kv_cache.close_cache(cache, opened)
  expected = dataclasses.replace(
    cache,
    k=cache.k + 1,
    v=cache.v + 1,
    length=jnp.minimum(cache.length + 1, TC) + 1,
    cursor=jnp.int32(7),
  )
  jax.tree.map(np.testing.assert_array_equal, closed, expected)


@pytest.mark.parametrize("cursor", range(TC))
def test_a_slot_sees_its_prompt_and_its_own_columns_of_the_ring(cursor):
  mask = kv_cache.visible(_open(cursor))
  for s in range(S):
    seen = np.arange(TP) < PROMPT_LENGTHS[GROUP[s]]
    np.testing.assert_array_equal(mask[s, :TP] == 0.0, seen)
    seen = np.isin(np.arange(TC), _own(cursor, LENGTHS[s]))
    np.testing.assert_array_equal(mask[s, TP:] == 0.0, seen)
  assert mask.dtype == jnp.float32
  assert set(np.unique(mask)) == {np.float32(-1e30), np.float32(0.0)}


@pytest.mark.parametrize("cursor", range(TC))
def test_a_chunk_is_told_by_positions_of_prompt_and_ring(cursor):
  positions = PROMPT_LENGTHS[GROUP] + LENGTHS
  same = kv_cache.same_chunk(_open(cursor), jnp.asarray(positions), 4)
  for slot, newest in enumerate(positions):
    for column in range(TP):
      assert bool(same[slot, column]) == (column // 4 == newest // 4)
    for age, column in enumerate(_own(cursor, LENGTHS[slot])):
      found = bool(same[slot, TP + column])
      assert found == ((newest - age) // 4 == newest // 4)


@LAYOUTS
@pytest.mark.parametrize(("layer", "cursor"), [(0, 0), (1, 5), (1, TC - 1)])
def test_a_write_touches_one_column_of_one_layer(layer, cursor, unrolled):
  cache = _open(cursor, unrolled=unrolled)
  key = jnp.full((S, K, DH), 7.0)
  written = kv_cache.write(cache, layer, key, 2.0 * key)
  k, v = (np.stack([np.array(x) for x in part]) for part in (cache.k, cache.v))
  k[layer, ..., TP + cursor] = 7.0
  v[layer, :, :, TP + cursor, :] = 14.0
  for actual, expected in ((written.k, k), (written.v, v)):
    np.testing.assert_array_equal(np.stack(actual), expected)


def test_a_ring_wraps_and_a_slot_owns_no_more_than_it():
  cache = kv_cache.advance(_open(TC - 1))
  assert int(cache.cursor) == 0
  np.testing.assert_array_equal(cache.length, [1, 4, 8, 6, 2])


@jax.jit
def _attend(cache, query):
  return kv_cache.attend_cached(query, cache, 1, kv_cache.visible(cache))


def _query():
  rng = np.random.default_rng(9)
  return jnp.asarray(rng.standard_normal((S, H, DH)), jnp.float32)


@LAYOUTS
@pytest.mark.parametrize("cursor", [0, 4, TC - 1])
def test_cached_attention_equals_the_scalar_loop(cursor, unrolled):
  cache, query = _cache(cursor), _query()
  actual = _attend(_open(cursor, unrolled=unrolled), query)
  prompt_k, prompt_v, k, v = (
    np.asarray(part[1], np.float64)
    for part in (cache.prompt_k, cache.prompt_v, cache.k, cache.v)
  )
  for s, group in enumerate(GROUP):
    columns, own = PROMPT_LENGTHS[group], _own(cursor, LENGTHS[s])
    for h in range(H):
      kv = h // (H // K)
      keys = [*prompt_k[group, kv].T[:columns], *k[s, kv].T[own]]
      values = [*prompt_v[group, kv, :columns], *v[s, kv][own]]
      expected = reference.attend(
        np.asarray(query, np.float64)[s, h], keys, values
      )
      np.testing.assert_allclose(actual[s, h], expected, rtol=1e-5, atol=1e-5)


def test_what_belongs_to_nobody_is_never_read():
  cursor = 3
  cache, query = _open(cursor, unrolled=False), _query()
  before = _attend(cache, query)
  k, v = np.array(cache.k), np.array(cache.v)
  for s, group in enumerate(GROUP):
    own = [TP + column for column in _own(cursor, LENGTHS[s])]
    seen = [*range(PROMPT_LENGTHS[group]), *own]
    others = np.setdiff1d(np.arange(TP + TC), seen)
    k[:, s, :, :, others] = 1e6
    v[:, s, :, others, :] = -1e6
  dirty = dataclasses.replace(cache, k=jnp.asarray(k), v=jnp.asarray(v))
  np.testing.assert_array_equal(_attend(dirty, query), before)
