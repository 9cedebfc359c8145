"""Token losses: value and gradient against the scalar loops, and extremes."""

import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.objectives import losses
from tests.reference import losses as reference

B, T = 3, 5


def _batch(seed=0, gap=1.5):
  """logps, behavior_logps [B, T] and advantages [B], both signs and a zero."""
  rng = np.random.default_rng(seed)
  logps = -rng.exponential(2.0, (B, T))
  behavior_logps = logps + gap * rng.standard_normal((B, T))
  advantages = np.asarray([1.5, -0.75, 0.0])
  return tuple(
    jnp.asarray(x, jnp.float32) for x in (logps, behavior_logps, advantages)
  )


def _lists(*arrays):
  return [np.asarray(array, np.float64).tolist() for array in arrays]


def _slopes(loss, logps):
  """d loss_it / d log π_it of every token (a loss uses its own token only)."""
  return jax.grad(lambda x: loss(x).sum())(logps)


def test_reinforce_equals_the_scalar_loop_value_and_gradient():
  logps, _, advantages = _batch()
  values, slopes = reference.reinforce(*_lists(logps, advantages))
  actual = losses.reinforce_loss(logps, advantages)
  assert actual.shape == (B, T)
  assert actual.dtype == jnp.float32
  np.testing.assert_allclose(actual, values, rtol=1e-6, atol=1e-6)
  np.testing.assert_allclose(
    _slopes(lambda x: losses.reinforce_loss(x, advantages), logps),
    slopes,
    rtol=1e-6,
  )


@pytest.mark.parametrize("clip_max", [0.5, 1.0, 5.0, 100.0])
def test_cispo_equals_the_scalar_loop_value_and_gradient(clip_max):
  logps, behavior_logps, advantages = _batch()
  values, slopes = reference.cispo(
    *_lists(logps, behavior_logps, advantages), clip_max
  )

  def loss(x):
    return losses.cispo_loss(x, behavior_logps, advantages, clip_max=clip_max)

  actual = loss(logps)
  assert actual.shape == (B, T)
  assert actual.dtype == jnp.float32
  np.testing.assert_allclose(actual, values, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(_slopes(loss, logps), slopes, rtol=1e-5, atol=1e-6)


def test_clip_max_is_the_absolute_cap_of_the_ratio():
  # ρ = 7, cap 5: the factor is 5. A cap of 1 + clip_max would leave 6.
  logps = jnp.full((B, T), -0.5, jnp.float32)
  behavior_logps = logps - math.log(7.0)
  advantages = jnp.asarray([2.0, -3.0, 1.0], jnp.float32)

  def loss(x, cap):
    return losses.cispo_loss(x, behavior_logps, advantages, clip_max=cap)

  for cap, factor in ((5.0, 5.0), (6.5, 6.5), (8.0, 7.0)):
    by_hand = np.repeat([[-2.0], [3.0], [-1.0]], T, axis=1) * factor
    np.testing.assert_allclose(
      _slopes(lambda x, cap=cap: loss(x, cap), logps), by_hand, rtol=1e-5
    )
    np.testing.assert_allclose(loss(logps, cap), by_hand * -0.5, rtol=1e-5)


def test_the_ratio_has_no_floor():
  # ρ = 0.01: clipping to [1 - ε, ...] would lift it; the paper's floor is 0.
  logps = jnp.full((B, T), -6.0, jnp.float32)
  behavior_logps = logps - math.log(0.01)
  slopes = _slopes(
    lambda x: losses.cispo_loss(
      x, behavior_logps, jnp.ones((B,), jnp.float32), clip_max=5.0
    ),
    logps,
  )
  np.testing.assert_allclose(slopes, -0.01, rtol=1e-5)


def test_the_gradient_is_the_capped_ratio_times_advantage_times_weight():
  logps, behavior_logps, advantages = _batch(gap=2.5)
  rng = np.random.default_rng(3)
  weights = jnp.asarray(rng.uniform(0.0, 0.1, (B, T)), jnp.float32)
  gradient = jax.grad(
    lambda x: (
      weights * losses.cispo_loss(x, behavior_logps, advantages, clip_max=5.0)
    ).sum()
  )(logps)
  ratio = np.exp(
    np.asarray(logps, np.float64) - np.asarray(behavior_logps, np.float64)
  )
  assert (ratio > 5.0).any()
  assert (ratio < 5.0).any()
  expected = -np.minimum(ratio, 5.0) * np.asarray(advantages)[:, None] * weights
  np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-8)


def test_tokens_above_the_cap_still_learn():
  # DAPO's surrogate has gradient 0 where Â > 0 and ρ > 1 + ε; CISPO has not.
  logps = jnp.full((B, T), -1.0, jnp.float32)
  behavior_logps = logps - math.log(50.0)
  advantages = jnp.asarray([1.0, -1.0, 0.5], jnp.float32)
  slopes = _slopes(
    lambda x: losses.cispo_loss(x, behavior_logps, advantages, clip_max=4.0),
    logps,
  )
  np.testing.assert_allclose(
    slopes, np.repeat([[-4.0], [4.0], [-2.0]], T, axis=1), rtol=1e-6
  )


def test_on_policy_is_reinforce():
  logps, _, advantages = _batch()
  # The sampler's record is another array with the same numbers.
  recorded = jnp.asarray(np.asarray(logps))

  def cispo(x):
    return losses.cispo_loss(x, recorded, advantages, clip_max=5.0)

  expected = -np.asarray(advantages)[:, None] * np.asarray(logps)
  np.testing.assert_allclose(cispo(logps), expected, rtol=1e-6, atol=1e-6)
  np.testing.assert_allclose(
    losses.reinforce_loss(logps, advantages), expected, rtol=1e-6, atol=1e-6
  )
  np.testing.assert_allclose(
    _slopes(cispo, logps),
    np.broadcast_to(-np.asarray(advantages)[:, None], (B, T)),
    rtol=1e-6,
  )


def test_a_stale_rollout_has_ratios_other_than_one():
  # Anchored on the sampler's record, the factor follows the learner's move;
  # anchored on the learner's own log-probs it would be 1 for ever.
  behavior_logps = jnp.full((B, T), -2.0, jnp.float32)
  advantages = jnp.ones((B,), jnp.float32)
  for moved in (-0.7, 0.0, 0.7):
    slopes = _slopes(
      lambda x: losses.cispo_loss(x, behavior_logps, advantages, clip_max=5.0),
      behavior_logps + moved,
    )
    np.testing.assert_allclose(slopes, -math.exp(moved), rtol=1e-5)


def test_no_gradient_flows_into_the_recorded_log_probs():
  logps, behavior_logps, advantages = _batch()
  gradient = jax.grad(
    lambda mu: losses.cispo_loss(logps, mu, advantages, clip_max=5.0).sum()
  )(behavior_logps)
  assert (np.asarray(gradient) == 0.0).all()


@pytest.mark.parametrize("clip_max", [5.0, 1e12])
def test_extreme_log_ratios_give_finite_loss_and_gradient(clip_max):
  logps = jnp.asarray(
    [[-1.0, -201.0, 0.0, -200.0, -1e4], [0.0, -200.0, -1.0, -1e3, -0.5]],
    jnp.float32,
  )
  behavior_logps = jnp.asarray(
    [[-201.0, -1.0, -200.0, 0.0, -1.0], [-1e4, 0.0, -1e3, -1.0, -0.5]],
    jnp.float32,
  )
  for advantages in ([1.0, -1.0], [0.0, 0.0]):
    values, slopes = reference.cispo(
      *_lists(logps, behavior_logps), advantages, clip_max
    )

    def loss(x, advantages=advantages):
      return losses.cispo_loss(
        x,
        behavior_logps,
        jnp.asarray(advantages, jnp.float32),
        clip_max=clip_max,
      )

    # exp(20) carries 20 ulps of its argument's rounding, measured 1e-6.
    np.testing.assert_allclose(loss(logps), values, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
      _slopes(loss, logps), slopes, rtol=1e-5, atol=1e-6
    )


def test_losses_are_neither_masked_nor_reduced():
  # A token's loss depends on that token alone, whatever its neighbours hold.
  logps, behavior_logps, advantages = _batch()
  changed = logps.at[1, 2].add(-3.0)
  for loss in (
    lambda x: losses.reinforce_loss(x, advantages),
    lambda x: losses.cispo_loss(x, behavior_logps, advantages, clip_max=5.0),
  ):
    differs = np.asarray(loss(changed) != loss(logps))
    assert np.argwhere(differs).tolist() == [[1, 2]]


def test_losses_run_under_jit_with_the_same_numbers():
  logps, behavior_logps, advantages = _batch()
  values, _ = reference.cispo(*_lists(logps, behavior_logps, advantages), 5.0)
  jitted = jax.jit(lambda x, mu, a: losses.cispo_loss(x, mu, a, clip_max=5.0))
  np.testing.assert_allclose(
    jitted(logps, behavior_logps, advantages), values, rtol=1e-5, atol=1e-6
  )


@pytest.mark.parametrize("clip_max", [0.0, -1.0])
def test_a_cap_that_is_not_positive_is_refused_by_name(clip_max):
  logps, behavior_logps, advantages = _batch()
  with pytest.raises(ValueError, match="clip_max"):
    losses.cispo_loss(logps, behavior_logps, advantages, clip_max=clip_max)


def test_shapes_that_would_broadcast_silently_are_refused():
  logps, behavior_logps, advantages = _batch()
  refused = (TypeError, ValueError)
  per_token = jnp.ones((T,), jnp.float32)
  with pytest.raises(refused):
    losses.reinforce_loss(logps, per_token)
  with pytest.raises(refused):
    losses.cispo_loss(logps, behavior_logps, per_token, clip_max=5.0)
  with pytest.raises(refused):
    losses.cispo_loss(logps, behavior_logps.T, advantages, clip_max=5.0)
  with pytest.raises(refused):
    losses.cispo_loss(logps, behavior_logps[:, :1], advantages, clip_max=5.0)
  with pytest.raises(refused):
    losses.reinforce_loss(logps[0], advantages)


_WITHOUT_HOOK = """
import jax.numpy as jnp
from scalerl_jax.objectives import (
  advantages, aggregation, filters, logprobs, losses)

row, block = jnp.ones((5,)), jnp.ones((3, 5))
calls = {
  "reinforce": lambda: losses.reinforce_loss(block, row),
  "cispo": lambda: losses.cispo_loss(block, block.T, row[:3], clip_max=5.0),
  "cispo column": lambda: losses.cispo_loss(
    block, block[:, :1], row[:3], clip_max=5.0),
  "token_logps": lambda: logprobs.token_logps(
    jnp.ones((3, 5, 7)), jnp.zeros((5, 3), jnp.int32)),
  "token_logps row": lambda: logprobs.token_logps(
    jnp.ones((3, 5, 7)), jnp.zeros((1, 5), jnp.int32)),
  "weights": lambda: aggregation.aggregation_weights(
    row > 0, group_size=1, how="token_average"),
  "advantages": lambda: advantages.group_advantages(
    block, group_size=1, normalization="none"),
  "keep": lambda: advantages.group_advantages(
    row, group_size=1, normalization="none", keep=row[:3] > 0),
  "filter": lambda: filters.zero_variance_keep(block, group_size=1),
}
wrong = []
for name, call in calls.items():
  try:
    call()
    wrong.append(name + " accepted a wrong shape")
  except Exception as error:
    if type(error) is not ValueError:
      wrong.append(name + " raised " + repr(error))
raise SystemExit("; ".join(wrong) or 0)
"""


def test_shapes_are_checked_without_the_type_hook():
  # Users do not run under jaxtyping's import hook; the checks are ours.
  root = Path(losses.__file__).parents[2]
  environment = {**os.environ, "PYTHONPATH": str(root)}
  done = subprocess.run(
    [sys.executable, "-c", _WITHOUT_HOOK],
    env=environment,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
