"""Entering groups: each in one row of its shard, in sizes that are compiled."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.config import SamplerConfig
from scalerl_jax.sampling.entering import (
  Group,
  check_prompts,
  entries,
  no_entry,
)
from scalerl_jax.sampling.occupancy import Occupancy

TP, TC = 5, 9


def _groups(count):
  rng = np.random.default_rng(count)
  return [
    Group(
      index=n,
      uid=100 + n,
      first_sample=7 * n,
      tokens=rng.integers(1, 50, 1 + n % TP).astype(np.int32),
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
  sizes = sorted({shards * n for n in (1, min(2, full), full)})
  if data.draw(st.booleans()):
    sizes = sizes[:1]  # several entries, one after the other
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
    rows = len(entry.prompts)
    assert rows in sizes
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
      padded = np.pad(group.tokens, (0, TP - len(group.tokens)))
      assert entry.prompts[row].tolist() == padded.tolist()
      assert entry.members[row].tolist() == given_slots[number].tolist()
      for member, slot in enumerate(given_slots[number]):
        source[slot] = row * size + member
      seen.append(number)
    np.testing.assert_array_equal(entry.source, source)
    padding = np.setdiff1d(np.arange(rows), used)
    assert (entry.lengths[padding] == 1).all()
    assert (entry.budgets == TC).all()
  assert sorted(seen) == list(range(len(groups)))
  # As few as the fullest shard needs.
  most = max(np.bincount(given_places * shards // places), default=0)
  assert len(found) == -(-most * shards // sizes[-1])


def test_nobody_enters_with_an_empty_entry():
  config = SamplerConfig(
    slots=12, max_prompt_tokens=TP, max_completion_tokens=TC
  )
  entry = no_entry(4, config, places=6, group_size=3)
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
    check_prompts(groups, TP)
