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


@pytest.mark.parametrize("cursor", range(TC))
def test_a_slot_sees_its_prompt_and_its_own_columns_of_the_ring(cursor):
  prompt, completion = kv_cache.visible(_cache(cursor))
  for s in range(S):
    seen = np.arange(TP) < PROMPT_LENGTHS[GROUP[s]]
    np.testing.assert_array_equal(prompt[s] == 0.0, seen)
    seen = np.isin(np.arange(TC), _own(cursor, LENGTHS[s]))
    np.testing.assert_array_equal(completion[s] == 0.0, seen)
  for mask in (prompt, completion):
    assert mask.dtype == jnp.float32
    assert set(np.unique(mask)) == {np.float32(-1e30), np.float32(0.0)}


@pytest.mark.parametrize(("layer", "cursor"), [(0, 0), (1, 5), (1, TC - 1)])
def test_a_write_touches_one_column_of_one_layer(layer, cursor):
  cache = _cache(cursor)
  key = jnp.full((S, K, DH), 7.0)
  written = kv_cache.write(cache, jnp.int32(layer), key, 2.0 * key)
  k, v = np.array(cache.k), np.array(cache.v)
  k[layer, ..., cursor] = 7.0
  v[layer, :, :, cursor, :] = 14.0
  np.testing.assert_array_equal(written.k, k)
  np.testing.assert_array_equal(written.v, v)


def test_a_ring_wraps_and_a_slot_owns_no_more_than_it():
  cache = kv_cache.advance(_cache(TC - 1))
  assert int(cache.cursor) == 0
  np.testing.assert_array_equal(cache.length, [1, 4, 8, 6, 2])


@jax.jit
def _attend(cache, query):
  masks = kv_cache.visible(cache)
  return kv_cache.attend_cached(query, cache, jnp.int32(1), masks)


def _query():
  rng = np.random.default_rng(9)
  return jnp.asarray(rng.standard_normal((S, H, DH)), jnp.float32)


@pytest.mark.parametrize("cursor", [0, 4, TC - 1])
def test_cached_attention_equals_the_scalar_loop(cursor):
  cache, query = _cache(cursor), _query()
  actual = _attend(cache, query)
  for s in range(S):
    columns, own = PROMPT_LENGTHS[GROUP[s]], _own(cursor, LENGTHS[s])
    for h in range(H):
      kv = h // (H // K)
      keys = [
        *np.asarray(cache.prompt_k, np.float64)[1, GROUP[s], kv].T[:columns],
        *np.asarray(cache.k, np.float64)[1, s, kv].T[own],
      ]
      values = [
        *np.asarray(cache.prompt_v, np.float64)[1, GROUP[s], kv, :columns],
        *np.asarray(cache.v, np.float64)[1, s, kv][own],
      ]
      expected = reference.attend(
        np.asarray(query, np.float64)[s, h], keys, values
      )
      np.testing.assert_allclose(actual[s, h], expected, rtol=1e-5, atol=1e-5)


def test_a_prompt_of_ones_own_equals_a_shared_one():
  cache, query = _cache(3), _query()
  spread = kv_cache.spread_prompts(cache)
  assert spread.prompt_k.shape == (L, S, K, DH, TP)
  np.testing.assert_array_equal(spread.group, np.arange(S))
  np.testing.assert_allclose(
    _attend(spread, query), _attend(cache, query), rtol=1e-6, atol=1e-6
  )


def test_what_belongs_to_nobody_is_never_read():
  cursor = 3
  cache, query = _cache(cursor), _query()
  before = _attend(cache, query)
  k, v = np.array(cache.k), np.array(cache.v)
  prompt_k, prompt_v = np.array(cache.prompt_k), np.array(cache.prompt_v)
  for s in range(S):
    others = np.setdiff1d(np.arange(TC), _own(cursor, LENGTHS[s]))
    k[:, s, :, :, others] = 1e6
    v[:, s, :, others, :] = -1e6
  for p in range(P):
    prompt_k[:, p, :, :, PROMPT_LENGTHS[p] :] = -1e6
    prompt_v[:, p, :, PROMPT_LENGTHS[p] :, :] = 1e6
  dirty = dataclasses.replace(
    cache,
    k=jnp.asarray(k),
    v=jnp.asarray(v),
    prompt_k=jnp.asarray(prompt_k),
    prompt_v=jnp.asarray(prompt_v),
  )
  np.testing.assert_array_equal(_attend(dirty, query), before)
