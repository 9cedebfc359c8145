"""Places: the rotations and query temperatures of a policy's positions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from scalerl_jax.models import layers
from scalerl_jax.models.places import places_of
from tests.helpers import SHAPE, small_policy

POSITIONS = np.array([[0, 3, 11], [70, 2, 9]], np.int32)


def test_positions_are_turned_by_the_angles_of_the_width():
  places = places_of(SHAPE, jnp.asarray(POSITIONS))
  assert places.temperature is None
  half = SHAPE.head_width // 2
  for row, column in np.ndindex(POSITIONS.shape):
    for i in range(half):
      angle = POSITIONS[row, column] * SHAPE.rope_theta ** (-i / half)
      np.testing.assert_allclose(
        places.cos[row, column, i], np.cos(angle), atol=1e-5
      )
      np.testing.assert_allclose(
        places.sin[row, column, i], np.sin(angle), atol=1e-5
      )


def test_stretched_rotations_are_those_of_the_stretch():
  shape = dataclasses.replace(SHAPE, rope_factor=4.0, rope_context=16)
  stretch = layers.RopeStretch(
    4.0, shape.rope_low_frequency, shape.rope_high_frequency, 16
  )
  cos, sin = layers.rope_angles(
    jnp.asarray(POSITIONS), shape.head_width, shape.rope_theta, stretch
  )
  places = places_of(shape, jnp.asarray(POSITIONS))
  np.testing.assert_array_equal(places.cos, cos)
  np.testing.assert_array_equal(places.sin, sin)
  plain = places_of(SHAPE, jnp.asarray(POSITIONS))
  assert np.abs(np.asarray(places.cos - plain.cos)).max() > 1e-2


def test_query_temperatures_grow_with_the_logarithm_of_the_position():
  shape = dataclasses.replace(
    SHAPE, query_temperature=0.1, query_temperature_floor=8
  )
  found = places_of(shape, jnp.asarray(POSITIONS)).temperature
  expected = 1.0 + 0.1 * np.log1p(np.floor((POSITIONS + 1.0) / 8.0))
  np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_table_made_once_holds_the_places_of_every_position():
  shape = dataclasses.replace(
    SHAPE, query_temperature=0.1, query_temperature_floor=8
  )
  prepared = small_policy(shape).prepare(75)
  expected = places_of(shape, jnp.asarray(POSITIONS))
  found = jax.tree.map(lambda table: table[POSITIONS], prepared.places)
  jax.tree.map(np.testing.assert_array_equal, found, expected)
  assert len(prepared.layers) == shape.num_layers
