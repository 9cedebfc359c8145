"""Off-policy policy-gradient losses, per token, to be minimised.

Each returns `[B, T]`, never masked and never reduced: multiply by
`aggregation.aggregation_weights` and sum. Ratios are anchored on the log-probs
that the sampler recorded when it drew the token, never on a recomputation.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

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


def clipped_surrogate_loss(
  logps: Float[Array, "B T"],
  behavior_logps: Float[Array, "B T"],
  advantages: Float[Array, " B"],
  *,
  clip_low: float,
  clip_high: float,
) -> Float[Array, "B T"]:
  """The clipped surrogate of PPO, GRPO and DAPO: −min(ρÂ, clip(ρ)·Â).

  clip(ρ) = clip(ρ, 1 − ε_low, 1 + ε_high). A token beyond the side that its
  advantage pushes to has no gradient: Â > 0 and ρ > 1 + ε_high, or Â < 0 and
  ρ < 1 − ε_low. At ρ = 1 it is REINFORCE.

  Args:
    logps: log π of the policy in training, nats.
    behavior_logps: log μ recorded by the sampler, nats.
    advantages: Â, one a completion.
    clip_low: ε_low in (0, 1], an offset below 1; .2 in GRPO and DAPO.
    clip_high: ε_high above 0, an offset above 1; .2 in GRPO, .28 in DAPO.

  Returns:
    Loss of each token; neither masked nor reduced.

  Raises:
    ValueError: shapes differ, or an offset outside its domain.

  >>> logps = jnp.log(jnp.array([[1.5, 0.5]]))
  >>> loss = clipped_surrogate_loss(
  ...   logps, jnp.zeros((1, 2)), jnp.array([1.0]), clip_low=0.2, clip_high=0.26
  ... )
  >>> loss.round(4)  # −min(1.5, 1.26), −min(.5, .8)
  Array([[-1.26, -0.5 ]], dtype=float32)

  Reference: Schulman et al., 2017, arXiv 1707.06347, equation 7; DAPO,
  2503.14476, for two offsets.
  """
  _check_offsets(clip_low, clip_high)
  check_shape("advantages", advantages, logps.shape[:1])
  ratio = token_ratio(logps, behavior_logps)
  advantages = jax.lax.stop_gradient(advantages.astype(jnp.float32))[:, None]
  clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
  return -jnp.minimum(ratio * advantages, clipped * advantages)


def sequence_ratio(
  logps: Float[Array, "B T"],
  behavior_logps: Float[Array, "B T"],
  mask: Bool[Array, "B T"],
) -> Float[Array, " B"]:
  """GSPO's ratio of a completion: s = exp(mean over its tokens of log ρ).

  The mean and not the sum: a completion of repeated tokens has the ratio of
  one of them, however long it is. A row with nothing in `mask` has s = 1.

  Args:
    logps: log π of the policy in training, nats.
    behavior_logps: log μ recorded by the sampler, nats.
    mask: True on tokens that count.

  Raises:
    ValueError: shapes differ.

  >>> mask = jnp.array([[True, True, False]])
  >>> sequence_ratio(jnp.array([[0.2, 0.4, 9.0]]), jnp.zeros((1, 3)), mask)
  Array([1.34986], dtype=float32)

  Reference: Zheng et al., 2025, arXiv 2507.18071, equation 7.
  """
  check_shape("logps", logps, (None, None))
  check_shape("behavior_logps", behavior_logps, logps.shape)
  check_shape("mask", mask, logps.shape)
  difference = logps.astype(jnp.float32) - behavior_logps.astype(jnp.float32)
  count = jnp.maximum(mask.sum(axis=1), 1)
  mean = jnp.sum(jnp.where(mask, difference, 0.0), axis=1) / count
  return jnp.exp(jnp.clip(mean, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def gspo_loss(
  logps: Float[Array, "B T"],
  behavior_logps: Float[Array, "B T"],
  advantages: Float[Array, " B"],
  mask: Bool[Array, "B T"],
  *,
  clip_low: float,
  clip_high: float,
) -> Float[Array, "B T"]:
  """GSPO: −min(s·Â, clip(s)·Â) of the completion, at each of its tokens.

  All tokens of a completion share its ratio s, are clipped together, and have
  the same gradient. GSPO proper is this with `sample_average`; the useful
  offsets are small (ScaleRL: 4e-3 and 5e-3) and depend on completion length.

  Args:
    logps: log π of the policy in training, nats.
    behavior_logps: log μ recorded by the sampler, nats.
    advantages: Â, one a completion.
    mask: True on tokens that count, for the mean inside s.
    clip_low: ε_low in (0, 1].
    clip_high: ε_high above 0.

  Returns:
    `[B, T]`, the same number along a row; neither masked nor reduced.

  Raises:
    ValueError: shapes differ, or an offset outside its domain.

  >>> logps = jnp.array([[0.004, 0.008]])
  >>> mask = jnp.ones((1, 2), bool)
  >>> gspo_loss(
  ...   logps,
  ...   jnp.zeros((1, 2)),
  ...   jnp.array([1.0]),
  ...   mask,
  ...   clip_low=4e-3,
  ...   clip_high=5e-3,
  ... )  # s = exp(.006) is above 1.005
  Array([[-1.005, -1.005]], dtype=float32)

  Reference: Zheng et al., 2025, arXiv 2507.18071, equation 5. ScaleRL prints
  the ratio without the mean; its offsets only make sense with it.
  """
  _check_offsets(clip_low, clip_high)
  check_shape("advantages", advantages, logps.shape[:1])
  ratio = sequence_ratio(logps, behavior_logps, mask)
  advantages = jax.lax.stop_gradient(advantages.astype(jnp.float32))
  clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
  loss = -jnp.minimum(ratio * advantages, clipped * advantages)
  return jnp.broadcast_to(loss[:, None], logps.shape)


def behavior_kl(
  logps: Float[Array, "B T"], behavior_logps: Float[Array, "B T"]
) -> Float[Array, "B T"]:
  """K3 estimate of KL(μ‖π) at each token: ρ − 1 − log ρ, never negative.

  Args:
    logps: log π of the policy in training, nats.
    behavior_logps: log μ recorded by the sampler, nats.

  Returns:
    Nats, finite with a finite gradient for any input; not masked.

  Raises:
    ValueError: the two differ in shape.

  >>> behavior_kl(jnp.log(jnp.array([[0.5]])), jnp.zeros((1, 1))).round(4)
  Array([[0.1931]], dtype=float32)

  Reference: Schulman, 2020, "Approximating KL divergence".
  """
  ratio = token_ratio(logps, behavior_logps)
  return ratio - 1.0 - jnp.log(ratio)


def _check_offsets(clip_low: float, clip_high: float) -> None:
  if not 0 < clip_low <= 1:
    raise ValueError(
      f"clip_low must be in (0, 1] (an offset below 1, as .2), got {clip_low}"
    )
  if not clip_high > 0:
    raise ValueError(
      f"clip_high must be above 0 (an offset above 1, as .28), got {clip_high}"
    )
