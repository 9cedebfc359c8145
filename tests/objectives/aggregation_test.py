"""Weights of the four averages, against nested means and by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.objectives import aggregation
from tests.reference import aggregation as reference

AVERAGES = ("sample_average", "prompt_average", "token_average")
HOWS = (*AVERAGES, "constant")
MAX_TOKENS = 11

# Two groups of three: lengths 1, 5, 2 and an empty row, 4 with a hole, 3.
MASK = [
  [1, 0, 0, 0, 0],
  [1, 1, 1, 1, 1],
  [0, 1, 1, 0, 0],
  [0, 0, 0, 0, 0],
  [1, 1, 0, 1, 1],
  [0, 0, 1, 1, 1],
]


# Jitted: one compilation a shape instead of one an operation and shape.
_aggregation_weights = jax.jit(
  aggregation.aggregation_weights,
  static_argnames=("group_size", "how", "max_tokens"),
)


def _weights(mask, how, group_size, jit=True):
  function = _aggregation_weights if jit else aggregation.aggregation_weights
  return function(
    jnp.asarray(mask, bool),
    group_size=group_size,
    how=how,
    max_tokens=MAX_TOKENS if how == "constant" else None,
  )


def _expected(mask, how, group_size):
  max_tokens = MAX_TOKENS if how == "constant" else None
  return np.asarray(reference.weights(mask, group_size, how, max_tokens))


@pytest.mark.parametrize("group_size", [1, 2, 3, 6])
@pytest.mark.parametrize("how", HOWS)
def test_weights_are_the_derivatives_of_the_nested_means(how, group_size):
  actual = _weights(MASK, how, group_size)
  assert actual.shape == (6, 5)
  assert actual.dtype == jnp.float32
  np.testing.assert_allclose(
    actual, _expected(MASK, how, group_size), rtol=1e-6
  )


@pytest.mark.parametrize("how", HOWS)
def test_the_weighted_sum_is_the_average_of_the_paper(how):
  rng = np.random.default_rng(0)
  losses = rng.standard_normal((6, 5))
  expected = reference.average(
    losses.tolist(), MASK, 3, how, MAX_TOKENS if how == "constant" else None
  )
  actual = (np.asarray(_weights(MASK, how, 3), np.float64) * losses).sum()
  np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_weights_by_hand():
  # Groups of 2: lengths 1 and 3, then an empty row and 2.
  mask = [[1, 0, 0], [1, 1, 1], [0, 0, 0], [0, 1, 1]]
  by_hand = {
    "sample_average": [1 / 3, 1 / 9, 0.0, 1 / 6],
    "prompt_average": [1 / 8, 1 / 8, 0.0, 1 / 4],
    "token_average": [1 / 6, 1 / 6, 0.0, 1 / 6],
    "constant": [1 / 33, 1 / 33, 0.0, 1 / 33],
  }
  for how, of_row in by_hand.items():
    expected = np.asarray(mask) * np.asarray(of_row)[:, None]
    np.testing.assert_allclose(_weights(mask, how, 2), expected, rtol=1e-6)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
  bits=st.lists(st.booleans(), min_size=30, max_size=30),
  group_size=st.sampled_from([1, 2, 3]),
  how=st.sampled_from(HOWS),
)
def test_weights_of_any_mask_equal_the_scalar_loop(bits, group_size, how):
  mask = np.reshape(bits, (6, 5)).tolist()
  actual = np.asarray(_weights(mask, how, group_size), np.float64)
  np.testing.assert_allclose(
    actual, _expected(mask, how, group_size), rtol=1e-5
  )
  assert (actual[~np.asarray(mask)] == 0.0).all()
  if how in AVERAGES:
    np.testing.assert_allclose(
      actual.sum(), 1.0 if np.any(mask) else 0.0, rtol=1e-5
    )


# XLA turns 0/0 into a select and bfloat16 counts into float32 when it compiles
# the whole, so what could go wrong is also run operation by operation.
@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("how", HOWS)
def test_an_empty_batch_gives_zeros(how, jit):
  actual = np.asarray(_weights(np.zeros((6, 5)), how, 3, jit))
  assert actual.shape == (6, 5)
  assert (actual == 0.0).all()


@pytest.mark.parametrize("how", HOWS)
def test_empty_rows_and_groups_do_not_count(how):
  # The same tokens with a group that has nothing in mask, and without it.
  alone = _expected(MASK[3:], how, 3)
  with_empty = [[0] * 5] * 3 + MASK[3:] + [[0] * 5] * 3
  actual = np.asarray(_weights(with_empty, how, 3))
  assert (actual[:3] == 0.0).all()
  assert (actual[6:] == 0.0).all()
  np.testing.assert_allclose(actual[3:6], alone, rtol=1e-6)


@pytest.mark.parametrize("how", HOWS)
def test_groups_of_one_completion(how):
  # With one completion a prompt, prompt and sample averages are one thing.
  actual = _weights(MASK, how, 1)
  same = "sample_average" if how == "prompt_average" else how
  np.testing.assert_allclose(actual, _expected(MASK, same, 1), rtol=1e-6)


def test_groups_are_contiguous_rows():
  # Rows 0-1 are one prompt (1 + 3 tokens), rows 2-3 another (1 + 1).
  mask = [[1, 0, 0], [1, 1, 1], [1, 0, 0], [0, 0, 1]]
  weights = np.asarray(_weights(mask, "prompt_average", 2))
  np.testing.assert_allclose(weights[:2].sum(), 0.5, rtol=1e-6)
  np.testing.assert_allclose(weights[0, 0], 1 / 8, rtol=1e-6)
  np.testing.assert_allclose(weights[2, 0], 1 / 4, rtol=1e-6)


def test_the_four_averages_differ_where_lengths_differ():
  found = {how: np.asarray(_expected(MASK, how, 3)) for how in HOWS}
  for how, expected in found.items():
    actual = np.asarray(_weights(MASK, how, 3))
    for other, unexpected in found.items():
      assert np.allclose(actual, expected, atol=1e-6)
      assert how == other or not np.allclose(actual, unexpected, atol=1e-3)


def test_prompt_average_is_token_average_for_equal_token_totals():
  mask = [[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 1, 1]]
  for how in ("prompt_average", "token_average"):
    np.testing.assert_allclose(
      _weights(mask, how, 2), np.asarray(mask) / 8.0, rtol=1e-6
    )


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("how", HOWS)
def test_weights_stay_exact_for_long_batches(how, jit):
  # Lengths that bfloat16 (8 bits) cannot hold; it would also stop at 256.
  mask = np.ones((16, 4099), bool)
  mask[3, 1003:] = False
  tokens = np.where(np.arange(16) == 3, 1003, 4099)
  of_row = {
    "sample_average": 1.0 / (16 * tokens),
    "prompt_average": 1.0 / (4 * np.repeat(tokens.reshape(4, 4).sum(1), 4)),
    "token_average": np.full(16, 1.0 / tokens.sum()),
    "constant": np.full(16, 1.0 / (16 * MAX_TOKENS)),
  }[how]
  np.testing.assert_allclose(
    _weights(mask, how, 4, jit), mask * of_row[:, None], rtol=1e-5
  )


def test_weights_are_the_same_without_jit():
  for how in HOWS:
    np.testing.assert_allclose(
      _weights(MASK, how, 3, jit=False), _expected(MASK, how, 3), rtol=1e-6
    )


def test_an_unknown_average_is_refused_with_the_list():
  with pytest.raises(ValueError, match="token_mean") as error:
    _weights(MASK, "token_mean", 3)
  for how in HOWS:
    assert how in str(error.value)


@pytest.mark.parametrize("group_size", [4, 0, -3])
def test_a_batch_that_groups_do_not_divide_is_refused(group_size):
  with pytest.raises(ValueError, match="group_size"):
    _weights(MASK, "token_average", group_size)


def test_max_tokens_is_required_for_constant():
  with pytest.raises(ValueError, match="max_tokens"):
    aggregation.aggregation_weights(
      jnp.asarray(MASK, bool), group_size=3, how="constant"
    )


@pytest.mark.parametrize("how", AVERAGES)
def test_max_tokens_is_refused_elsewhere(how):
  with pytest.raises(ValueError, match="max_tokens"):
    aggregation.aggregation_weights(
      jnp.asarray(MASK, bool), group_size=3, how=how, max_tokens=MAX_TOKENS
    )


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_max_tokens_is_positive(max_tokens):
  with pytest.raises(ValueError, match="max_tokens"):
    aggregation.aggregation_weights(
      jnp.asarray(MASK, bool),
      group_size=3,
      how="constant",
      max_tokens=max_tokens,
    )


def test_a_mask_of_another_rank_is_refused():
  with pytest.raises((TypeError, ValueError)):
    aggregation.aggregation_weights(
      jnp.ones((6,), bool), group_size=3, how="token_average"
    )
