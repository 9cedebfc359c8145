"""The own checks: what fits passes, what does not is named with its shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.objectives import checks


@pytest.mark.parametrize("shape", [(3, 5), (3, None), (None, None)])
def test_a_shape_that_fits_passes(shape):
  assert checks.check_shape("mask", jnp.ones((3, 5)), shape) is None


@pytest.mark.parametrize("shape", [(5, 3), (3,), (3, 5, 7), (None, 7), ()])
def test_another_shape_is_named_with_what_was_expected(shape):
  with pytest.raises(ValueError, match=r"must have shape .*, got \[3, 5\]"):
    checks.check_shape("mask", np.ones((3, 5)), shape)


@pytest.mark.parametrize(("size", "groups"), [(1, 6), (2, 3), (6, 1)])
def test_groups_are_counted(size, groups):
  assert checks.check_groups("rewards", jnp.ones((6, 5)), size) == groups


@pytest.mark.parametrize("size", [0, -2, 4, 7])
def test_a_group_size_that_does_not_divide_is_refused(size):
  with pytest.raises(ValueError, match=f"the 6 rows of rewards, got {size}"):
    checks.check_groups("rewards", jnp.ones((6, 5)), size)


def test_traced_values_cannot_be_looked_at():
  seen = []
  jax.jit(lambda x: seen.append(checks.is_concrete(x)) or x)(jnp.ones(3))
  assert seen == [False]
  assert checks.is_concrete(jnp.ones(3))
  assert checks.is_concrete(np.ones(3))
