"""How token losses become one number: weights over the GLOBAL batch.

The loss is `sum(weights * token_loss)`. The weights are computed before
micro-batching and sharding, so neither can change a denominator.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from scalerl_jax.objectives.checks import check_groups, check_shape

AGGREGATIONS = (
  "sample_average",
  "prompt_average",
  "token_average",
  "constant",
)


def aggregation_weights(
  mask: Bool[Array, "B T"],
  *,
  group_size: int,
  how: str,
  max_tokens: int | None = None,
) -> Float[Array, "B T"]:
  """Weight of each token in the loss of the batch.

  With m the mask, n_i = Σ_t m_it and N_p = Σ_{i in group p} n_i:

  - `sample_average`: m_it / (n_i · number of rows with a token)
  - `prompt_average`: m_it / (N_p · number of groups with a token), ScaleRL's
  - `token_average`: m_it / Σ n
  - `constant`: m_it / (number of rows with a token · max_tokens), Dr. GRPO's

  The first three sum to 1. Rows and groups with nothing in `mask` weigh 0 and
  do not count: clearing a group's mask equals never having had it.

  Args:
    mask: True on the tokens that count; groups are adjacent rows.
    group_size: G, completions of one prompt.
    how: one of `AGGREGATIONS`.
    max_tokens: completion budget, for `constant` only.

  Returns:
    Weights, float32; all 0 for an empty mask.

  Raises:
    ValueError: unknown `how`, `group_size` that does not divide the rows, or
      `max_tokens` missing for `constant` or given elsewhere.

  >>> mask = jnp.array([[True, True, True], [True, False, False]])
  >>> aggregation_weights(mask, group_size=2, how="prompt_average")
  Array([[0.25, 0.25, 0.25],
         [0.25, 0.  , 0.  ]], dtype=float32)

  Reference: ScaleRL, arXiv 2510.13786, section 3.2; Dr. GRPO, 2503.20783.
  """
  if how not in AGGREGATIONS:
    raise ValueError(
      f"how must be one of {', '.join(AGGREGATIONS)}, got {how!r}"
    )
  if how == "constant" and (max_tokens is None or max_tokens < 1):
    raise ValueError(
      "max_tokens must be 1 or more for the aggregation 'constant', got"
      f" {max_tokens}; give the completion budget"
    )
  if how != "constant" and max_tokens is not None:
    raise ValueError(
      f"max_tokens must be left out for the aggregation {how!r}, got"
      f" {max_tokens}; only 'constant' divides by it"
    )
  check_shape("mask", mask, (None, None))
  groups = check_groups("mask", mask, group_size)
  counts = mask.astype(jnp.float32)
  row = counts.sum(axis=1)
  rows = jnp.maximum((row > 0).sum(), 1).astype(jnp.float32)
  if how == "sample_average":
    denominator = row * rows
  elif how == "prompt_average":
    group = row.reshape(groups, group_size).sum(axis=1)
    used = jnp.maximum((group > 0).sum(), 1).astype(jnp.float32)
    denominator = jnp.repeat(group * used, group_size)
  elif how == "token_average":
    denominator = jnp.broadcast_to(row.sum(), row.shape)
  else:
    denominator = jnp.broadcast_to(rows * float(max_tokens or 1), row.shape)
  return counts / jnp.maximum(denominator, 1.0)[:, None]
