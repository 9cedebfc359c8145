"""Which tokens a loss has clipped: diagnostics, nothing that is trained on."""

from jaxtyping import Array, Bool, Float

from scalerl_jax.objectives.checks import check_shape


def outside_clip(
  ratio: Float[Array, "B T"],
  advantages: Float[Array, " B"],
  *,
  clip_low: float,
  clip_high: float,
) -> Bool[Array, "B T"]:
  """True where a clipped surrogate has no gradient left.

  (Â > 0 and ρ > 1 + ε_high) or (Â < 0 and ρ < 1 − ε_low).

  Args:
    ratio: of tokens, or of completions repeated along their tokens.
    advantages: Â, one a completion.
    clip_low: ε_low, an offset below 1.
    clip_high: ε_high, an offset above 1.

  Raises:
    ValueError: not one advantage a row.

  >>> import jax.numpy as jnp
  >>> outside_clip(
  ...   jnp.array([[1.5, 0.5]]), jnp.array([1.0]), clip_low=0.2, clip_high=0.26
  ... )
  Array([[ True, False]], dtype=bool)
  """
  check_shape("ratio", ratio, (None, None))
  check_shape("advantages", advantages, ratio.shape[:1])
  push = advantages[:, None]
  up = (push > 0) & (ratio > 1.0 + clip_high)
  down = (push < 0) & (ratio < 1.0 - clip_low)
  return up | down


def above_cap(
  ratio: Float[Array, "B T"], *, clip_max: float
) -> Bool[Array, "B T"]:
  """True where CISPO's weight is the cap; such tokens still learn.

  Args:
    ratio: of tokens.
    clip_max: the cap.

  >>> import jax.numpy as jnp
  >>> above_cap(jnp.array([[7.0, 4.0]]), clip_max=5.0)
  Array([[ True, False]], dtype=bool)
  """
  return ratio > clip_max
