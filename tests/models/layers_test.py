"""The transformer's arithmetic against float64 loops."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.models import layers
from tests.helpers import in_full_precision
from tests.reference import transformer as reference

B, T, H, K, DH = 2, 5, 6, 3, 4


def _normal(*shape, seed=0):
  return np.float32(np.random.default_rng(seed).standard_normal(shape))


def test_rms_norm_equals_the_scalar_loop():
  x, scale = 3.0 * _normal(3, 5, 7), _normal(7, seed=1)
  actual = layers.rms_norm(jnp.asarray(x), jnp.asarray(scale), 0.1)
  expected = [
    [reference.rms_norm(row, scale, 0.1) for row in rows]
    for rows in x.astype(np.float64)
  ]
  np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


def test_rms_norm_of_bfloat16_sums_in_float32():
  # 2.0 and 512 terms of 1/16: a sum of squares in bfloat16 would stay at 4.
  x = np.full((513,), 0.0625, np.float32)
  x[0] = 2.0
  actual = layers.rms_norm(jnp.asarray(x, jnp.bfloat16), jnp.ones(513), 1e-6)
  assert actual.dtype == jnp.bfloat16
  expected = reference.rms_norm(x.astype(np.float64), np.ones(513), 1e-6)
  np.testing.assert_allclose(actual.astype(jnp.float32), expected, rtol=4e-3)


def test_rotation_equals_the_scalar_loop():
  x = _normal(B, T, H, DH)
  positions = np.array([[0, 1, 2, 3, 4], [7, 0, 31, 2, 15]], np.int32)
  angles = layers.rope_angles(jnp.asarray(positions), DH, 100.0)
  actual = layers.rotate(jnp.asarray(x), *angles)
  expected = [
    [[reference.rotate(head, p, 100.0) for head in heads] for heads, p in row]
    for row in [zip(x[b], positions[b], strict=True) for b in range(B)]
  ]
  np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_products_of_rotated_vectors_know_only_distances():
  query, key = _normal(1, DH), _normal(1, DH, seed=1)

  def product(at, other):
    turned = [
      layers.rotate(
        jnp.asarray(x), *layers.rope_angles(jnp.asarray(p), DH, 100.0)
      )
      for x, p in ((query, at), (key, other))
    ]
    return float((turned[0] * turned[1]).sum())

  assert product(9, 4) == pytest.approx(product(25, 20), abs=1e-5)
  assert product(9, 4) != pytest.approx(product(9, 5), abs=1e-2)


def _stretched(frequency, factor, low, high, context):
  """As the published code says it, of one frequency."""
  wavelength = 2 * math.pi / frequency
  if wavelength < context / high:
    return frequency
  if wavelength > context / low:
    return frequency / factor
  smooth = (context / wavelength - low) / (high - low)
  return (1 - smooth) * frequency / factor + smooth * frequency


@pytest.mark.parametrize(("low", "high"), [(1.0, 4.0), (0.5, 7.0), (1.0, 1.0)])
def test_slow_rotations_are_stretched_and_fast_ones_are_not(low, high):
  stretch = layers.RopeStretch(8.0, low, high, 64)
  plain = 1e4 ** (-np.arange(9) / 9)
  actual = layers.stretched(jnp.asarray(plain, jnp.float32), stretch)
  expected = [_stretched(f, *stretch) for f in plain]
  np.testing.assert_allclose(actual, expected, rtol=1e-6)
  assert actual[0] == 1.0
  np.testing.assert_allclose(actual[-1], plain[-1] / 8.0, rtol=1e-6)
  positions = jnp.arange(5)
  cos, _ = layers.rope_angles(positions, 18, 1e4, stretch)
  angles = np.arange(5)[:, None] * np.asarray(expected)
  np.testing.assert_allclose(cos, np.cos(angles), rtol=1e-5, atol=1e-6)


def test_queries_are_sharper_after_every_whole_stretch():
  positions = jnp.array([[0, 3, 4], [8, 9, 14]])
  actual = layers.query_temperature(positions, scale=0.2, floor=5)
  stretches = np.array([[0, 0, 1], [1, 2, 3]])
  np.testing.assert_allclose(actual, 1 + 0.2 * np.log1p(stretches), rtol=1e-6)


def test_matmul_flattens_the_outputs_of_a_weight():
  x, weight = _normal(3, 5, 7), _normal(7, 2, 4, seed=1)
  actual = layers.matmul(jnp.asarray(x), jnp.asarray(weight))
  expected = np.tensordot(
    x.astype(np.float64), weight.astype(np.float64), axes=1
  ).reshape(3, 5, 8)
  np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matmul_rounds_its_operands_and_sums_in_float32(dtype):
  x, weight = _normal(3, 5, 70), _normal(70, 2, 4, seed=1)
  g = _normal(3, 5, 8, seed=2)

  def rounded(array):
    return np.asarray(jnp.asarray(array, dtype), np.float64)

  @jax.jit
  def both(x, weight, g):
    out, back = jax.vjp(
      lambda x, weight: layers.matmul(x, weight, dtype), x, weight
    )
    return out, *back(g)

  out, dx, dweight = both(*map(jnp.asarray, (x, weight, g)))
  flat = rounded(weight).reshape(70, 8)
  expected = (
    rounded(x) @ flat,
    (rounded(g) @ flat.T),
    np.einsum("bti,bto->io", rounded(x), rounded(g)).reshape(weight.shape),
  )
  for found, exact in zip((out, dx, dweight), expected, strict=True):
    assert found.dtype == jnp.float32
    # Sums rounded to bfloat16 would be 4e-3 of themselves away.
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=2e-5)
  narrow = x.astype(jnp.bfloat16)
  found = both(
    jnp.asarray(narrow), jnp.asarray(weight), jnp.asarray(g, narrow.dtype)
  )
  assert [part.dtype.name for part in found] == ["bfloat16"] * 2 + ["float32"]


def test_matmul_of_bfloat16_sums_in_float32():
  # In bfloat16 a sum of ones stops at 256.
  ones = jnp.ones((2, 1000), jnp.bfloat16)
  out = layers.matmul(ones, jnp.ones((1000, 3), jnp.float32))
  assert out.dtype == jnp.bfloat16
  np.testing.assert_array_equal(out.astype(jnp.float32), np.full((2, 3), 1000))


def test_swiglu_equals_the_scalar_loop():
  x = _normal(3, 5, 7)
  gate, up, down = _normal(7, 4, seed=1), _normal(7, 4, seed=2), _normal(4, 7)
  actual = layers.swiglu(*map(jnp.asarray, (x, gate, up, down)))
  expected = [
    [reference.swiglu(row, *np.float64((gate, up)), down) for row in rows]
    for rows in x.astype(np.float64)
  ]
  np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_positions_start_again_in_each_segment():
  positions = layers.segment_positions(
    jnp.array([[1, 1, 2, 2, 2], [0, 0, 3, 3, 3], [1, 1, 1, 0, 0]])
  )
  np.testing.assert_array_equal(
    positions, [[0, 1, 0, 1, 2], [0, 1, 0, 1, 2], [0, 1, 2, 0, 1]]
  )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_head_is_computed_in_float32(dtype):
  # What the head is given may be rounded; what it makes of it may not.
  hidden = jnp.asarray(_normal(2, 3, 64), dtype)
  table = jnp.asarray(_normal(11, 64, seed=1))
  logits = layers.float32_head(hidden, table)
  assert logits.dtype == jnp.float32
  exact = np.asarray(hidden, np.float64) @ np.asarray(table, np.float64).T
  np.testing.assert_allclose(logits, exact, rtol=1e-5, atol=1e-5)
  # The bound above tells a rounded operand from a whole one.
  rounded = np.asarray(table.astype(jnp.bfloat16), np.float64)
  coarse = np.asarray(hidden, np.float64) @ rounded.T
  assert np.abs(coarse - exact).max() > 1e-3


def test_products_are_asked_for_in_full_precision():
  x = jnp.ones((B, T, K, DH))
  weight = jnp.ones((DH, DH))
  head = jax.make_jaxpr(layers.float32_head)(x[..., 0, :], weight)
  assert in_full_precision(head) == 1
  assert in_full_precision(jax.make_jaxpr(layers.matmul)(x, weight)) == 1


def test_the_head_of_the_ablation_rounds_operands_and_logits():
  rng = np.random.default_rng(0)
  hidden = np.float32(rng.standard_normal((3, 5, 7)))
  table = np.float32(rng.standard_normal((11, 7)))

  def rounded(x):
    return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)

  exact = rounded(hidden) @ rounded(table).T
  logits = layers.bfloat16_head(jnp.asarray(hidden), jnp.asarray(table))
  assert logits.dtype == jnp.float32
  np.testing.assert_array_equal(logits, rounded(logits))
  np.testing.assert_allclose(logits, exact, rtol=2**-7, atol=2**-7)
  full = layers.float32_head(jnp.asarray(hidden), jnp.asarray(table))
  assert np.abs(np.asarray(full) - np.asarray(logits)).max() > 1e-3
