"""Programs are shared by those who have equal settings."""

import jax
import jax.numpy as jnp
import pytest

from scalerl_jax.models.static import with_settings


def _scaled(x, *, factor):
  _scaled.traces += 1
  return factor * x


def test_equal_settings_are_traced_once_and_others_apart():
  _scaled.traces = 0
  for factor, traces in ((2.0, 1), (2.0, 1), (3.0, 2), (2.0, 2)):
    program = jax.jit(with_settings(_scaled, factor=factor))
    assert program(jnp.float32(5.0)) == factor * 5.0
    assert _scaled.traces == traces


def test_settings_that_cannot_be_compared_are_refused():
  with pytest.raises(TypeError, match="unhashable"):
    with_settings(_scaled, factor=[2.0])
