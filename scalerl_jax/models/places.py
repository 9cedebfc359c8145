"""What a layer reads of its tokens' positions, and what decode steps share."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from scalerl_jax.config import ModelConfig
from scalerl_jax.models import layers


class Places(NamedTuple):
  """What the block reads of the tokens' positions."""

  cos: Array
  sin: Array
  temperature: Array | None  # of queries that do not rotate


class Prepared(NamedTuple):
  """What decode steps of the same weights share.

  Taken out of the loop by hand: XLA copies a layer out of its stack, and takes
  the cosines of every head, again at each step (10 % of one on a CPU).
  """

  layers: tuple[dict[str, Array], ...] | None  # None where they are scanned
  places: Places  # of positions 0, 1, 2, ...


def places_of(config: ModelConfig, positions: Int[Array, "*B"]) -> Places:
  """Rotations and query temperatures of these positions."""
  stretch = None
  if config.rope_factor != 1.0:
    stretch = layers.RopeStretch(
      config.rope_factor,
      config.rope_low_frequency,
      config.rope_high_frequency,
      config.rope_context,
    )
  cos, sin = layers.rope_angles(
    positions, config.head_width, config.rope_theta, stretch
  )
  temperature = None
  if config.query_temperature:
    temperature = layers.query_temperature(
      positions,
      scale=config.query_temperature,
      floor=config.query_temperature_floor,
    )
  return Places(cos, sin, temperature)


def pick_places(table: Places, positions: Int[Array, "*B"]) -> Places:
  """Of each position, out of those of 0, 1, 2, ..."""
  return jax.tree.map(
    lambda values: jnp.take(values, positions, axis=0, mode="clip"), table
  )


def table_places(
  config: ModelConfig, positions: Int[Array, "*B"], count: int
) -> Places:
  """Of positions below `count`, out of a table that is constant.

  Cosines of positions that are computed would be taken for every head.
  """
  table = places_of(config, jnp.arange(count, dtype=jnp.int32))
  return pick_places(table, positions)
