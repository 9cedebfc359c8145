"""Random numbers are addressed: no stream knows of another."""

import itertools

import numpy as np

from scalerl_jax.data.streams import Purpose, stream


def test_an_address_gives_the_same_numbers_whatever_was_drawn_before():
  first = stream(5, Purpose.ORDER, 3).random(7)
  stream(5, Purpose.ORDER, 2).random(1000)
  np.testing.assert_array_equal(first, stream(5, Purpose.ORDER, 3).random(7))


def test_every_part_of_the_address_counts():
  seeds = (0, 1, 2**63, 2**64 - 1)
  addresses = list(itertools.product(seeds, Purpose, (0, 1, 2**40)))
  drawn = {stream(*address).random(3).tobytes() for address in addresses}
  assert len(drawn) == len(addresses)


def test_neighbouring_indices_do_not_overlap():
  # A counter advanced by the index itself would repeat numbers, shifted.
  rows = [stream(0, Purpose.SUPERVISED, i).random(1000) for i in range(5)]
  assert len(np.unique(np.concatenate(rows))) == 5000
