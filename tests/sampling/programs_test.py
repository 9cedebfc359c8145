"""Compiled programs: one of a kind and plan, none that talks in its loop."""

import dataclasses
import itertools
import re

import jax
import numpy as np
import pytest
from flax import nnx

from scalerl_jax.config import SamplerConfig
from scalerl_jax.models.sharding import make_mesh
from scalerl_jax.sampling.decode import DecodeSettings
from scalerl_jax.sampling.programs import Programs
from tests.helpers import SHAPE, compilations, small_policy

ONE_LAYER = dataclasses.replace(SHAPE, num_layers=1)
G, TP, TC, SLOTS, PLACES = 2, 3, 8, 16, 8
CONFIG = SamplerConfig(
  slots=SLOTS, max_prompt_tokens=TP, max_completion_tokens=TC
)
FULL = ((SLOTS, TC),)
TWO = ((12, 4), (4, TC))
QUARTER = ((4, TC),)
MOVES = re.compile(r" (all-gather|all-to-all|collective-permute)[-(]")
SUMS = re.compile(r" (all-reduce|reduce-scatter)[-(]")


def _made(ways):
  mesh = make_mesh(jax.devices()[:ways])
  policy = small_policy(ONE_LAYER, mesh=mesh)
  graph, params = nnx.split(policy)
  settings = DecodeSettings(
    policy=graph,
    warp=(("temperature", 1.0),),
    eos_ids=(2,),
    group_size=G,
    chunk=3,
  )
  programs = Programs(settings, mesh)
  state = programs.create(policy, CONFIG, FULL, places=PLACES, shards=ways)
  return programs, params, state, mesh


@pytest.fixture(scope="module")
def alone():
  """Programs on one device, parameters, and empty slots."""
  return _made(1)


def _equal(left, right):
  jax.tree.map(np.testing.assert_array_equal, left, right)


def test_a_program_is_made_once_for_its_plan(alone):
  programs, _, state, _ = alone
  assert programs.decode(state, FULL) is programs.decode(state, FULL)
  assert programs.insert(state) is programs.insert(state)
  order = np.arange(SLOTS)
  two = programs.repack(state, FULL, TWO, order)
  assert programs.decode(two, TWO) is not programs.decode(state, FULL)
  assert programs.insert(two) is programs.insert(state)
  saved = programs.fill_up(two, TWO, FULL)
  programs.cut_back(saved, TWO, FULL)
  with compilations() as count:
    programs.repack(state, FULL, TWO, order)
    programs.cut_back(programs.fill_up(two, TWO, FULL), TWO, FULL)
  assert not count


def test_a_plan_of_few_slots_leaves_the_others_out_even_in_order(alone):
  programs, _, state, _ = alone
  for order in (np.arange(SLOTS), np.arange(SLOTS)[::-1]):
    few = programs.repack(state, FULL, QUARTER, order)
    assert [(r.rows, r.columns) for r in few.cache.rings] == list(QUARTER)
    whole = programs.repack(few, QUARTER, FULL, order)
    assert [(r.rows, r.columns) for r in whole.cache.rings] == list(FULL)


def test_a_saved_state_has_the_full_shape_and_comes_back(alone):
  programs, _, state, _ = alone
  order = np.arange(SLOTS)
  for plan in (TWO, QUARTER):
    held = programs.repack(state, FULL, plan, order)
    saved = programs.fill_up(held, plan, FULL)
    _equal(
      jax.tree.map(lambda x: np.array(x.shape), saved),
      jax.tree.map(lambda x: np.array(x.shape), state),
    )
    _equal(programs.cut_back(saved, plan, FULL), held)
  assert programs.fill_up(state, FULL, FULL) is state


def _computations(text):
  """Lines of each computation of an HLO text."""
  found, lines = {}, []
  for line in text.splitlines():
    head = re.match(r"(?:ENTRY )?%([\w.-]+) .*\{$", line)
    if head:
      lines = found.setdefault(head[1], [])
    else:
      lines.append(line)
  return found


def _in_loops(computations):
  """Lines that a loop runs, in whatever it calls too."""
  text = "\n".join(itertools.chain(*computations.values()))
  waiting = re.findall(r"(?:body|condition)=%([\w.-]+)", text)
  seen = set()
  while waiting:
    name = waiting.pop()
    if name in seen:
      continue
    seen.add(name)
    lines = computations[name]
    yield from lines
    named = re.findall(r"%([\w.-]+)", "\n".join(lines))
    waiting += [other for other in named if other in computations]


@pytest.mark.parametrize("plan", [FULL, TWO, QUARTER])
def test_devices_that_share_the_slots_decode_without_each_other(plan):
  programs, params, state, mesh = _made(2)
  with jax.set_mesh(mesh):
    if plan != FULL:
      state = programs.repack(state, FULL, plan, np.arange(SLOTS))
    decode = programs.decode(state, plan)
    text = decode.lower(params, np.int32(0), state).compile().as_text()
  loops = list(_in_loops(_computations(text)))
  assert any("dynamic-update-slice" in line for line in loops)
  moved = [line for line in text.splitlines() if MOVES.search(line)]
  assert not moved
  assert not [line for line in loops if SUMS.search(line)]
  # How long the longest goes on is told once, before the loop.
  assert SUMS.search(text)


def test_devices_that_share_the_slots_change_plans_without_each_other():
  programs, _, state, mesh = _made(2)
  share = SLOTS // 2
  order = np.concatenate(
    [np.arange(share)[::-1] + share * shard for shard in range(2)]
  )
  with jax.set_mesh(mesh):
    programs.repack(state, FULL, TWO, order)
    (program,) = [
      made for key, made in programs._made.items() if key[0] == "repack"
    ]
    lowered = program.lower(state, order.astype(np.int32))
    text = lowered.compile().as_text()
  # Slots' numbers may be told to all; no keys and values are.
  largest = max(
    [0]
    + [
      int(np.prod([int(n) for n in shape.split(",") if n]))
      for line in text.splitlines()
      if MOVES.search(line) or SUMS.search(line)
      for shape in re.findall(r"\w+\[([\d,]*)\]", line.split("(")[0])
    ]
  )
  assert largest <= max(SLOTS, PLACES * G)
