"""Entering groups: each in one row of its shard, in sizes that are compiled."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.config import SamplerConfig
from scalerl_jax.sampling.entering import (
  OVERHEAD,
  Group,
  Sizes,
  check_groups,
  entries,
  no_entry,
  sizes_of,
  split,
)
from scalerl_jax.sampling.occupancy import Occupancy

TP, TC = 5, 9
CONFIG = SamplerConfig(max_prompt_tokens=TP, max_completion_tokens=TC)


def _groups(count):
  rng = np.random.default_rng(count)
  return [
    Group(
      index=n,
      uid=100 + n,
      first_sample=7 * n,
      tokens=rng.integers(1, 50, 1 + n % TP).astype(np.int32),
      budget=n % 3,
    )
    for n in range(count)
  ]


@settings(max_examples=60)
@given(data=st.data())
def test_every_group_is_in_one_entry_in_its_shards_rows(data):
  shards = data.draw(st.integers(1, 3))
  size = data.draw(st.integers(1, 4))
  full = data.draw(st.integers(1, 5))  # groups of a shard
  slots, places = shards * full * size, 2 * shards * full
  config = SamplerConfig(
    slots=slots, max_prompt_tokens=TP, max_completion_tokens=TC
  )
  rows = sorted({shards * n for n in (1, min(2, full), full)})
  if data.draw(st.booleans()):
    rows = rows[:1]  # several entries, one after the other
  sizes = Sizes(tuple(rows), data.draw(st.sampled_from([(TP,), (2, TP)])))
  occupancy = Occupancy(slots, places, size, shards)
  groups = _groups(data.draw(st.integers(0, shards * full)))
  given_places, given_slots = occupancy.enter([g.index for g in groups])
  found = list(
    entries(
      groups,
      given_places,
      given_slots,
      config,
      sizes=sizes,
      held_places=places,
      shards=shards,
    )
  )
  seen = []
  for entry in found:
    rows, width = entry.prompts.shape
    assert rows in sizes.prompts
    assert width in sizes.widths
    used = np.flatnonzero(entry.places < places)
    assert used.size
    source = np.full((slots,), -1)
    for row in used:
      shard = row * shards // rows
      (number,) = np.flatnonzero(given_places == entry.places[row])
      group = groups[number]
      assert entry.places[row] * shards // places == shard
      assert set(given_slots[number] * shards // slots) == {shard}
      assert entry.uids[row] == group.uid
      assert entry.first_samples[row] == group.first_sample
      assert entry.lengths[row] == len(group.tokens)
      padded = np.pad(group.tokens, (0, width - len(group.tokens)))
      assert entry.prompts[row].tolist() == padded.tolist()
      # In the narrowest width that holds it.
      assert not any(len(group.tokens) <= w < width for w in sizes.widths)
      assert entry.budgets[row] == (group.budget or TC)
      assert entry.members[row].tolist() == given_slots[number].tolist()
      for member, slot in enumerate(given_slots[number]):
        source[slot] = row * size + member
      seen.append(number)
    np.testing.assert_array_equal(entry.source, source)
    padding = np.setdiff1d(np.arange(rows), used)
    assert (entry.lengths[padding] == 1).all()
    assert (entry.budgets[padding] == TC).all()
  assert sorted(seen) == list(range(len(groups)))


def test_few_sizes_waste_little():
  config = SamplerConfig(slots=256, max_prompt_tokens=256)
  sizes = sizes_of(config, groups=256, shards=2)
  assert sizes == Sizes((4, 16, 64, 256), (64, 128, 256))
  short = dataclasses.replace(config, max_prompt_tokens=40)
  assert sizes_of(short, groups=256, shards=1).widths == (40,)
  occupancy = Occupancy(256, 256, 1, 2)
  for count, told in ((1, 4), (5, 8), (37, 40), (100, 100), (256, 256)):
    groups = [Group(n, n, 0, np.zeros((60,), np.int32)) for n in range(count)]
    places, slots = occupancy.enter(range(count))
    found = entries(
      groups, places, slots, config, sizes=sizes, held_places=256, shards=2
    )
    rows = sum(len(entry.prompts) for entry in found)
    assert rows == told
    occupancy.leave(slots.reshape(-1))


@given(
  rows=st.integers(1, 30),
  sizes=st.sets(st.integers(1, 12), min_size=1, max_size=3),
  width=st.integers(1, 400),
)
def test_no_other_insertions_of_so_many_rows_cost_less(rows, sizes, width):
  def cost(taken):
    return sum(size * width + OVERHEAD for size in taken)

  sizes = tuple(sorted(sizes))
  found = split(rows, sizes, width)
  assert sum(found) >= rows
  assert list(found) == sorted(found, reverse=True)
  assert set(found) <= set(sizes)
  for count in range(1, 5):
    for other in itertools.combinations_with_replacement(sizes, count):
      if sum(other) >= rows:
        assert cost(found) <= cost(other)


def test_nobody_enters_with_an_empty_entry():
  config = SamplerConfig(
    slots=12, max_prompt_tokens=TP, max_completion_tokens=TC
  )
  entry = no_entry(4, 3, config, places=6, group_size=3)
  assert entry.prompts.shape == (4, 3)
  assert (entry.places == 6).all()
  assert (entry.source == -1).all()
  assert entry.members.shape == (4, 3)
  assert {part.dtype for part in entry} == {np.dtype(np.int32)}


@pytest.mark.parametrize("length", [0, TP + 1])
def test_a_prompt_of_the_wrong_length_is_refused(length):
  groups = _groups(2)
  groups.append(Group(2, 77, 0, np.zeros((length,), np.int32)))
  with pytest.raises(
    ValueError, match=rf"prompt 77 has {length} tokens; .*1 to .*\({TP}\)"
  ):
    check_groups(groups, CONFIG)


@pytest.mark.parametrize("budget", [-1, TC + 1])
def test_a_budget_over_the_samplers_is_refused(budget):
  group = Group(2, 77, 0, np.ones((1,), np.int32), budget=budget)
  with pytest.raises(
    ValueError, match=rf"prompt 77 has a budget of {budget} tokens; .*\({TC}\)"
  ):
    check_groups([group], CONFIG)
