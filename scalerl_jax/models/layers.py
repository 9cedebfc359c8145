"""The transformer's arithmetic as pure functions: arrays in, arrays out.

Learner and sampler both call these; what differs between them is only which
keys and values a query sees.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from scalerl_jax.models.operands import FLOAT32, narrow_dot

# Finite, so that a row that sees nothing gives numbers and not NaN.
MASKED = -1e30


def rms_norm(
  x: Float[Array, "*B D"], scale: Float[Array, " D"], epsilon: float
) -> Float[Array, "*B D"]:
  """Root-mean-square norm, computed in float32: x / rms(x) · scale.

  Reference: Zhang and Sennrich, 2019, arXiv 1910.07467.
  """
  wide = x.astype(jnp.float32)
  inverse = jax.lax.rsqrt(
    jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon
  )
  scale = jnp.expand_dims(scale, tuple(range(x.ndim - 1)))
  return (wide * inverse).astype(x.dtype) * scale.astype(x.dtype)


class RopeStretch(NamedTuple):
  """Rotations for contexts longer than those of the first training."""

  factor: float  # slow rotations are so much slower
  low: float  # turns within `context` below which a rotation is slow
  high: float  # above which it is fast and stays; between, a blend
  context: int  # tokens


def stretched(
  frequencies: Float[Array, " half"], stretch: RopeStretch
) -> Float[Array, " half"]:
  """Llama 3's frequencies: f/factor if slow, f if fast, blended between.

  The share that stays is (turns − low) / (high − low) within [0, 1], where
  turns = context·f / 2π.

  Reference: Llama Team, 2024, arXiv 2407.21783, section 3.4.3, and its
  published code, whose form this is.
  """
  turns = stretch.context * frequencies / (2.0 * jnp.pi)
  # Equal bounds leave nothing to blend: a step.
  span = max(stretch.high - stretch.low, 1e-9)
  stays = jnp.clip((turns - stretch.low) / span, 0.0, 1.0)
  return stays * frequencies + (1.0 - stays) * frequencies / stretch.factor


def rope_angles(
  positions: Int[Array, "*B"],
  head_width: int,
  theta: float,
  stretch: RopeStretch | None = None,
) -> tuple[Float[Array, "*B half"], Float[Array, "*B half"]]:
  """Cosine and sine of the rotary angles, float32 `[..., Dh/2]`.

  Reference: Su et al., 2021, arXiv 2104.09864; pairs are (i, i + Dh/2), the
  convention of published checkpoints.
  """
  half = head_width // 2
  frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  if stretch is not None:
    frequencies = stretched(frequencies, stretch)
  frequencies = jnp.expand_dims(frequencies, tuple(range(positions.ndim)))
  angles = positions[..., None].astype(jnp.float32) * frequencies
  return jnp.cos(angles), jnp.sin(angles)


def rotate(
  x: Float[Array, "*B heads Dh"],
  cos: Float[Array, "*B half"],
  sin: Float[Array, "*B half"],
) -> Float[Array, "*B heads Dh"]:
  """Rotary position embedding of queries or keys."""
  half = x.shape[-1] // 2
  pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, half)
  cos, sin = cos[..., None, None, :], sin[..., None, None, :]
  # Halves swapped by reading backwards: split and joined again they take
  # several times as long on a CPU.
  signs = jnp.array([[-1.0], [1.0]], jnp.float32)
  signs = signs.reshape(*[1] * (pairs.ndim - 2), 2, 1)
  turned = pairs * cos + jnp.flip(pairs, axis=-2) * (signs * sin)
  return turned.reshape(x.shape).astype(x.dtype)


def matmul(
  x: Float[Array, "*B I"], weight: Float[Array, "I *O"], dtype: Any = None
) -> Float[Array, "*B O2"]:
  """x @ weight with the weight's output axes flattened, in x's dtype.

  One 2-D product: on a CPU it is nearly twice as fast as a 3-D one.

  Args:
    x: activations.
    weight: first axis contracted.
    dtype: of the operands, also of the two products of the gradient; sums are
      in float32 whatever it is. x's by default.
  """
  dtype = jnp.dtype(x.dtype if dtype is None else dtype)
  weight = weight.reshape(weight.shape[0], -1)
  flat = x.reshape(-1, x.shape[-1])
  if dtype == jnp.float32:
    out: Array = jnp.dot(flat, weight.astype(dtype), **FLOAT32)
  else:
    out = narrow_dot(dtype, flat, weight)
  return out.astype(x.dtype).reshape(*x.shape[:-1], -1)


def swiglu(
  x: Float[Array, "*B D"],
  gate: Float[Array, "D F"],
  up: Float[Array, "D F"],
  down: Float[Array, "F D"],
  dtype: Any = None,
) -> Float[Array, "*B D"]:
  """Gated MLP: (silu(x·gate) ⊙ (x·up))·down.

  Args:
    x: activations.
    gate, up, down: weights.
    dtype: of the operands of the products, as in `matmul`.

  Reference: Shazeer, 2020, arXiv 2002.05202.
  """
  gated = jax.nn.silu(matmul(x, gate, dtype)) * matmul(x, up, dtype)
  return matmul(gated, down, dtype)


def query_temperature(
  positions: Int[Array, "*B"], *, scale: float, floor: int
) -> Float[Array, "*B"]:
  """1 + scale·log(1 + ⌊(position + 1) / floor⌋), a factor of the queries.

  Attention stays as sharp over long contexts as over short ones.

  Reference: Nakanishi, 2025, arXiv 2501.19399, in the form of Llama 4.
  """
  stretches = jnp.floor((positions.astype(jnp.float32) + 1.0) / floor)
  return jnp.log1p(stretches) * scale + 1.0


def segment_positions(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
  """Position of each token within its own segment, from 0."""
  index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
  before = jnp.pad(segment_ids, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
  starts = jnp.where(segment_ids != before, index, 0)
  return index - jax.lax.cummax(starts, axis=1)


def float32_head(
  hidden: Float[Array, "*B D"], table: Float[Array, "V D"]
) -> Float[Array, "*B V"]:
  """The FP32 head: logits in float32 from float32 operands, on both sides.

  Sampler and learner call this one function. Operands are widened *before*
  the product and the product is asked for at full precision (the default on
  an accelerator would round them to bfloat16 or TF32); a cast of finished
  logits would not restore what was lost.

  Reference: ScaleRL, arXiv 2510.13786, section 3.2 and A.19.
  """
  flat = hidden.reshape(-1, hidden.shape[-1]).astype(jnp.float32)
  logits = jnp.einsum("nd,vd->nv", flat, table.astype(jnp.float32), **FLOAT32)
  return logits.reshape(*hidden.shape[:-1], table.shape[0])


def bfloat16_head(
  hidden: Float[Array, "*B D"], table: Float[Array, "V D"]
) -> Float[Array, "*B V"]:
  """The head that the FP32 one is compared with: bfloat16 in, bfloat16 out.

  Returns:
    Logits rounded to bfloat16, as float32.
  """
  flat = hidden.reshape(-1, hidden.shape[-1]).astype(jnp.bfloat16)
  logits = jnp.einsum("nd,vd->nv", flat, table.astype(jnp.bfloat16))
  logits = logits.astype(jnp.bfloat16).astype(jnp.float32)
  return logits.reshape(*hidden.shape[:-1], table.shape[0])
