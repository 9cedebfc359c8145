"""Slots and prompt places: given to whole groups, taken back by rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.sampling.occupancy import FREE, Occupancy


class Ledger:
  """The same account kept with sets; who may sit where is up to the room."""

  def __init__(self, slots, places, group_size):
    self.slots, self.places, self.group_size = slots, places, group_size
    self.rows = {}  # slot -> (group, row)
    self.held = {}  # place -> group

  @property
  def room(self):
    free = self.slots - len(self.rows)
    return min(free // self.group_size, self.places - len(self.held))

  def enter(self, groups, places, source):
    """Checks what was given, and writes it down."""
    entering = {
      slot: completion
      for slot, completion in enumerate(source)
      if completion != FREE
    }
    count = len(groups) * self.group_size
    assert sorted(entering.values()) == list(range(count))
    assert not set(entering) & set(self.rows)
    assert len(set(places)) == len(groups)
    assert not set(places) & set(self.held)
    for slot, completion in entering.items():
      group, row = divmod(completion, self.group_size)
      self.rows[slot] = (groups[group], row)
    self.held.update(zip(places, groups, strict=True))

  def leave(self, slots):
    for slot in slots:
      del self.rows[slot]
    alive = {group for group, _ in self.rows.values()}
    self.held = {p: group for p, group in self.held.items() if group in alive}

  def check(self, occupancy):
    assert occupancy.room == self.room
    assert occupancy.busy == bool(self.rows)
    for slot in range(self.slots):
      group, row = self.rows.get(slot, (FREE, None))
      assert occupancy.owner[slot] == group
      assert row is None or occupancy.row[slot] == row
    for place in range(self.places):
      assert occupancy.place[place] == self.held.get(place, FREE)


@settings(max_examples=80)
@given(data=st.data())
def test_every_slot_and_place_is_held_once_whatever_happens(data):
  slots = data.draw(st.integers(1, 11))
  group_size = data.draw(st.integers(1, slots))
  places = data.draw(st.integers(1, 6))
  occupancy = Occupancy(slots, places, group_size)
  ledger = Ledger(slots, places, group_size)
  named = iter(range(1000))
  for _ in range(data.draw(st.integers(1, 8))):
    count = data.draw(st.integers(0, ledger.room))
    groups = [next(named) for _ in range(count)]
    entered, source = occupancy.enter(groups)
    ledger.enter(groups, entered.tolist(), source.tolist())
    ledger.check(occupancy)
    if ledger.rows:
      ended = data.draw(st.sets(st.sampled_from(sorted(ledger.rows))))
      occupancy.leave(np.array(sorted(ended), np.int64))
      ledger.leave(ended)
      ledger.check(occupancy)


def test_a_group_keeps_its_place_until_its_last_row_ends():
  occupancy = Occupancy(4, 2, 2)
  places, source = occupancy.enter([7, 9])
  assert places.dtype == source.dtype == np.int32
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
  saved = occupancy.state_dict()
  occupancy.leave(np.array([0, 1]))
  assert occupancy.room == 1
  other = Occupancy(5, 3, 2)
  other.load_state_dict(saved)
  assert other.owner.tolist() == [4, 4, 6, 6, FREE]
  assert other.row.tolist()[:4] == [0, 1, 0, 1]
  assert other.room == 0
  other.leave(np.array([2, 3]))
  assert saved["owner"].tolist() == [4, 4, 6, 6, FREE]
