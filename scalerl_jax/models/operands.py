"""Operands of products that may be narrower than their sums.

A product of two bfloat16 numbers is exact in float32, so what is rounded may
be multiplied in either dtype: in bfloat16 where the hardware does that, as
rounded float32 numbers where it would only be emulated.
"""

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Products of float32 operands stay float32: an accelerator's default would
# round them to TF32 or bfloat16, and sampler and learner would drift apart.
# Operands in bfloat16 are multiplied as they are, with float32 sums.
FLOAT32: dict[str, Any] = {
  "precision": jax.lax.Precision.HIGHEST,
  "preferred_element_type": jnp.float32,
}

_CPU_INFO = pathlib.Path("/proc/cpuinfo")
_UNITS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86, x86, Arm
_FEATURES = ("flags", "Features")  # what x86 and Arm call the line


@functools.cache
def cpu_has_bfloat16_units(file: pathlib.Path = _CPU_INFO) -> bool:
  """Whether this CPU multiplies bfloat16; yes where it does not say."""
  if not file.exists():
    return True
  for line in file.read_text(errors="replace").splitlines():
    name, _, words = line.partition(":")
    if name.strip() in _FEATURES:
      return not _UNITS.isdisjoint(words.split())
  return True


def multiplied_in(dtype: Any) -> Any:
  """The dtype in which operands of `dtype` are multiplied.

  float32 in place of bfloat16 on a CPU that would emulate it. The platform is
  that of the mesh that is set, and JAX's default without one.
  """
  dtype = jnp.dtype(dtype)
  if dtype != jnp.bfloat16:
    return dtype
  device = jax.sharding.get_abstract_mesh().abstract_device
  platform = jax.default_backend() if device is None else device.platform
  emulated = platform == "cpu" and not cpu_has_bfloat16_units()
  return jnp.dtype(jnp.float32) if emulated else dtype


def operand(x: Float[Array, "*B"], dtype: Any) -> Float[Array, "*B"]:
  """x rounded to `dtype`, in the dtype that it is multiplied in.

  What is already of `dtype` stays so: it is half as large to keep.

  >>> operand(jnp.float32(1.001), jnp.bfloat16).astype(jnp.float32)
  Array(1., dtype=float32)
  """
  dtype = jnp.dtype(dtype)
  if x.dtype == dtype or multiplied_in(dtype) == dtype:
    return x.astype(dtype)
  kind = jnp.finfo(dtype)
  # A cast there and back would be taken out by the compiler.
  return jax.lax.reduce_precision(x.astype(jnp.float32), kind.nexp, kind.nmant)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def narrow_dot(
  dtype: Any, x: Float[Array, "N I"], weight: Float[Array, "I O"]
) -> Float[Array, "N O"]:
  """x @ weight with operands rounded to `dtype`, sums in float32.

  By hand, since the transpose of such a product has results of its operands'
  dtype: sums of gradients would be rounded (and on a CPU take twice as long).
  """
  return jnp.dot(operand(x, dtype), operand(weight, dtype), **FLOAT32)


def _forward(
  dtype: Any, x: Array, weight: Array
) -> tuple[Array, tuple[Array, Array, Any, Any]]:
  kept = operand(x, dtype), operand(weight, dtype)
  like = jnp.zeros((), x.dtype), jnp.zeros((), weight.dtype)
  return jnp.dot(*kept, **FLOAT32), (*kept, *like)


def _backward(
  dtype: Any, kept: tuple[Array, Array, Any, Any], g: Array
) -> tuple[Array, Array]:
  x, weight, x_like, weight_like = kept
  g = operand(g, dtype)
  dx = jnp.einsum("no,io->ni", g, weight, **FLOAT32)
  dweight = jnp.einsum("ni,no->io", x, g, **FLOAT32)
  return dx.astype(x_like.dtype), dweight.astype(weight_like.dtype)


narrow_dot.defvjp(_forward, _backward)
