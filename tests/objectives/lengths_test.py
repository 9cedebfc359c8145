"""The length penalty against its scalar loop, and what it refuses."""

import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.objectives import lengths
from tests.reference import surrogates as reference


@pytest.mark.parametrize("kind", [jnp.int32, jnp.float32, bool])
def test_penalty_equals_the_scalar_loop(kind):
  sizes = np.arange(0, 19)
  correct = np.arange(19) % 3 != 0
  actual = lengths.length_penalty(
    jnp.asarray(sizes),
    jnp.asarray(correct, kind),
    max_length=14.0,
    cache_length=5.0,
  )
  expected = reference.length_penalty(sizes, correct, 14.0, 5.0)
  assert actual.dtype == jnp.float32
  np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


def test_the_papers_numbers():
  # L_max 14k, L_cache 2k: free up to 12k, half at 13k, all at 14k and beyond.
  sizes = jnp.asarray([11_999, 12_000, 13_000, 14_000, 20_000])
  actual = lengths.length_penalty(
    sizes, jnp.ones(5), max_length=14_000, cache_length=2_000
  )
  np.testing.assert_allclose(actual, [0.0, 0.0, -0.5, -1.0, -1.0], atol=1e-6)


def test_wrong_completions_are_not_punished_twice():
  actual = lengths.length_penalty(
    jnp.asarray([3, 99]), jnp.zeros(2), max_length=14, cache_length=2
  )
  assert not actual.any()


@pytest.mark.parametrize("cache_length", [0.0, -2.0, 15.0])
def test_a_cache_outside_the_budget_is_refused(cache_length):
  with pytest.raises(ValueError, match="cache_length must be above 0"):
    lengths.length_penalty(
      jnp.ones(2), jnp.ones(2), max_length=14, cache_length=cache_length
    )


def test_other_shapes_are_refused():
  with pytest.raises((TypeError, ValueError)):
    lengths.length_penalty(
      jnp.ones(3), jnp.ones(5), max_length=14, cache_length=2
    )
