"""Clipped surrogates, GSPO and K3: against scalar loops, and identities."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.objectives import aggregation, losses
from tests.reference import surrogates as reference

B, T = 3, 5
OFFSETS = [(0.2, 0.2), (0.2, 0.26), (1.0, 3.0), (4e-3, 5e-3)]


def _batch(gap=0.4):
  """logps, behavior_logps, advantages of both signs and 0, a ragged mask."""
  rng = np.random.default_rng(0)
  logps = -rng.exponential(2.0, (B, T))
  behavior_logps = logps + gap * rng.standard_normal((B, T))
  mask = np.arange(T) < np.array([[5], [3], [1]])
  advantages = [1.5, -0.75, 2.0]
  arrays = (jnp.asarray(x, jnp.float32) for x in (logps, behavior_logps))
  return *arrays, jnp.asarray(advantages), jnp.asarray(mask)


def _lists(*arrays):
  return [np.asarray(array, np.float64).tolist() for array in arrays]


@pytest.mark.parametrize(("clip_low", "clip_high"), OFFSETS)
def test_surrogate_equals_the_scalar_loop_value_and_gradient(
  clip_low, clip_high
):
  logps, behavior_logps, advantages, _ = _batch()
  values, slopes = reference.surrogate(
    *_lists(logps, behavior_logps, advantages), clip_low, clip_high
  )

  def loss(x):
    return losses.clipped_surrogate_loss(
      x, behavior_logps, advantages, clip_low=clip_low, clip_high=clip_high
    )

  np.testing.assert_allclose(loss(logps), values, rtol=1e-5, atol=1e-6)
  gradient = jax.grad(lambda x: loss(x).sum())(logps)
  np.testing.assert_allclose(gradient, slopes, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("clip_low", "clip_high"), OFFSETS)
@pytest.mark.parametrize("gap", [0.001, 0.4])
def test_gspo_equals_the_scalar_loop_value_and_gradient(
  clip_low, clip_high, gap
):
  logps, behavior_logps, advantages, mask = _batch(gap)
  values, slopes = reference.gspo(
    *_lists(logps, behavior_logps, advantages, mask), clip_low, clip_high
  )

  def loss(x):
    return losses.gspo_loss(
      x,
      behavior_logps,
      advantages,
      mask,
      clip_low=clip_low,
      clip_high=clip_high,
    )

  np.testing.assert_allclose(loss(logps), values, rtol=1e-5, atol=1e-6)
  # The row's loss is any of its columns: the mean over T of equal numbers.
  gradient = jax.grad(lambda x: loss(x).mean(axis=1).sum())(logps)
  np.testing.assert_allclose(gradient, slopes, rtol=1e-5, atol=1e-6)


def test_gspo_proper_gives_every_token_of_a_completion_the_same_gradient():
  logps, behavior_logps, advantages, mask = _batch(0.0)
  weights = aggregation.aggregation_weights(
    mask, group_size=3, how="sample_average"
  )

  def objective(x):
    return jnp.sum(
      weights
      * losses.gspo_loss(
        x, behavior_logps, advantages, mask, clip_low=0.2, clip_high=0.2
      )
    )

  # On policy s = 1: -w·Â at each token that counts, as REINFORCE.
  gradient = jax.grad(objective)(logps)
  np.testing.assert_allclose(
    gradient, -weights * advantages[:, None], rtol=1e-5, atol=1e-7
  )


def test_on_policy_surrogate_is_reinforce():
  logps, _, advantages, _ = _batch()

  def surrogate(x):
    return losses.clipped_surrogate_loss(
      x, logps, advantages, clip_low=0.2, clip_high=0.2
    ).sum()

  reinforce = jax.grad(lambda x: losses.reinforce_loss(x, advantages).sum())
  np.testing.assert_allclose(
    jax.grad(surrogate)(logps), reinforce(logps), rtol=1e-6
  )


@pytest.mark.parametrize("length", [1, 2, 4])
def test_the_sequence_ratio_does_not_depend_on_length(length):
  # Repeated tokens, each twice as probable as when drawn: s = 2, not 2^n.
  logps = jnp.full((1, 4), -1.0)
  mask = jnp.arange(4)[None] < length
  ratio = losses.sequence_ratio(logps, logps - math.log(2.0), mask)
  np.testing.assert_allclose(ratio, [2.0], rtol=1e-6)


def test_what_the_mask_leaves_out_does_not_enter_the_sequence_ratio():
  logps, behavior_logps, _, mask = _batch()
  noise = jnp.where(mask, 0.0, 77.0)
  np.testing.assert_array_equal(
    losses.sequence_ratio(logps + noise, behavior_logps, mask),
    losses.sequence_ratio(logps, behavior_logps, mask),
  )
  empty = losses.sequence_ratio(logps, behavior_logps, jnp.zeros_like(mask))
  np.testing.assert_array_equal(empty, np.ones(B))


@pytest.mark.parametrize("sign", [-200.0, 200.0])
def test_extreme_log_ratios_give_finite_loss_and_gradient(sign):
  logps = jnp.full((1, T), -0.5)
  mask = jnp.ones((1, T), bool)
  for advantage in (1.0, -1.0):
    advantages = jnp.asarray([advantage])
    for loss in (
      lambda x, a: losses.clipped_surrogate_loss(
        x, logps - sign, a, clip_low=0.2, clip_high=0.2
      ),
      lambda x, a: losses.gspo_loss(
        x, logps - sign, a, mask, clip_low=0.2, clip_high=0.2
      ),
      lambda x, a: losses.behavior_kl(x, logps - sign),
    ):
      value, gradient = jax.value_and_grad(
        lambda x, loss=loss, a=advantages: loss(x, a).sum()
      )(logps)
      assert np.isfinite(value)
      assert np.isfinite(gradient).all()


def test_k3_equals_the_scalar_loop_and_is_never_negative():
  logps, behavior_logps, _, _ = _batch(2.0)
  actual = losses.behavior_kl(logps, behavior_logps)
  expected = reference.k3(*_lists(logps, behavior_logps))
  np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
  assert (actual >= 0).all()
  assert not losses.behavior_kl(logps, logps).any()


def test_k3_averages_to_the_divergence_of_the_sampler_from_the_policy():
  # Exact expectation over a three-letter alphabet, tokens drawn from μ.
  behavior = np.array([0.5, 0.3, 0.2])
  policy = np.array([0.2, 0.2, 0.6])
  estimates = losses.behavior_kl(
    jnp.log(jnp.asarray(policy))[None], jnp.log(jnp.asarray(behavior))[None]
  )
  divergence = float(np.sum(behavior * np.log(behavior / policy)))
  np.testing.assert_allclose(
    float(np.sum(behavior * np.asarray(estimates)[0])), divergence, rtol=1e-5
  )


@pytest.mark.parametrize(
  ("offsets", "name"),
  [
    ({"clip_low": -0.2, "clip_high": 0.2}, "clip_low must be in"),
    ({"clip_low": 0.0, "clip_high": 0.2}, "clip_low must be in"),
    ({"clip_low": 1.5, "clip_high": 0.2}, "clip_low must be in"),
    ({"clip_low": 0.2, "clip_high": 0.0}, "clip_high must be above 0"),
    ({"clip_low": 0.2, "clip_high": -0.2}, "clip_high must be above 0"),
  ],
)
def test_offsets_of_the_wrong_sign_are_refused(offsets, name):
  logps, behavior_logps, advantages, mask = _batch()
  with pytest.raises(ValueError, match=name):
    losses.clipped_surrogate_loss(logps, behavior_logps, advantages, **offsets)
  with pytest.raises(ValueError, match=name):
    losses.gspo_loss(logps, behavior_logps, advantages, mask, **offsets)
