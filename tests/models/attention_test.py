"""Attention over whole rows against scalar loops, in blocks and in groups."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.config import ModelConfig
from scalerl_jax.models import attention
from tests.helpers import in_full_precision, products
from tests.reference import transformer as reference

B, T, H, K, DH = 2, 5, 6, 3, 4
# Those that a CPU has; the third, cuDNN, goes the way of `xla`.
KERNELS = ("einsum", "xla")


def _normal(*shape, seed=0):
  return np.float32(np.random.default_rng(seed).standard_normal(shape))


def _mask(length, seed=3):
  rng = np.random.default_rng(seed)
  mask = np.tril(rng.random((B, length, length)) < 0.6)
  return mask | np.eye(length, dtype=bool)


@pytest.fixture
def small_blocks(monkeypatch):
  monkeypatch.setattr(attention, "BLOCK", 2)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kv_heads", [K, H])
def test_attention_equals_the_scalar_loop(kv_heads, kernel):
  query = _normal(B, T, H, DH)
  key, value = (_normal(B, T, kv_heads, DH, seed=s) for s in (1, 2))
  mask = _mask(T)
  attend = functools.partial(attention.attend, kernel=kernel)
  actual = jax.jit(attend)(query, key, value, mask)
  wide = key.astype(np.float64), value.astype(np.float64)
  for b in range(B):
    for t in range(T):
      seen = np.flatnonzero(mask[b, t])
      for h in range(H):
        kv = h // (H // kv_heads)
        expected = reference.attend(
          query[b, t, h].astype(np.float64),
          *[part[b, seen, kv] for part in wide],
        )
        np.testing.assert_allclose(
          actual[b, t, h], expected, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_query_that_sees_nothing_gives_numbers(kernel):
  x = jnp.asarray(_normal(B, T, K, DH))
  none = jnp.zeros((B, T, T), bool)
  value, gradient = jax.jit(
    jax.value_and_grad(
      lambda x: attention.attend(x, x, x, none, kernel=kernel).sum()
    )
  )(x)
  assert np.isfinite(value)
  assert np.isfinite(gradient).all()


@pytest.mark.parametrize("length", [5, 8, 40])
def test_blocks_cover_every_query_and_leave_later_keys(small_blocks, length):
  edges = attention.blocks(length)
  assert [first for first, _ in edges] == [0, *(last for _, last in edges[:-1])]
  assert edges[-1][1] == length
  assert len(edges) == min(length // 2, attention.MOST_BLOCKS)
  sizes = [last - first for first, last in edges]
  assert max(sizes) - min(sizes) <= 1
  # Every pair of a query and a key that it may see, and few others.
  least = length * (length + 1) // 2
  assert least <= attention.pairs(length) <= least + length * max(sizes) / 2


def _value_and_gradient(function, *arrays):
  def total(arrays):
    out = function(*arrays)
    weights = _normal(*out.shape, seed=9)
    return (out * weights).sum(), out

  (_, out), gradient = jax.value_and_grad(total, has_aux=True)(arrays)
  return out, *gradient


def _close(actual, expected):
  for x, y in zip(actual, expected, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_blocks_change_neither_value_nor_gradient(monkeypatch, kernel):
  length = 11
  query = jnp.asarray(_normal(B, length, H, DH))
  key, value = (jnp.asarray(_normal(B, length, K, DH, seed=s)) for s in (1, 2))
  mask = jnp.asarray(_mask(length))

  def attend(*arrays):
    return attention.attend(*arrays, mask, kernel=kernel)

  whole = _value_and_gradient(
    lambda *arrays: attention.attend(*arrays, mask), query, key, value
  )
  monkeypatch.setattr(attention, "BLOCK", 3)
  assert len(attention.blocks(length)) == 3
  _close(_value_and_gradient(attend, query, key, value), whole)
  if kernel != "einsum":
    return
  traced = jax.make_jaxpr(attend)(query, key, value)
  sizes = [product.outvars[0].aval.size for product in products(traced)]
  # Scores and mixes: fewer numbers than all pairs would have.
  scores = sum(sizes) - B * H * length * DH
  assert scores == B * H * attention.pairs(length) < B * H * length**2


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("block", [64, 2])
def test_a_group_sees_what_is_before_it_as_rows_of_their_own_do(
  monkeypatch, block, kernel
):
  monkeypatch.setattr(attention, "BLOCK", block)
  group, before = 3, 4
  query = jnp.asarray(_normal(B, group, T, H, DH))
  key, value = (
    jnp.asarray(_normal(B, group, T, K, DH, seed=s)) for s in (1, 2)
  )
  early_key, early_value = (
    jnp.asarray(_normal(B, before, K, DH, seed=s)) for s in (4, 5)
  )
  own = jnp.asarray(_mask(T))[:, None]
  visible = np.random.default_rng(6).random((B, 1, T, before)) < 0.5

  def shared(query, key, value, early_key, early_value):
    held = attention.Before(early_key, early_value, jnp.asarray(visible))
    return attention.attend_groups(query, key, value, own, held, kernel=kernel)

  def alone(query, key, value, early_key, early_value):
    """Each row with a copy of what is before it; queries there are nothing."""

    def row(late, early):
      early = jnp.repeat(early[:, None], group, axis=1)
      joined = jnp.concatenate([early, late], axis=2)
      return joined.reshape(B * group, before + T, *late.shape[3:])

    idle = jnp.zeros((B, before, H, DH))
    mask = np.zeros((B, before + T, before + T), bool)
    mask[:, before:, :before] = visible[:, 0]
    mask[:, before:, before:] = own[:, 0]
    mask = np.repeat(mask, group, axis=0)
    out = attention.attend(
      row(query, idle),
      row(key, early_key),
      row(value, early_value),
      jnp.asarray(mask),
    )
    return out.reshape(B, group, before + T, H, DH)[:, :, before:]

  arrays = query, key, value, early_key, early_value
  _close(
    _value_and_gradient(shared, *arrays), _value_and_gradient(alone, *arrays)
  )


@pytest.mark.parametrize("kernel", KERNELS)
def test_products_are_asked_for_in_full_precision(kernel):
  x = jnp.ones((B, T, K, DH))
  mask = jnp.ones((B, T, T), bool)
  attend = functools.partial(attention.attend, kernel=kernel)
  assert in_full_precision(jax.make_jaxpr(attend)(x, x, x, mask)) == 2


def test_the_library_gets_even_numbers_of_queries_and_keys(monkeypatch):
  monkeypatch.setattr(attention, "BLOCK", 3)
  seen = []
  library = jax.nn.dot_product_attention

  def record(query, key, value, **options):
    seen.append((query.shape[1], key.shape[1], options["implementation"]))
    return library(query, key, value, **options)

  monkeypatch.setattr(jax.nn, "dot_product_attention", record)
  x = jnp.asarray(_normal(B, 11, K, DH))
  attention.attend(x, x, x, jnp.asarray(_mask(11)), kernel="xla")
  # Blocks end at 4, 8 and 11.
  assert seen == [(4, 4, "xla"), (4, 8, "xla"), (4, 12, "xla")]


CUDNN = ModelConfig(dtype="bfloat16", attention="cudnn")


@pytest.mark.parametrize("platform", ["cpu", "tpu", "rocm"])
def test_cudnn_is_for_gpus_of_nvidia(platform):
  for kernel in KERNELS:
    asked = dataclasses.replace(CUDNN, attention=kernel)
    attention.check_kernel(asked, platform)
  rule = "must be einsum or xla on devices other than an NVIDIA GPU"
  with pytest.raises(ValueError, match=f"{rule}, got cudnn on a {platform}"):
    attention.check_kernel(CUDNN, platform)


@pytest.mark.parametrize("width", [12, 20, 264, 512])
def test_cudnn_refuses_heads_that_it_does_not_take(width):
  for fits in (8, 64, 256):
    held = dataclasses.replace(CUDNN, head_width=fits)
    attention.check_kernel(held, "gpu")
    attention.check_kernel(held, "cuda")
  asked = dataclasses.replace(CUDNN, head_width=width)
  with pytest.raises(ValueError, match=f"got model.head_width {width}: choose"):
    attention.check_kernel(asked, "gpu")
