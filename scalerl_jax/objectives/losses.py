"""Off-policy policy-gradient losses, per token, to be minimised.

Each returns `[B, T]`, never masked and never reduced: multiply by
`aggregation.aggregation_weights` and sum. Ratios are anchored on the log-probs
that the sampler recorded when it drew the token, never on a recomputation.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from scalerl_jax.objectives.checks import check_shape

# exp of more than this says nothing that a cap would not say, and overflows.
MAX_LOG_RATIO = 20.0


def token_ratio(
  logps: Float[Array, "B T"], behavior_logps: Float[Array, "B T"]
) -> Float[Array, "B T"]:
  """Importance ratio ρ = π/μ of each token, finite for any input.

  ρ = exp(clip(log π − log μ, ±20)).

  Args:
    logps: log π of the policy in training, nats.
    behavior_logps: log μ recorded by the sampler, nats.

  Raises:
    ValueError: the two differ in shape.

  >>> ratio = token_ratio(jnp.array([[-1.0, 9.0]]), jnp.array([[-1.0, 8.0]]))
  >>> ratio.round(4)
  Array([[1.    , 2.7183]], dtype=float32)
  """
  check_shape("logps", logps, (None, None))
  check_shape("behavior_logps", behavior_logps, logps.shape)
  difference = logps.astype(jnp.float32) - behavior_logps.astype(jnp.float32)
  return jnp.exp(jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def reinforce_loss(
  logps: Float[Array, "B T"], advantages: Float[Array, " B"]
) -> Float[Array, "B T"]:
  """REINFORCE: −Â·log π.

  Args:
    logps: log π of the policy in training, nats.
    advantages: Â, one a completion; no gradient flows into them.

  Returns:
    Loss of each token; neither masked nor reduced.

  Raises:
    ValueError: not one advantage a row.

  >>> reinforce_loss(jnp.array([[-1.0, -2.0]]), jnp.array([0.5]))
  Array([[0.5, 1. ]], dtype=float32)

  Reference: Williams, 1992.
  """
  check_shape("logps", logps, (None, None))
  check_shape("advantages", advantages, logps.shape[:1])
  advantages = jax.lax.stop_gradient(advantages.astype(jnp.float32))
  return -advantages[:, None] * logps.astype(jnp.float32)


def cispo_loss(
  logps: Float[Array, "B T"],
  behavior_logps: Float[Array, "B T"],
  advantages: Float[Array, " B"],
  *,
  clip_max: float,
) -> Float[Array, "B T"]:
  """CISPO, truncated importance-sampling REINFORCE: −sg(min(ρ, ε_max))·Â·log π.

  `clip_max` is the cap itself, not an offset from 1, and there is no floor.
  A token above the cap keeps its gradient, −ε_max·Â. The *value* is not
  bounded and its sign means nothing; only the gradient does.

  Args:
    logps: log π of the policy in training, nats.
    behavior_logps: log μ recorded by the sampler, nats.
    advantages: Â, one a completion.
    clip_max: ε_max, above 0; the paper finds 4, 5 and 8 alike.

  Returns:
    Loss of each token; neither masked nor reduced.

  Raises:
    ValueError: shapes differ, or `clip_max` is not above 0.

  >>> logps, behavior = jnp.log(jnp.array([[0.7]])), jnp.log(jnp.array([[0.1]]))
  >>> grad = jax.grad(
  ...   lambda x: cispo_loss(x, behavior, jnp.array([2.0]), clip_max=5.0).sum()
  ... )
  >>> grad(logps)  # ρ = 7 is capped to 5: −5 · 2
  Array([[-10.]], dtype=float32)

  Reference: MiniMax-M1, 2025, arXiv 2506.13585; ScaleRL, arXiv 2510.13786,
  section 3.2, whose lower bound is 0.
  """
  if not clip_max > 0:
    raise ValueError(
      f"clip_max must be above 0 (the absolute cap of the ratio, as 5.0),"
      f" got {clip_max}"
    )
  ratio = token_ratio(logps, behavior_logps)
  weight = jax.lax.stop_gradient(jnp.minimum(ratio, clip_max))
  return weight * reinforce_loss(logps, advantages)
