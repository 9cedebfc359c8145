"""Group-relative advantages: the reward centred on its prompt's mean."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from scalerl_jax.objectives.checks import check_groups, check_shape

NORMALIZATIONS = ("prompt_level", "batch_level", "none")


def group_advantages(
  rewards: Num[Array, " B"],
  *,
  group_size: int,
  normalization: str,
  keep: Bool[Array, " B"] | None = None,
) -> Float[Array, " B"]:
  """Â_i = (r_i − mean of the group) / std.

  The std is the population's: of the group for `prompt_level`, of all kept
  advantages for `batch_level` (ScaleRL's), 1 for `none`. A group whose rewards
  are all the same has advantage exactly 0, whatever the reward and the size:
  rounding noise is never divided by its own tiny std.

  Args:
    rewards: one a completion; groups are adjacent rows.
    group_size: G.
    normalization: one of `NORMALIZATIONS`.
    keep: True on completions that count, all by default; the others get 0
      and do not enter the batch's std.

  Returns:
    Advantages, float32.

  Raises:
    ValueError: unknown normalization, or a size that does not divide.

  >>> rewards = jnp.array([1.0, -1.0, 1.0, 1.0])
  >>> group_advantages(rewards, group_size=2, normalization="none")
  Array([ 1., -1.,  0.,  0.], dtype=float32)

  Reference: ScaleRL, arXiv 2510.13786, section 3.2. Whether the batch's std is
  taken before or after the zero-variance filter is not stated there: after.
  """
  if normalization not in NORMALIZATIONS:
    raise ValueError(
      f"normalization must be one of {', '.join(NORMALIZATIONS)}, got"
      f" {normalization!r}"
    )
  check_shape("rewards", rewards, (None,))
  groups = check_groups("rewards", rewards, group_size)
  if keep is None:
    keep = jnp.ones(rewards.shape, bool)
  check_shape("keep", keep, rewards.shape)
  table = rewards.astype(jnp.float32).reshape(groups, group_size)
  counted = keep.reshape(groups, group_size)
  count = jnp.maximum(counted.sum(axis=1, keepdims=True), 1)
  # Centred on the first kept reward, so that equal rewards differ by exactly 0.
  first = jnp.take_along_axis(
    table, jnp.argmax(counted, axis=1, keepdims=True), axis=1
  )
  shifted = jnp.where(counted, table - first, 0.0)
  mean = shifted.sum(axis=1, keepdims=True) / count
  centred = jnp.where(counted, shifted - mean, 0.0)
  varies = (shifted != 0.0).any(axis=1, keepdims=True)
  centred = jnp.where(varies, centred, 0.0)
  if normalization == "prompt_level":
    variance = (centred**2).sum(axis=1, keepdims=True) / count
  elif normalization == "batch_level":
    # Each group's mean is 0, and so is the mean over the batch.
    variance = (centred**2).sum() / jnp.maximum(counted.sum(), 1)
    variance = jnp.broadcast_to(variance, (1, 1))
  else:
    variance = jnp.ones((1, 1), jnp.float32)
  deviation = jnp.sqrt(jnp.where(variance > 0.0, variance, 1.0))
  return (centred / deviation).reshape(-1)
