"""How wide the rings of the cache are, and which slots are in which.

Short completions do not pay for the columns of long ones, and a handful that
is left does not pay for all slots. The host chooses by counting, so the choice
is part of the schedule; the device moves columns when the choice changes.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from scalerl_jax.models.kv_cache import KVCache, Ring
from scalerl_jax.models.rows import join_rows, pick, split_rows
from scalerl_jax.sampling.slots import SlotState, map_slots

# (slots, columns) of each ring, the narrow one first. A slot that is in none
# does not decode.
Plan = tuple[tuple[int, int], ...]

NARROWEST = 32  # columns; below twice as many there is one ring and no choice
DENSE_COLUMNS = 64  # what the rest of a step costs a slot, in columns
GAIN = 1.25  # a cheaper plan is taken when the present one costs this much more
AHEAD = 32  # steps that a move to another ring shall last


def widths(columns: int) -> list[int]:
  """2ⁿ from `NARROWEST` and 3·2ⁿ from three times it, below `columns`, and
  `columns`.

  >>> widths(200)
  [32, 64, 96, 128, 192, 200]
  """
  found, power = [], NARROWEST
  while power < columns:
    found.append(power)
    if power > NARROWEST and power * 3 // 2 < columns:
      found.append(power * 3 // 2)
    power *= 2
  return [*found, columns]


def menu(slots: int, columns: int, shards: int) -> list[Plan]:
  """The plans that there are; a decode program each, if it is ever chosen.

  One ring of all slots; a narrow one of three quarters beside the widest; or
  one ring of a quarter or a sixteenth of the slots, when few are left.

  Args:
    slots: S.
    columns: that the longest completion needs.
    shards: equal parts of the slots.
  """
  full: Plan = ((slots, columns),)
  if columns < 2 * NARROWEST or slots % (4 * shards):
    return [full]
  narrow = widths(columns)[:-1]
  powers = [width for width in narrow if width & (width - 1) == 0]
  quarter = slots // 4
  return [
    *[((slots, width),) for width in narrow],
    full,
    *[((slots - quarter, n), (quarter, columns)) for n in powers],
    *[((quarter, width),) for width in (*powers, columns)],
    *[
      ((slots // 16, width),)
      for width in (*powers, columns)
      if not slots % (16 * shards)
    ],
  ]


def cost(plan: Plan) -> int:
  """What a decode step costs, in columns read."""
  return sum(slots * (DENSE_COLUMNS + columns) for slots, columns in plan)


class Layout:
  """The plan in use and where its rings begin.

  Args:
    slots: S.
    columns: that the longest completion needs.
    chunk: C, decode steps of a chunk at most.
    shards: equal parts of the slots that stay apart.
  """

  def __init__(self, slots: int, columns: int, *, chunk: int, shards: int):
    self._columns, self._chunk, self._shards = columns, chunk, shards
    self._slots = slots
    self.menu = menu(slots, columns, shards)
    self.full: Plan = ((slots, columns),)
    self.plan = self.menu[0]
    self.steps = 0  # since a ring's first column was written, at most

  def is_young(self, plan: Plan) -> bool:
    """Whether no ring, of this plan or the present one, has gone round."""
    return self.steps <= min(width for _, width in (*self.plan, *plan))

  def needs(self, ages: np.ndarray, ahead: int = 0) -> np.ndarray:
    """Columns that each slot will own after one more chunk; 0: nobody.

    Args:
      ages: int `[S]`, chunks since a completion entered; −1: nobody.
      ahead: steps after that chunk.
    """
    columns = np.minimum((ages + 1) * self._chunk + ahead, self._columns)
    return np.where(ages < 0, 0, columns)

  def choose(self, ages: np.ndarray) -> tuple[Plan, np.ndarray] | None:
    """Another plan and the present slot of each future one, or None.

    Args:
      ages: as for `needs`.
    """
    if len(self.menu) == 1:
      return None
    now, later = self.needs(ages), self.needs(ages, AHEAD)
    best = min((p for p in self.menu if self._fits(p, now, later)), key=cost)
    held = self._widths(self.plan)
    if (now <= held).all() and cost(self.plan) <= GAIN * cost(best):
      return None
    if len(best) == 1 and best[0][0] == self._slots:
      return best, np.arange(self._slots)
    return best, self._order(best, now)

  def _shares(self, values: np.ndarray) -> np.ndarray:
    return values.reshape(self._shards, -1)

  def _widths(self, plan: Plan) -> np.ndarray:
    """Columns of the ring of each slot."""
    share = self._slots // self._shards
    columns = np.zeros((self._shards, share), int)
    first = 0
    for slots, width in plan:
      columns[:, first : first + slots // self._shards] = width
      first += slots // self._shards
    return columns.reshape(-1)

  def _fits(self, plan: Plan, now: np.ndarray, later: np.ndarray) -> bool:
    """Whether slots, the longest last, fit into the rings of every shard."""
    held = np.sort(self._shares(self._widths(plan)))
    if len(plan) == 1:
      return bool((np.sort(self._shares(now)) <= held).all())
    return bool((np.sort(self._shares(later)) <= held).all())

  def _order(self, plan: Plan, now: np.ndarray) -> np.ndarray:
    """Present slot of each slot under `plan`, shard by shard."""
    share = self._slots // self._shards
    order = []
    for shard, needs in enumerate(self._shares(now)):
      longest_first = shard * share + np.argsort(-needs, kind="stable")
      taken, rings = 0, []
      for slots, _ in reversed(plan):  # the widest ring takes the longest
        size = slots // self._shards
        rings.append(longest_first[taken : taken + size])
        taken += size
      order += [*reversed(rings), longest_first[taken:]]
    return np.concatenate(order)


def map_rings(
  function: Callable[[Sequence[Array], int], list[Any]],
  rings: Sequence[Ring],
) -> tuple[Ring, ...]:
  """New rings: `function(parts of all rings, column axis)` for each layer's
  keys and values, rows first; layers that are stacked are done together.
  """

  def parts(name: str, axis: int) -> list[Any]:
    held = [getattr(ring, name) for ring in rings]
    if isinstance(held[0], tuple):
      layers = [function(layer, axis) for layer in zip(*held, strict=True)]
      return list(zip(*layers, strict=True))
    rows_first = [jnp.moveaxis(part, 0, 1) for part in held]
    return [jnp.moveaxis(x, 1, 0) for x in function(rows_first, axis + 1)]

  keys, values = parts("k", 3), parts("v", 2)
  return tuple(Ring(k=k, v=v) for k, v in zip(keys, values, strict=True))


def repack(
  state: SlotState,
  order: Int[Array, " S"],
  *,
  plan: Plan,
  moved: bool,
  young: bool,
) -> SlotState:
  """The same completions under another plan.

  Args:
    state: donated.
    order: present slot of each future one, each shard within itself.
    plan: static; wide enough for what its slots own.
    moved: static, whether `order` changes anything.
    young: static, whether no ring has gone round: columns are where they were
      then, and are not looked for.
  """
  cache: KVCache = state.cache
  slots, shards = len(cache.group), cache.shards
  whole = sum(cache.rows) == slots and len(cache.rows) == 1

  def relaid(part: Array, columns: int, axis: int) -> Array:
    """A ring's newest columns where a ring of `columns` has them."""
    held = part.shape[axis]
    if held == columns:
      return part

    if young:
      missing = [(0, 0)] * part.ndim
      missing[axis] = (0, max(0, columns - held))
      kept = jax.lax.slice_in_dim(part, 0, min(held, columns), axis=axis)
      return jnp.pad(kept, missing)
    target = jnp.arange(columns, dtype=jnp.int32)
    age = (cache.clock - 1 - target) % columns
    source = (cache.clock - 1 - age) % held
    return jnp.take(part, source, axis=axis, mode="clip")

  def moved_rows(parts: Sequence[Array], axis: int) -> list[Any]:
    """Parts of the rings under `plan`, from those that there are."""
    if whole and not moved and [rows for rows, _ in plan] == [slots]:
      return [relaid(parts[0], plan[0][1], axis)]
    found = []
    share = slots // shards
    sources = split_rows(order, [rows for rows, _ in plan], shards)
    for (_, columns), rows in zip(plan, sources, strict=True):
      shard, local = rows // share, rows % share
      ring, first = None, 0
      for part in parts:
        size = part.shape[0] // shards
        # Rows of another ring, and of none, read any row here.
        index = shard * size + jnp.clip(local - first, 0, size - 1)
        mine = relaid(pick(part, index, shards), columns, axis)
        here = (local >= first).reshape(-1, *[1] * (part.ndim - 1))
        ring = mine if ring is None else jnp.where(here, mine, ring)
        first += size
      found.append(ring)
    return found

  new = dataclasses.replace(cache, rings=map_rings(moved_rows, cache.rings))
  state = dataclasses.replace(state, cache=new)
  if not moved:
    return state

  def permuted(array: Array, axis: int) -> Array:
    rows = pick(jnp.moveaxis(array, axis, 0), order, shards)
    return jnp.moveaxis(rows, 0, axis)

  state = map_slots(permuted, state)
  place = jnp.zeros((slots,), jnp.int32)
  place = place.at[order].set(jnp.arange(slots, dtype=jnp.int32))
  members = jnp.take(place, cache.members, axis=0)
  new = dataclasses.replace(state.cache, members=members)
  return dataclasses.replace(state, cache=new)


def filled_up(state: SlotState, plan: Plan) -> SlotState:
  """The same columns in one ring of the full shape, as a state is saved."""
  ((slots, columns),) = plan
  cache: KVCache = state.cache

  def fill(parts: Sequence[Array], axis: int) -> list[Array]:
    def wide(part: Array) -> Array:
      missing = [(0, 0)] * part.ndim
      missing[axis] = (0, columns - part.shape[axis])
      return jnp.pad(part, missing)

    rows = [wide(part) for part in parts]
    left = slots - sum(cache.rows)
    if left:
      rows.append(jnp.zeros((left, *rows[0].shape[1:]), rows[0].dtype))
    return [join_rows(rows, cache.shards)]

  new = dataclasses.replace(cache, rings=map_rings(fill, cache.rings))
  return dataclasses.replace(state, cache=new)


def cut_back(state: SlotState, plan: Plan) -> SlotState:
  """The inverse of `filled_up`, for a state of this plan."""
  cache: KVCache = state.cache

  def cut(parts: Sequence[Array], axis: int) -> list[Array]:
    rows = split_rows(parts[0], [rows for rows, _ in plan], cache.shards)
    return [
      jax.lax.slice_in_dim(part, 0, columns, axis=axis)
      for part, (_, columns) in zip(rows, plan, strict=True)
    ]

  new = dataclasses.replace(cache, rings=map_rings(cut, cache.rings))
  return dataclasses.replace(state, cache=new)
