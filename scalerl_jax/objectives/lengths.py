"""Length control by reward: the penalty that the paper compares with."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from scalerl_jax.objectives.checks import check_shape


def length_penalty(
  lengths: Num[Array, " B"],
  correct: Num[Array, " B"] | Bool[Array, " B"],
  *,
  max_length: float,
  cache_length: float,
) -> Float[Array, " B"]:
  """R_length = clip((L_max − |y|)/L_cache − 1, −1, 0), of correct ones only.

  0 up to L_max − L_cache tokens, then linear down to −1 at L_max.

  Args:
    lengths: |y|, completion tokens.
    correct: 0/1 correctness; a wrong completion is not punished twice.
    max_length: L_max, tokens; the paper's is 14 k.
    cache_length: L_cache, tokens, above 0; the paper's is 2 k.

  Returns:
    What to add to the rewards, in [−1, 0].

  Raises:
    ValueError: shapes differ, or 0 < cache_length ≤ max_length is broken.

  >>> length_penalty(
  ...   jnp.array([12, 13, 14, 14]),
  ...   jnp.array([1, 1, 1, 0]),
  ...   max_length=14,
  ...   cache_length=2,
  ... )
  Array([ 0. , -0.5, -1. ,  0. ], dtype=float32)

  Reference: ScaleRL, arXiv 2510.13786, section 3.2; DAPO, 2503.14476.
  """
  check_shape("lengths", lengths, (None,))
  check_shape("correct", correct, lengths.shape)
  if not 0 < cache_length <= max_length:
    raise ValueError(
      "cache_length must be above 0 and at most max_length"
      f" ({max_length}), got {cache_length}"
    )
  left = (max_length - lengths.astype(jnp.float32)) / cache_length
  penalty = jnp.clip(left - 1.0, -1.0, 0.0)
  return jnp.where(correct.astype(bool), penalty, 0.0)
