"""Slots and prompt places: given to whole groups, taken back by rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.sampling.occupancy import FREE, Occupancy


class Ledger:
  """The same account kept with sets; who may sit where is up to the room."""

  def __init__(self, slots, places, group_size, shards):
    self.slots, self.places, self.group_size = slots, places, group_size
    self.shards = shards
    self.rows = {}  # slot -> (group, row, age)
    self.held = {}  # place -> group

  def shard(self, slot):
    return slot * self.shards // self.slots

  def shard_of_place(self, place):
    return place * self.shards // self.places

  @property
  def room(self):
    room = 0
    for shard in range(self.shards):
      taken = sum(self.shard(slot) == shard for slot in self.rows)
      held = sum(self.shard_of_place(place) == shard for place in self.held)
      free = self.slots // self.shards - taken
      places = self.places // self.shards - held
      room += min(free // self.group_size, places)
    return room

  def enter(self, groups, places, slots):
    """Checks what was given, and writes it down."""
    given = [slot for row in slots for slot in row]
    assert len(set(given)) == len(groups) * self.group_size == len(given)
    assert not set(given) & set(self.rows)
    assert len(set(places)) == len(groups) == len(places)
    assert not set(places) & set(self.held)
    for group, place, row in zip(groups, places, slots, strict=True):
      shards = {self.shard(slot) for slot in row}
      assert shards == {self.shard_of_place(place)}
      for number, slot in enumerate(row):
        self.rows[slot] = (group, number, 0)
    self.held.update(zip(places, groups, strict=True))

  def grow_older(self):
    self.rows = {s: (g, r, age + 1) for s, (g, r, age) in self.rows.items()}

  def move(self, order):
    found = enumerate(order)
    self.rows = {n: self.rows[old] for n, old in found if old in self.rows}

  def leave(self, slots):
    for slot in slots:
      del self.rows[slot]
    alive = {group for group, *_ in self.rows.values()}
    self.held = {p: group for p, group in self.held.items() if group in alive}

  def check(self, occupancy):
    assert occupancy.room == self.room
    assert occupancy.busy == bool(self.rows)
    ages = occupancy.ages
    for slot in range(self.slots):
      group, row, age = self.rows.get(slot, (FREE, None, -1))
      assert occupancy.owner[slot] == group
      assert row is None or occupancy.row[slot] == row
      assert ages[slot] == age
    for place in range(self.places):
      assert occupancy.place[place] == self.held.get(place, FREE)


@settings(max_examples=80)
@given(data=st.data())
def test_every_slot_and_place_is_held_once_whatever_happens(data):
  shards = data.draw(st.integers(1, 3))
  share = data.draw(st.integers(1, 11))
  slots, group_size = shards * share, data.draw(st.integers(1, share))
  places = shards * data.draw(st.integers(1, 6))
  occupancy = Occupancy(slots, places, group_size, shards)
  ledger = Ledger(slots, places, group_size, shards)
  named = iter(range(1000))
  for _ in range(data.draw(st.integers(1, 8))):
    count = data.draw(st.integers(0, ledger.room))
    groups = [next(named) for _ in range(count)]
    entered, given = occupancy.enter(groups)
    ledger.enter(groups, entered.tolist(), given.tolist())
    ledger.check(occupancy)
    if data.draw(st.booleans()):
      order = data.draw(st.permutations(range(share)))
      whole = [n * share + old for n in range(shards) for old in order]
      occupancy.move(np.array(whole))
      ledger.move(whole)
    occupancy.grow_older()
    ledger.grow_older()
    ledger.check(occupancy)
    if ledger.rows:
      ended = data.draw(st.sets(st.sampled_from(sorted(ledger.rows))))
      occupancy.leave(np.array(sorted(ended), np.int64))
      ledger.leave(ended)
      ledger.check(occupancy)


def test_groups_are_spread_over_the_shards():
  occupancy = Occupancy(24, 12, 2, 3)
  _, slots = occupancy.enter([5, 6, 7, 8])
  assert sorted(np.bincount(slots[:, 0] // 8, minlength=3)) == [1, 1, 2]


def test_a_group_keeps_its_place_until_its_last_row_ends():
  occupancy = Occupancy(4, 2, 2)
  places, slots = occupancy.enter([7, 9])
  assert places.dtype == slots.dtype == np.int32
  occupancy.leave(np.flatnonzero(occupancy.owner == 9)[:1])
  assert 9 in occupancy.place
  assert occupancy.room == 0
  occupancy.leave(np.flatnonzero(occupancy.owner == 9))
  assert 9 not in occupancy.place
  assert occupancy.room == 1


def test_more_groups_than_room_are_refused_and_nobody_enters():
  occupancy = Occupancy(5, 4, 2)
  with pytest.raises(
    ValueError, match="3 groups cannot enter: there is room for 2"
  ):
    occupancy.enter([0, 1, 2])
  assert not occupancy.busy
  assert occupancy.room == 2


def test_a_saved_account_is_restored_and_stays_apart():
  occupancy = Occupancy(5, 3, 2)
  occupancy.enter([4, 6])
  occupancy.grow_older()
  saved = occupancy.state_dict()
  occupancy.leave(np.array([0, 1]))
  assert occupancy.room == 1
  other = Occupancy(5, 3, 2)
  other.load_state_dict(saved)
  assert other.owner.tolist() == [4, 4, 6, 6, FREE]
  assert other.row.tolist()[:4] == [0, 1, 0, 1]
  assert other.ages.tolist() == [1, 1, 1, 1, -1]
  assert other.room == 0
  other.leave(np.array([2, 3]))
  assert saved["owner"].tolist() == [4, 4, 6, 6, FREE]
