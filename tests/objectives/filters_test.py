"""The zero-variance filter sees correctness, and says so when it does not."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.objectives import filters

# Every pattern of three answers, a group each: 8 groups, 24 completions.
PATTERNS = list(itertools.product([0, 1], repeat=3))
CORRECT = [answer for pattern in PATTERNS for answer in pattern]
# Kept: 0 < mean < 1, thus any pattern that holds both a 0 and a 1.
KEPT = [len(set(pattern)) == 2 for pattern in PATTERNS for _ in pattern]


@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.int32, jnp.float32])
def test_groups_with_right_and_wrong_answers_are_kept(dtype):
  keep = filters.zero_variance_keep(jnp.asarray(CORRECT, dtype), group_size=3)
  assert keep.shape == (24,)
  assert keep.dtype == jnp.bool_
  assert keep.tolist() == KEPT


def test_one_right_answer_in_sixteen_is_enough():
  # With ±1 rewards the mean is -0.875, and 0 < mean < 1 would drop the group.
  correct = [0.0] * 15 + [1.0] + [1.0] * 16 + [0.0] * 16
  keep = filters.zero_variance_keep(jnp.asarray(correct), group_size=16)
  assert keep.tolist() == [True] * 16 + [False] * 32


def test_rewards_instead_of_correctness_are_refused():
  rewards = 2.0 * jnp.asarray(CORRECT, jnp.float32) - 1.0
  with pytest.raises(ValueError, match="correct") as error:
    filters.zero_variance_keep(rewards, group_size=3)
  assert "reward" in str(error.value)


@pytest.mark.parametrize("value", [-1.0, 0.5, 2.0, float("nan")])
def test_a_single_value_other_than_zero_and_one_is_refused(value):
  correct = jnp.asarray(CORRECT, jnp.float32).at[17].set(value)
  with pytest.raises(ValueError, match="correct"):
    filters.zero_variance_keep(correct, group_size=3)


def test_integer_rewards_are_refused():
  with pytest.raises(ValueError, match="correct"):
    filters.zero_variance_keep(
      jnp.asarray([1, -1, -1, 1, 1, -1], jnp.int32), group_size=3
    )


def test_groups_are_contiguous_rows():
  # Row-major groups of 2 are all constant; strided ones would all be mixed.
  keep = filters.zero_variance_keep(
    jnp.asarray([1, 1, 0, 0], jnp.int32), group_size=2
  )
  assert keep.tolist() == [False] * 4
  keep = filters.zero_variance_keep(
    jnp.asarray([1, 0, 1, 0], jnp.int32), group_size=2
  )
  assert keep.tolist() == [True] * 4


def test_groups_of_one_completion_are_never_kept():
  keep = filters.zero_variance_keep(
    jnp.asarray(CORRECT, jnp.int32), group_size=1
  )
  assert keep.tolist() == [False] * 24


def test_a_batch_without_a_usable_group_keeps_nothing():
  for answer in (0, 1):
    keep = filters.zero_variance_keep(
      jnp.full((12,), answer, jnp.int32), group_size=3
    )
    assert keep.tolist() == [False] * 12


@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.int32, jnp.float32])
def test_the_filter_is_traceable_with_static_shapes(dtype):
  jitted = jax.jit(lambda c: filters.zero_variance_keep(c, group_size=3))
  keep = jitted(jnp.asarray(CORRECT, dtype))
  np.testing.assert_array_equal(keep, KEPT)


@pytest.mark.parametrize("group_size", [5, 0, -3])
def test_a_batch_that_groups_do_not_divide_is_refused(group_size):
  with pytest.raises(ValueError, match="group_size"):
    filters.zero_variance_keep(
      jnp.asarray(CORRECT, jnp.int32), group_size=group_size
    )


def test_correctness_of_another_rank_is_refused():
  with pytest.raises((TypeError, ValueError)):
    filters.zero_variance_keep(
      jnp.asarray(CORRECT, jnp.int32).reshape(8, 3), group_size=3
    )


def test_completions_that_do_not_count_say_nothing_of_their_group():
  correct = jnp.asarray([1, 1, 0, 1, 0, 0, 0, 1, 1], jnp.int32)
  counted = jnp.asarray([1, 1, 0, 1, 1, 0, 0, 0, 0], bool)
  keep = filters.zero_variance_keep(correct, group_size=3, counted=counted)
  assert keep.tolist() == [False] * 3 + [True] * 3 + [False] * 3
  # The same groups without the rows that do not count.
  for group, kept in ((slice(0, 2), False), (slice(3, 5), True)):
    alone = filters.zero_variance_keep(correct[group], group_size=2)
    assert alone.tolist() == [kept] * 2
