"""A token counts as clipped exactly where its gradient says so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.objectives import clipping, losses

B, T = 3, 7


def _batch():
  rng = np.random.default_rng(0)
  behavior_logps = jnp.asarray(-rng.exponential(2.0, (B, T)), jnp.float32)
  ratio = jnp.exp(jnp.asarray(rng.standard_normal((B, T)), jnp.float32))
  advantages = jnp.asarray([1.5, -0.75, 2.0])
  return behavior_logps + jnp.log(ratio), behavior_logps, ratio, advantages


def test_outside_the_clip_is_where_the_surrogate_has_no_gradient():
  logps, behavior_logps, ratio, advantages = _batch()
  offsets = {"clip_low": 0.2, "clip_high": 0.26}
  gradient = jax.grad(
    lambda x: losses.clipped_surrogate_loss(
      x, behavior_logps, advantages, **offsets
    ).sum()
  )(logps)
  clipped = clipping.outside_clip(ratio, advantages, **offsets)
  np.testing.assert_array_equal(clipped, gradient == 0.0)
  assert 0 < clipped.sum() < B * T


def test_above_the_cap_is_where_the_weight_is_not_the_ratio():
  logps, behavior_logps, ratio, advantages = _batch()
  gradient = jax.grad(
    lambda x: losses.cispo_loss(
      x, behavior_logps, advantages, clip_max=1.4
    ).sum()
  )(logps)
  weight = -gradient / advantages[:, None]
  capped = clipping.above_cap(ratio, clip_max=1.4)
  np.testing.assert_array_equal(capped, weight < 0.999 * ratio)
  assert 0 < capped.sum() < B * T


def test_other_shapes_are_refused():
  with pytest.raises((TypeError, ValueError)):
    clipping.outside_clip(
      jnp.ones((3, 5)), jnp.ones(2), clip_low=0.2, clip_high=0.2
    )
