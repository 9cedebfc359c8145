"""The sampler: slots on the generator mesh, filled and emptied between chunks.

Parameters are an argument of every call, so a new version needs no retrace and
weights change between chunks only. The host looks once a chunk.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from scalerl_jax.config import SamplerConfig
from scalerl_jax.models.attention import pairs
from scalerl_jax.sampling.decode import DecodeSettings
from scalerl_jax.sampling.entering import (
  Entry,
  Group,
  check_groups,
  entries,
  no_entry,
  sizes_of,
)
from scalerl_jax.sampling.interruption import Interruption
from scalerl_jax.sampling.occupancy import Occupancy, slot_shards
from scalerl_jax.sampling.programs import Programs
from scalerl_jax.sampling.rings import Layout, Plan
from scalerl_jax.sampling.slots import SlotState, read_slots, without_rings
from scalerl_jax.sampling.work import Work
from scalerl_jax.types import Rollout


@dataclasses.dataclass(frozen=True)
class Finished:
  """Completions that ended, a row each."""

  groups: np.ndarray  # int64 [N], index of the group
  rows: np.ndarray  # int32 [N], row in the group
  tokens: np.ndarray  # int32 [N, Tc]
  behavior_logps: np.ndarray  # float32 [N, Tc]
  versions: np.ndarray  # int32 [N, Tc]
  forced: np.ndarray  # bool [N, Tc]
  length: np.ndarray  # int32 [N]
  finish: np.ndarray  # int32 [N]


# What a completion's record holds besides who it belongs to.
RECORDED = (
  "tokens",
  "behavior_logps",
  "versions",
  "forced",
  "length",
  "finish",
)


def warp_settings(config: SamplerConfig) -> dict[str, Any]:
  """The keywords of `warp_logits` that a config asks for, on both sides."""
  return {
    "temperature": config.temperature,
    "top_k": config.top_k or None,
    "top_p": None if config.top_p == 1.0 else config.top_p,
  }


class Sampler:
  """Fixed slots for groups of one size.

  A group enters when G slots and a prompt place are free, all its completions
  at once, and its prompt is prefilled then: a new sequence never reads prompt
  KV of an older version. A running one keeps the KV that older versions wrote.

  Args:
    policy: graph definition of the policy (`nnx.split`).
    params: its parameters, for shapes and dtype only.
    config: slots, budgets, warping.
    group_size: G.
    eos_ids: tokens that end a completion.
    seed: makes the run key.
    mesh: the generator mesh.
    interruption: of thinking; None: nothing is forced.
  """

  def __init__(
    self,
    policy: nnx.GraphDef,
    params: nnx.State,
    config: SamplerConfig,
    *,
    group_size: int,
    eos_ids: Sequence[int],
    seed: int,
    mesh: Mesh,
    interruption: Interruption | None = None,
  ):
    if interruption is not None:
      interruption.check(
        eos_ids, max_completion_tokens=config.max_completion_tokens
      )
    self.config = config
    self.group_size = group_size
    self.mesh = mesh
    settings = DecodeSettings(
      policy=policy,
      warp=tuple(sorted(warp_settings(config).items())),
      eos_ids=tuple(int(i) for i in eos_ids),
      group_size=group_size,
      chunk=config.chunk,
      interruption=interruption,
    )
    self._programs = Programs(settings, mesh)
    key = jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))
    self._key = np.asarray(key)
    shards = slot_shards(mesh, config.slots, group_size)
    full = shards * (config.slots // shards // group_size)
    # Twice as many prompt places as full groups: stragglers hold theirs.
    self._places = min(config.slots, 2 * full)
    self.occupancy = Occupancy(config.slots, self._places, group_size, shards)
    self._layout = Layout(
      config.slots,
      config.max_completion_tokens,
      chunk=config.chunk,
      shards=shards,
    )
    self._shards = shards
    self._sizes = sizes_of(config, groups=full, shards=shards)
    self._read_sizes = sorted(
      {-(-config.slots // 8), -(-config.slots // 2), config.slots}
    )
    self.state = self._programs.create(
      nnx.merge(policy, params),
      config,
      self._layout.plan,
      places=self._places,
      shards=shards,
    )
    self._work = Work()
    # Any: `is_ready` is not in the type of a jax.Array.
    self._stats: Any = None

  @property
  def room(self) -> int:
    """Groups that could enter now."""
    return self.occupancy.room

  @property
  def busy(self) -> bool:
    """Whether any completion is being written."""
    return self.occupancy.busy

  def insert(
    self, params: nnx.State, version: int, groups: Sequence[Group]
  ) -> None:
    """Prefills prompts and draws the first token of their completions.

    Raises:
      ValueError: more groups than `room`, or a prompt over the budget.
    """
    if len(groups) > self.room:
      raise ValueError(
        f"{len(groups)} groups cannot enter: there is room for {self.room}"
      )
    check_groups(groups, self.config)
    places, slots = self.occupancy.enter([group.index for group in groups])
    for entry in entries(
      groups,
      places,
      slots,
      self.config,
      sizes=self._sizes,
      held_places=self._places,
      shards=self._shards,
    ):
      self._enter(params, version, entry)
      rows, width = entry.prompts.shape
      self._work = self._work.plus(
        prefilled_rows=rows,
        prefilled_tokens=rows * width,
        prefilled_keys=rows * pairs(width),
      )

  def _enter(self, params: nnx.State, version: int, entry: Entry) -> None:
    insert = self._programs.insert(self.state)
    rings = self.state.cache.rings
    with jax.set_mesh(self.mesh):
      state = insert(
        params,
        np.int32(version),
        without_rings(self.state),
        self._key,
        *entry,
      )
    cache = dataclasses.replace(state.cache, rings=rings)
    self.state = dataclasses.replace(state, cache=cache)

  def start_chunk(self, params: nnx.State, version: int) -> None:
    """Dispatches a chunk; it runs while the host goes on."""
    choice = self._layout.choose(self.occupancy.ages)
    if choice is not None:
      self._repack(*choice)
    self.occupancy.grow_older()
    self._layout.steps += self.config.chunk
    decode = self._programs.decode(self.state, self._layout.plan)
    with jax.set_mesh(self.mesh):
      self.state, self._stats = decode(params, np.int32(version), self.state)

  def _repack(self, plan: Plan, order: np.ndarray) -> None:
    """Slots and rings as `plan` has them."""
    held, young = self._layout.plan, self._layout.is_young(plan)
    with jax.set_mesh(self.mesh):
      self.state = self._programs.repack(
        self.state, held, plan, order, young=young
      )
    self.occupancy.move(order)
    self._layout.plan = plan

  @property
  def chunk_arrays(self) -> jax.Array | None:
    """What the chunk in the air will make; to be waited for, not read."""
    return self._stats

  @property
  def ready(self) -> bool:
    """Whether the last dispatched chunk has run."""
    return self._stats is None or self._stats.is_ready()

  def chunk_stats(self) -> tuple[int, int]:
    """(decode steps, tokens) of the last chunk; waits for it, once."""
    if self._stats is None:
      return 0, 0
    steps, drawn = map(int, np.asarray(self._stats))
    self._stats = None
    prompt = self._places * self.config.max_prompt_tokens
    slots, own = np.array([(n, n * w) for n, w in self._layout.plan]).sum(0)
    self._work = self._work.plus(
      decoded_slots=steps * int(slots),
      decoded_keys=steps * int(self.group_size * prompt + own),
      decoded_columns=steps * int(prompt + own),
    )
    return steps, drawn

  def take_work(self) -> Work:
    """What was computed since the last call, chunks told of included."""
    done, self._work = self._work, Work()
    return done

  def finished(self) -> Finished | None:
    """Completions that ended since the last call; their slots are free then.

    Waits for the last dispatched chunk.
    """
    active = np.asarray(self.state.active)
    slots = np.flatnonzero((self.occupancy.owner >= 0) & ~active)
    if not slots.size:
      return None
    size = next(n for n in self._read_sizes if n >= slots.size)
    padded = np.zeros((size,), np.int32)
    padded[: slots.size] = slots
    with jax.set_mesh(self.mesh):
      records = jax.device_get(read_slots(_records(self.state), padded))
    rows = {name: value[: slots.size] for name, value in records.items()}
    ended = Finished(
      groups=self.occupancy.owner[slots],
      rows=self.occupancy.row[slots],
      **rows,
    )
    self.occupancy.leave(slots)
    return ended

  def generate(
    self, params: nnx.State, version: int, groups: Sequence[Group]
  ) -> list[Rollout]:
    """All completions of all groups under one policy version, in order.

    Groups may carry any indices; the sampler must not be busy.
    """
    if self.busy:
      raise ValueError("the sampler is busy; generate needs it empty")
    self._rewind()
    waiting = [
      dataclasses.replace(group, index=i) for i, group in enumerate(groups)
    ]
    records: list[Finished] = []
    while waiting or self.busy:
      enter, waiting = waiting[: self.room], waiting[self.room :]
      if enter:
        self.insert(params, version, enter)
      self.start_chunk(params, version)
      ended = self.finished()
      if ended is not None:
        records.append(ended)
    return self._gather(groups, records)

  def _rewind(self) -> None:
    """Rings as at first, so that equal calls have equal bits."""
    self._layout.steps = 0
    if self._layout.plan != self._layout.menu[0]:
      self._repack(self._layout.menu[0], np.arange(self.config.slots))
    cache = self.state.cache
    clock = jax.device_put(np.int32(0), cache.clock.sharding)
    self.state = dataclasses.replace(
      self.state, cache=dataclasses.replace(cache, clock=clock)
    )

  def _gather(
    self, groups: Sequence[Group], records: Sequence[Finished]
  ) -> list[Rollout]:
    """Rows in the order they ended, back into one rollout a group."""
    rollouts = [
      empty_rollout(group, self.group_size, self.config) for group in groups
    ]
    if not records:
      return rollouts
    place = np.concatenate([r.groups for r in records]) * self.group_size
    order = np.argsort(place + np.concatenate([r.rows for r in records]))
    for name in RECORDED:
      rows = np.concatenate([getattr(r, name) for r in records])[order]
      for rollout, part in zip(
        rollouts, np.split(rows, len(groups)), strict=True
      ):
        setattr(rollout, name, part)
    return rollouts

  def compile(self, params: nnx.State) -> None:
    """Compiles what a first chunk needs before the clock starts; leaves no
    trace. A wider or narrower plan of the rings is compiled when it is taken.
    """
    insert = self._programs.insert(self.state)
    decode = self._programs.decode(self.state, self._layout.plan)
    state = without_rings(self.state)
    with jax.set_mesh(self.mesh):
      for size in self._sizes.prompts:
        nobody = no_entry(
          size,
          self.config.max_prompt_tokens,
          self.config,
          places=self._places,
          group_size=self.group_size,
        )
        arguments = (params, np.int32(0), state, self._key, *nobody)
        insert.lower(*arguments).compile()
      decode.lower(params, np.int32(0), self.state).compile()
      for size in self._read_sizes:
        read_slots(_records(self.state), np.zeros((size,), np.int32))

  def state_dict(self) -> dict[str, Any]:
    """Slots on the device and who holds them, of one shape always."""
    held, full = self._layout.plan, self._layout.full
    rings = np.zeros((2, 2), np.int32)  # at most two
    rings[: len(held)] = held
    with jax.set_mesh(self.mesh):
      slots = self._programs.fill_up(self.state, held, full)
    occupancy = self.occupancy.state_dict() | {"rings": rings}
    return {"slots": slots, "occupancy": occupancy}

  def load_state_dict(self, state: dict[str, Any]) -> None:
    """Back to what `state_dict` said."""
    occupancy = dict(state["occupancy"])
    rings = np.asarray(occupancy.pop("rings")).tolist()
    plan: Plan = tuple((slots, width) for slots, width in rings if slots)
    self._layout.plan, full = plan, self._layout.full
    self._layout.steps = int(state["slots"].cache.clock)
    with jax.set_mesh(self.mesh):
      self.state = self._programs.cut_back(state["slots"], plan, full)
    self.occupancy.load_state_dict(occupancy)
    self._stats = None


def _records(state: SlotState) -> SlotState:
  """What is read of completions that ended."""
  return dataclasses.replace(state, cache=None)


def empty_rollout(
  group: Group, group_size: int, config: SamplerConfig
) -> Rollout:
  """A group's record before any token, numpy arrays to be filled."""
  shape = (group_size, config.max_completion_tokens)
  prompt = np.zeros((config.max_prompt_tokens,), np.int32)
  prompt[: len(group.tokens)] = group.tokens
  return Rollout(
    uid=np.int32(group.uid),
    first_sample=np.int32(group.first_sample),
    prompt=prompt,
    prompt_length=np.int32(len(group.tokens)),
    tokens=np.zeros(shape, np.int32),
    length=np.zeros((group_size,), np.int32),
    behavior_logps=np.zeros(shape, np.float32),
    versions=np.zeros(shape, np.int32),
    forced=np.zeros(shape, bool),
    finish=np.zeros((group_size,), np.int32),
  )
