"""Plans of the rings: chosen to fit, and changed without losing a column."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.models import kv_cache
from scalerl_jax.sampling import rings
from scalerl_jax.sampling.occupancy import FREE, Occupancy
from scalerl_jax.sampling.rings import Layout
from scalerl_jax.sampling.slots import empty_slots


@pytest.mark.parametrize("columns", [64, 65, 97, 100, 128, 193, 1000])
def test_widths_are_powers_of_two_and_those_between(columns):
  found = rings.widths(columns)
  steps = {k * 2**n for n in range(20) for k in (1, 3)} - {48}
  expected = sorted(n for n in steps if 32 <= n < columns)
  assert found == [*expected, columns]


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("columns", [64, 100, 300])
def test_a_plan_is_cut_evenly_over_the_shards(columns, shards):
  slots = 8 * shards
  found = rings.menu(slots, columns, shards)
  assert len(set(found)) == len(found)
  for plan in found:
    assert sum(rows for rows, _ in plan) in (slots, slots // 4)
    assert all(rows % shards == 0 and rows for rows, _ in plan)
    widths = [width for _, width in plan]
    assert widths == sorted(set(widths))
    assert set(widths) <= set(rings.widths(columns))
  # Any slots fit into one, and the quarter that is left is never too long.
  assert ((slots, columns),) in found
  assert ((slots // 4, columns),) in found


@pytest.mark.parametrize(
  ("slots", "columns", "shards"), [(64, 63, 1), (6, 500, 1), (12, 500, 2)]
)
def test_few_columns_or_uneven_slots_leave_no_choice(slots, columns, shards):
  layout = Layout(slots, columns, chunk=5, shards=shards)
  assert layout.menu == [((slots, columns),)]
  assert layout.choose(np.zeros((slots,), int)) is None


def _held(plan, slots, shards):
  """Columns that each slot has, 0 in no ring."""
  share = slots // shards
  return np.array(
    [
      next(
        (
          width
          for number, (_, width) in enumerate(plan)
          if local < sum(rows for rows, _ in plan[: number + 1]) // shards
        ),
        0,
      )
      for _ in range(shards)
      for local in range(share)
    ]
  )


@settings(max_examples=60)
@given(data=st.data())
def test_a_slot_always_has_the_columns_that_its_age_needs(data):
  shards = data.draw(st.integers(1, 3))
  group_size = data.draw(st.integers(1, 4))
  slots = 4 * shards * group_size * data.draw(st.integers(1, 3))
  columns = data.draw(st.integers(64, 400))
  chunk = data.draw(st.integers(1, 70))
  occupancy = Occupancy(slots, slots, group_size, shards)
  layout = Layout(slots, columns, chunk=chunk, shards=shards)
  share, named = slots // shards, iter(range(10_000))
  seen = set()
  for _ in range(data.draw(st.integers(1, 30))):
    if data.draw(st.booleans()):
      count = data.draw(st.integers(0, occupancy.room))
      occupancy.enter([next(named) for _ in range(count)])
    choice = layout.choose(occupancy.ages)
    if choice is not None:
      plan, order = choice
      assert plan != layout.plan or (order != np.arange(slots)).any()
      by_shard = np.sort(order.reshape(shards, share))
      np.testing.assert_array_equal(
        by_shard, np.arange(slots).reshape(shards, share)
      )
      before = sorted(occupancy.owner)
      occupancy.move(order)
      assert sorted(occupancy.owner) == before
      layout.plan = plan
    assert layout.plan in layout.menu
    seen.add(layout.plan)
    ages = np.where(occupancy.owner == FREE, -1, occupancy.age)
    needed = np.minimum((ages + 1) * chunk, columns)
    assert (needed <= _held(layout.plan, slots, shards)).all()
    occupancy.grow_older()
    # Whoever has written its whole budget has ended, and some others have.
    spent = (occupancy.owner != FREE) & (occupancy.age * chunk >= columns)
    few = data.draw(st.sampled_from([0.0, 0.2, 0.9]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    ended = (occupancy.owner != FREE) & (rng.random(slots) < few)
    occupancy.leave(np.flatnonzero(spent | ended))
  assert seen <= set(layout.menu)


def test_a_plan_follows_what_is_written_and_how_many_are_left():
  slots, columns = 16, 256
  layout = Layout(slots, columns, chunk=16, shards=2)
  ages, plans = np.zeros((slots,), int), []
  for chunk in range(16):
    if chunk == 10:  # all but two of each shard end
      ages[[0, 1, 2, 3, 4, 6, 8, 9, 10, 11, 12, 14]] = -1
    choice = layout.choose(ages)
    if choice is not None:
      layout.plan, order = choice
      ages = ages[order]
      plans.append(layout.plan)
    ages = np.where(ages < 0, -1, ages + 1)
  # Wider with time, and at last a quarter of the slots.
  widths = [plan[0][1] for plan in plans[:-1]]
  assert widths == sorted(set(widths))
  assert len(widths) >= 3
  assert plans[-1] == ((slots // 4, columns),)


def test_one_plan_is_kept_while_another_would_gain_little():
  layout = Layout(16, 256, chunk=8, shards=1)
  layout.plan = ((16, 64),)
  needs = np.zeros((16,), int)  # 32 columns would do: (64 + 64) / (64 + 32)
  assert rings.cost(((16, 64),)) > rings.GAIN * rings.cost(((16, 32),))
  assert layout.choose(needs)[0] == ((16, 32),)
  layout.plan = ((16, 96),)
  needs[:] = 7  # 64 columns: (64 + 96) / (64 + 64) is not above the gain
  assert layout.choose(needs) is None


# Repacking.

SLOTS, SIZE, COLUMNS, TC = 8, 3, 8, 5


@pytest.fixture
def small_plans(monkeypatch):
  """Plans of 4 and 8 columns."""
  monkeypatch.setattr(rings, "NARROWEST", 4)


def _state(plan, *, shards, unrolled, clock):
  """Random content under a plan; who owns what is up to the test."""
  rng = np.random.default_rng(clock)
  state = empty_slots(
    kv_cache.empty_cache(
      layers=2,
      unrolled=unrolled,
      prompts=2 * shards,
      slots=SLOTS * shards,
      group_size=SIZE,
      kv_heads=1,
      head_width=2,
      prompt_tokens=3,
      completion_tokens=COLUMNS,
      dtype=jnp.float32,
      shards=shards,
    ),
    completion_tokens=TC,
  )

  def fill(x):
    kinds = (0, 2) if x.dtype == bool else (0, 10**6)
    return np.asarray(rng.integers(*kinds, x.shape), x.dtype)

  def ring(rows, columns):
    empty = kv_cache.empty_ring(
      layers=2,
      unrolled=unrolled,
      rows=rows,
      columns=columns,
      kv_heads=1,
      head_width=2,
      dtype=jnp.float32,
    )
    return jax.tree.map(fill, empty)

  state = jax.tree.map(fill, state)
  # Six completions of a shard's eight slots; the rest is anybody's.
  place = np.stack([rng.permutation(2 * SIZE) for _ in range(shards)])
  slot = np.stack([rng.permutation(SLOTS)[: 2 * SIZE] for _ in range(shards)])
  first = np.arange(shards)[:, None]
  members = np.zeros((shards, 2 * SIZE), np.int32)
  group = np.repeat(first * 2, SLOTS, axis=1)
  member = np.zeros((shards, SLOTS), np.int32)
  for shard in range(shards):
    members[shard, place[shard]] = slot[shard] + shard * SLOTS
    group[shard, slot[shard]] = place[shard] // SIZE + 2 * shard
    member[shard, slot[shard]] = place[shard] % SIZE
  cache = dataclasses.replace(
    state.cache,
    rings=tuple(ring(*shape) for shape in plan),
    clock=np.int32(clock),
    members=members.reshape(-1, SIZE),
    group=group.reshape(-1).astype(np.int32),
    member=member.reshape(-1),
  )
  held = np.zeros((SLOTS * shards,), bool)
  held[(slot + first * SLOTS).reshape(-1)] = True
  return dataclasses.replace(state, cache=cache), held


def _columns(state, plan, shards):
  """Keys and values `[S][L, ...]` of each slot, oldest column last."""
  share, found = SLOTS, []
  clock = int(state.cache.clock)
  for slot in range(SLOTS * shards):
    shard, local = divmod(slot, share)
    for ring, (rows, columns) in zip(state.cache.rings, plan, strict=True):
      part = rows // shards
      if local < part:
        newest = [(clock - 1 - age) % columns for age in range(columns)]
        k, v = (np.stack(x)[:, shard * part + local] for x in (ring.k, ring.v))
        found.append((k[..., newest], v[..., newest, :]))
        break
      local -= part
    else:
      found.append(None)
  return found


@pytest.mark.parametrize(
  ("shards", "unrolled", "half"),
  [
    (1, True, 0),
    (2, False, 1),
    pytest.param(1, True, 1, marks=pytest.mark.slow),
    pytest.param(2, False, 0, marks=pytest.mark.slow),
  ],
)
@pytest.mark.usefixtures("small_plans")
def test_columns_stay_with_their_slots_under_every_plan(shards, unrolled, half):
  slots = SLOTS * shards
  plans = rings.menu(slots, COLUMNS, shards)
  assert len(plans) == 5
  same = np.arange(slots)
  mixed = same // SLOTS * SLOTS + (3 * (same % SLOTS) + 1) % SLOTS
  for old, new in itertools.product(plans, plans):
    # A compilation each: pairs are shared out, in turns mixed or in order.
    turn = plans.index(old) + plans.index(new)
    if turn % 2 != half:
      continue
    moved = old == new or turn % 4 < 2
    order = mixed if moved else same
    program = functools.partial(rings.repack, plan=new, moved=moved)
    program = jax.jit(program, static_argnames="young")
    narrowest = min(columns for _, columns in (*old, *new))
    for clock in (0, 3, 4, 7, 8, 21):
      state, held = _state(old, shards=shards, unrolled=unrolled, clock=clock)
      # Both ways for columns that are where they were written first.
      young = clock in (3, 4) and clock <= narrowest
      found = program(state, jnp.asarray(order, jnp.int32), young=young)
      _check_repacked(
        jax.device_get(found), state, order, (old, new), held, shards
      )


def _check_repacked(found, state, order, plans, held, shards):
  """All that a slot of both plans owns is where it is looked for."""
  old, new = plans
  assert [(r.rows, r.columns) for r in found.cache.rings] == list(new)
  before = _columns(state, old, shards)
  after = _columns(found, new, shards)
  clock = int(state.cache.clock)
  compared = 0
  for slot, source in enumerate(order):
    if before[source] is None or after[slot] is None:
      continue
    for left, right, axis in zip(
      before[source], after[slot], (-1, -2), strict=True
    ):
      # Columns that have been written, as many as both rings hold.
      count = min(clock, left.shape[axis], right.shape[axis])
      left, right = (np.take(x, range(count), axis) for x in (left, right))
      np.testing.assert_array_equal(left, right)
      compared += left.size
  assert compared or not clock
  for name in ("keys", "last", "length", "budget", "active", "start"):
    np.testing.assert_array_equal(
      getattr(found, name), getattr(state, name)[order]
    )
  for name in ("tokens", "logps", "versions"):
    np.testing.assert_array_equal(
      getattr(found, name), getattr(state, name)[:, order]
    )
  for name in ("group", "member", "length"):
    np.testing.assert_array_equal(
      getattr(found.cache, name), getattr(state.cache, name)[order]
    )
  for slot in np.flatnonzero(held[order]):
    group, member = found.cache.group[slot], found.cache.member[slot]
    assert found.cache.members[group, member] == slot
  for name in ("prompt_k", "prompt_v", "prompt_length", "clock"):
    jax.tree.map(
      np.testing.assert_array_equal,
      getattr(found.cache, name),
      getattr(state.cache, name),
    )


@pytest.mark.parametrize(
  ("shards", "unrolled"), [(1, False), (2, True)], ids=["one", "two"]
)
@pytest.mark.usefixtures("small_plans")
def test_a_state_is_saved_in_one_shape_and_comes_back(shards, unrolled):
  slots = SLOTS * shards
  full = ((slots, COLUMNS),)
  shapes = set()
  for plan in rings.menu(slots, COLUMNS, shards):
    state, _ = _state(plan, shards=shards, unrolled=unrolled, clock=5)
    state = jax.tree.map(jnp.asarray, state)
    saved = rings.filled_up(state, full)
    shapes.add(tuple((x.shape, str(x.dtype)) for x in jax.tree.leaves(saved)))
    again = rings.cut_back(saved, plan)
    jax.tree.map(np.testing.assert_array_equal, again, state)
  assert len(shapes) == 1


def test_a_plan_is_young_until_a_ring_of_it_has_gone_round():
  layout = rings.Layout(256, 128, chunk=16, shards=1)
  narrow, wide = ((256, 32),), ((256, 64),)
  assert layout.plan == narrow
  for steps, young in ((0, True), (32, True), (33, False)):
    layout.steps = steps
    assert layout.is_young(wide) == young
  layout.plan = wide
  assert layout.is_young(((256, 96),))
  assert not layout.is_young(narrow)
