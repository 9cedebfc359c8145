"""Narrow operands: rounded alike whatever they are multiplied in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from scalerl_jax.models import operands
from tests.helpers import products

X86 = "model name : any\nflags\t\t: fpu sse2 avx2 {}\n"
ARM = "Features\t: fp asimd {}\n"


@pytest.fixture(params=[True, False], ids=["units", "no units"])
def units(request, monkeypatch):
  """Whether the CPU is one that multiplies bfloat16."""
  monkeypatch.setattr(operands, "cpu_has_bfloat16_units", lambda: request.param)
  return request.param


@pytest.mark.parametrize(
  ("text", "has"),
  [
    (X86.format("fma"), False),
    (X86.format("avx512_bf16"), True),
    (X86.format("amx_bf16 amx_tile"), True),
    (ARM.format("crc32"), False),
    (ARM.format("bf16"), True),
    ("a system that says nothing of it", True),
  ],
)
def test_a_cpu_says_whether_it_multiplies_bfloat16(tmp_path, text, has):
  file = tmp_path / "cpuinfo"
  file.write_text(text)
  assert operands.cpu_has_bfloat16_units(file) == has


def test_a_system_without_such_a_file_is_believed_to(tmp_path):
  assert operands.cpu_has_bfloat16_units(tmp_path / "nothing")


def test_only_bfloat16_on_a_cpu_without_units_is_multiplied_wider(units):
  assert operands.multiplied_in("float32") == jnp.float32
  assert operands.multiplied_in("float16") == jnp.float16
  assert operands.multiplied_in("bfloat16") == (
    jnp.bfloat16 if units else jnp.float32
  )


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_the_platform_is_that_of_the_mesh(monkeypatch, platform):
  """A program made on a CPU for another machine is of that machine."""
  monkeypatch.setattr(operands, "cpu_has_bfloat16_units", lambda: False)
  device = jax.sharding.AbstractDevice(
    device_kind="any", num_cores=None, platform=platform
  )
  mesh = AbstractMesh((1,), ("data",), abstract_device=device)
  with jax.sharding.use_abstract_mesh(mesh):
    assert operands.multiplied_in("bfloat16") == jnp.bfloat16
  assert operands.multiplied_in("bfloat16") == jnp.float32


def test_an_operand_is_rounded_to_the_nearest(units):
  x = np.random.default_rng(0).normal(size=1000).astype(np.float32)
  rounded = jax.jit(lambda x: operands.operand(x, "bfloat16"))(x)
  assert rounded.dtype == operands.multiplied_in("bfloat16")
  np.testing.assert_array_equal(
    rounded.astype(jnp.float32), x.astype(jnp.bfloat16).astype(np.float32)
  )
  assert (rounded.astype(jnp.float32) != x).any()
  # What is narrow already is kept as it is.
  kept = operands.operand(jnp.asarray(x, jnp.bfloat16), "bfloat16")
  assert kept.dtype == jnp.bfloat16


def _product_and_gradients(dtype):
  rng = np.random.default_rng(1)
  x, weight, pull = (
    rng.normal(size=shape).astype(np.float32)
    for shape in ((5, 64), (64, 7), (5, 7))
  )
  out, back = jax.vjp(
    lambda x, weight: operands.narrow_dot(dtype, x, weight),
    jnp.asarray(x, dtype if dtype == "float16" else jnp.float32),
    jnp.asarray(weight),
  )
  return x, weight, pull, out, back(jnp.asarray(pull))


def test_products_are_those_of_rounded_operands(units):
  x, weight, pull, out, (dx, dweight) = _product_and_gradients("bfloat16")
  x, weight, pull = (
    a.astype(jnp.bfloat16).astype(np.float64) for a in (x, weight, pull)
  )
  for found, wanted in (
    (out, x @ weight),
    (dx, pull @ weight.T),
    (dweight, x.T @ pull),
  ):
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_operands_are_multiplied_in_what_is_fast(units):
  x = jnp.ones((5, 64))
  traced = jax.make_jaxpr(
    jax.grad(lambda x, w: operands.narrow_dot("bfloat16", x, w).sum(), (0, 1))
  )(x, jnp.ones((64, 7)))
  wanted = jnp.bfloat16 if units else jnp.float32
  found = [v.aval.dtype for p in products(traced) for v in p.invars]
  assert found == [wanted] * 6
