"""Group advantages against the scalar loop; constant groups are exactly 0."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.objectives import advantages
from tests.reference import advantages as reference

NORMALIZATIONS = ("prompt_level", "batch_level", "none")
G = 3
# Four groups of three: mixed, constant, mixed with another spread, mixed.
REWARDS = [1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 0.5, -0.25, 2.0, -1.0, 1.0, 1.0]
KEEP = [True] * 3 + [False] * 3 + [True] * 3 + [False] * 3


# Jitted: one compilation a shape instead of one an operation and shape.
_group_advantages = jax.jit(
  advantages.group_advantages, static_argnames=("group_size", "normalization")
)


def _advantages(rewards, normalization, group_size=G, keep=None):
  return _group_advantages(
    jnp.asarray(rewards, jnp.float32),
    group_size=group_size,
    normalization=normalization,
    keep=None if keep is None else jnp.asarray(keep, bool),
  )


@pytest.mark.parametrize("keep", [None, KEEP])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_advantages_equal_the_scalar_loop(normalization, keep):
  actual = _advantages(REWARDS, normalization, keep=keep)
  expected = reference.group_advantages(REWARDS, G, normalization, keep)
  assert actual.shape == (12,)
  assert actual.dtype == jnp.float32
  np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_advantages_by_hand():
  # 1, -1, -1, -1: mean -1/2; centred 3/2, -1/2 (3x); population std √(3/4).
  rewards = [1.0, -1.0, -1.0, -1.0]
  centered = np.asarray([1.5, -0.5, -0.5, -0.5])
  by_hand = {
    "none": centered,
    "prompt_level": centered / np.sqrt(0.75),
    # A constant group beside it: 8 advantages, Σ x² = 3, std √(3/8).
    "batch_level": centered / np.sqrt(3 / 8),
  }
  for normalization, expected in by_hand.items():
    actual = _advantages([*rewards, 1.0, 1.0, 1.0, 1.0], normalization, 4)
    np.testing.assert_allclose(actual[:4], expected, rtol=1e-6)
    assert (np.asarray(actual[4:]) == 0.0).all()


def test_batch_level_divides_by_the_kept_advantages_only():
  # Dropping the constant group takes its zeros out of the deviation: √(3/4).
  rewards = [1.0, -1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 1.0]
  keep = [True] * 4 + [False] * 4
  actual = _advantages(rewards, "batch_level", 4, keep)
  np.testing.assert_allclose(
    actual[:4], np.asarray([1.5, -0.5, -0.5, -0.5]) / np.sqrt(0.75), rtol=1e-6
  )


@pytest.mark.parametrize("size", [1, 3, 7, 48])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 12345.678])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_rounding_noise_leaves_a_constant_group_at_zero(
  normalization, reward, size
):
  # 0.1 summed 3, 7 or 48 times and divided is not 0.1 in float32.
  beside = [reward] * size + [1.0, *([-1.0] * (size - 1))]
  expected = reference.group_advantages(
    np.float32(beside).tolist(), size, normalization
  )
  actual = _advantages(beside, normalization, size)
  assert (np.asarray(actual[:size]) == 0.0).all()
  np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
  reward=st.floats(width=32, allow_nan=False, allow_infinity=False),
  size=st.sampled_from([1, 7, 48]),
  normalization=st.sampled_from(NORMALIZATIONS),
)
def test_any_constant_group_is_exactly_zero(reward, size, normalization):
  actual = np.asarray(_advantages([reward] * size, normalization, size))
  assert (actual == 0.0).all(), actual


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
  rewards=st.lists(
    st.sampled_from([-1.0, -0.3, 0.1, 1.0]), min_size=12, max_size=12
  ),
  dropped=st.sets(st.integers(0, 3)),
  normalization=st.sampled_from(NORMALIZATIONS),
)
def test_any_rewards_equal_the_scalar_loop(rewards, dropped, normalization):
  rewards = np.float32(rewards).tolist()
  keep = [row // G not in dropped for row in range(12)]
  np.testing.assert_allclose(
    _advantages(rewards, normalization, keep=keep),
    reference.group_advantages(rewards, G, normalization, keep),
    rtol=1e-5,
    atol=1e-6,
  )


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_a_group_that_is_not_kept_has_no_advantage_and_no_say(normalization):
  kept = reference.group_advantages(
    REWARDS[:3] + REWARDS[6:9], G, normalization
  )
  for garbage in (0.0, 1e6):
    rewards = list(REWARDS)
    rewards[3], rewards[10] = garbage, -garbage
    actual = np.asarray(_advantages(rewards, normalization, keep=KEEP))
    assert (actual[3:6] == 0.0).all()
    assert (actual[9:] == 0.0).all()
    np.testing.assert_allclose(
      np.concatenate([actual[:3], actual[6:9]]), kept, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_nothing_kept_gives_zeros(normalization):
  actual = np.asarray(_advantages(REWARDS, normalization, keep=[False] * 12))
  assert (actual == 0.0).all()


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_groups_of_one_completion_have_no_advantage(normalization):
  actual = np.asarray(_advantages(REWARDS, normalization, group_size=1))
  assert (actual == 0.0).all()


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_a_shift_of_a_groups_rewards_changes_nothing(normalization):
  expected = reference.group_advantages(REWARDS, G, normalization)
  shifted = np.asarray(REWARDS) + np.repeat([8.0, -4.0, 2.0, 0.5], G)
  np.testing.assert_allclose(
    _advantages(shifted, normalization), expected, rtol=1e-5, atol=1e-6
  )


@pytest.mark.parametrize("scale", [1e-4, 0.5, 1e4])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_only_unnormalised_advantages_follow_the_scale(normalization, scale):
  expected = np.asarray(reference.group_advantages(REWARDS, G, normalization))
  if normalization == "none":
    expected = expected * scale
  actual = _advantages(np.asarray(REWARDS) * scale, normalization)
  np.testing.assert_allclose(
    actual / expected.std(), expected / expected.std(), rtol=1e-5, atol=1e-5
  )


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_a_permutation_within_a_group_permutes_its_advantages(normalization):
  order = np.asarray([2, 0, 1, 3, 4, 5, 7, 8, 6, 10, 9, 11])
  expected = reference.group_advantages(REWARDS, G, normalization)
  actual = _advantages(np.asarray(REWARDS)[order], normalization)
  np.testing.assert_allclose(
    actual, np.asarray(expected)[order], rtol=1e-5, atol=1e-6
  )


def test_prompt_level_uses_the_deviation_of_its_own_group():
  # The spread of one group leaves another's prompt_level advantages alone.
  wide = [*REWARDS[:9], -100.0, 100.0, 100.0]
  expected = reference.group_advantages(REWARDS[:3], G, "prompt_level")
  np.testing.assert_allclose(
    _advantages(wide, "prompt_level")[:3], expected, rtol=1e-5
  )
  assert abs(float(_advantages(wide, "batch_level")[0])) < 0.1


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_advantages_are_the_same_without_jit(normalization):
  for rewards, size, keep in (
    (REWARDS, G, KEEP),
    ([1.0] * 12, G, [False] * 12),
    ([0.1] * 48, 48, [True] * 48),
  ):
    actual = advantages.group_advantages(
      jnp.asarray(rewards, jnp.float32),
      group_size=size,
      normalization=normalization,
      keep=jnp.asarray(keep),
    )
    expected = reference.group_advantages(
      np.float32(rewards).tolist(), size, normalization, keep
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    if len(set(rewards)) == 1:
      assert (np.asarray(actual) == 0.0).all()


def test_an_unknown_normalization_is_refused_with_the_list():
  with pytest.raises(ValueError, match="whiten") as error:
    _advantages(REWARDS, "whiten")
  for normalization in NORMALIZATIONS:
    assert normalization in str(error.value)


@pytest.mark.parametrize("group_size", [5, 0, -3])
def test_rewards_that_groups_do_not_divide_are_refused(group_size):
  with pytest.raises(ValueError, match="group_size"):
    _advantages(REWARDS, "none", group_size)


def test_rewards_and_keep_of_other_shapes_are_refused():
  refused = (TypeError, ValueError)
  with pytest.raises(refused):
    _advantages(np.reshape(REWARDS, (4, 3)), "none")
  with pytest.raises(refused):
    _advantages(REWARDS, "none", keep=[True] * 4)
