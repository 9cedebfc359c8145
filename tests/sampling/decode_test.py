"""The two programs of the decode side against a slow sampler in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scalerl_jax.sampling import decode
from scalerl_jax.sampling.slots import empty_slots, read_slots
from scalerl_jax.types import FinishReason
from tests.helpers import SHAPE, V, equations, small_policy, weights
from tests.reference import transformer as reference

ONE_LAYER = dataclasses.replace(SHAPE, num_layers=1)
S, G, P, TP, TC, CHUNK = 5, 2, 2, 4, 7, 3
EOS_IDS = (2, 11)
PROMPTS = ([3, 1, 4], [9])
UIDS, FIRST_SAMPLES, BUDGETS = (17, 5), (0, 4), (TC, 3)
# Slot n takes row SOURCE[n] of the G completions of each of the P prompts.
SOURCE = (2, -1, 0, 3, 1)
PLACES = (2, 0)


@pytest.fixture(scope="module")
def room():
  """(params, insert, chunk, empty state), compiled once, nothing donated."""
  policy = small_policy(ONE_LAYER)
  graph, params = nnx.split(policy)
  settings = decode.DecodeSettings(
    policy=graph,
    warp=(("temperature", 1.0),),
    eos_ids=EOS_IDS,
    group_size=G,
    chunk=CHUNK,
  )
  insert = functools.partial(decode.insert_groups, settings=settings)
  chunk = functools.partial(decode.decode_chunk, settings=settings)
  state = empty_slots(
    policy.empty_cache(
      prompts=3,
      slots=S,
      group_size=G,
      prompt_tokens=TP,
      completion_tokens=TC,
    ),
    completion_tokens=TC,
  )
  return params, jax.jit(insert), jax.jit(chunk), state


def _key(seed=3):
  return jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))


def _arguments(run_key, *, places=PLACES, source=SOURCE):
  prompts = np.zeros((P, TP), np.int32)
  for row, prompt in zip(prompts, PROMPTS, strict=True):
    row[: len(prompt)] = prompt
  lengths = [len(prompt) for prompt in PROMPTS]
  members = np.zeros((P * G,), int)
  for slot, row in enumerate(source):
    if row >= 0:
      members[row] = slot
  members = members.reshape(P, G)
  numbers = (
    *(lengths, UIDS, FIRST_SAMPLES, BUDGETS, places),
    *(members, source),
  )
  return (
    run_key,
    jnp.asarray(prompts),
    *[jnp.asarray(row, jnp.int32) for row in numbers],
  )


def _slow(params, row, run_key):
  """(tokens, log-probs) of a completion by the book, in float64."""
  group, member = divmod(row, G)
  table, sequence = weights(params), reference.Sequence(ONE_LAYER)
  key = jax.random.wrap_key_data(run_key, impl="threefry2x32")
  key = jax.random.fold_in(key, UIDS[group])
  key = jax.random.fold_in(key, FIRST_SAMPLES[group] + member)
  for token in PROMPTS[group]:
    hidden = sequence.read(table, token)
  tokens, logps = [], []
  while len(tokens) < BUDGETS[group]:
    row_logps = reference.log_softmax(reference.logits(table, hidden))
    uniform = jax.random.uniform(jax.random.fold_in(key, len(tokens)))
    tokens.append(int((np.cumsum(np.exp(row_logps)) <= uniform).sum()))
    logps.append(row_logps[tokens[-1]])
    if tokens[-1] in EOS_IDS:
      break
    hidden = sequence.read(table, tokens[-1])
  return tokens, logps


def _equal(left, right):
  jax.tree.map(np.testing.assert_array_equal, left, right)


def test_a_completion_ends_at_an_end_token_or_at_its_budget():
  tokens = jnp.array([2, 3, 11, 3, 2, 0], jnp.int32)
  length = jnp.array([1, 4, 5, 6, 5, 4], jnp.int32)
  reasons = decode.finish_reason(tokens, length, jnp.full(6, 5), EOS_IDS)
  eos, budget, running = (
    FinishReason.EOS,
    FinishReason.BUDGET,
    FinishReason.RUNNING,
  )
  assert reasons.tolist() == [eos, running, eos, budget, eos, running]


@pytest.mark.parametrize("seed", range(4))
def test_completions_are_those_of_a_slow_sampler(room, seed):
  params, insert, chunk, state = room
  key = _key(seed)
  slow = [_slow(params, row, key) for row in range(P * G)]
  state = insert(params, jnp.int32(6), state, *_arguments(key))
  written = {n: row for n, row in enumerate(SOURCE) if row >= 0}
  for done in (1, 1 + CHUNK, 1 + 2 * CHUNK):
    records = jax.tree.map(
      np.asarray, read_slots(state, jnp.arange(S, dtype=jnp.int32))
    )
    for slot, row in written.items():
      tokens, logps = (part[:done] for part in slow[row])
      length = records["length"][slot]
      assert length == len(tokens)
      assert records["tokens"][slot, :length].tolist() == tokens
      np.testing.assert_allclose(
        records["behavior_logps"][slot, :length], logps, rtol=1e-4, atol=1e-4
      )
      assert (records["versions"][slot, :length] == 6).all()
      ended = len(slow[row][0]) <= done
      assert bool(state.active[slot]) != ended
      if ended:
        by_eos = tokens[-1] in EOS_IDS
        assert records["finish"][slot] == 1 if by_eos else 2
    # Nobody sits in slot 1.
    assert not state.active[1]
    assert records["length"][1] == 0
    before = state
    state, (steps, drawn) = chunk(params, jnp.int32(6), state)
    left = [max(0, len(tokens) - done) for tokens, _ in slow]
    assert steps == min(CHUNK, max(left))
    assert drawn == sum(min(CHUNK, n) for n in left)
  # When all have ended a chunk does nothing.
  assert steps == 0
  _equal(state, before)


def test_another_run_key_draws_other_tokens(room):
  params, insert, _, state = room
  one, other = (
    insert(params, jnp.int32(0), state, *_arguments(_key(seed)))
    for seed in (0, 1)
  )
  assert (one.last != other.last).any()
  _equal(one.cache.prompt_k, other.cache.prompt_k)


def test_nobody_entering_changes_nothing(room):
  params, insert, chunk, state = room
  key = _key()
  state = insert(params, jnp.int32(0), state, *_arguments(key))
  state, _ = chunk(params, jnp.int32(0), state)
  nobody = _arguments(key, places=(3, 3), source=(-1,) * S)
  _equal(insert(params, jnp.int32(1), state, *nobody), state)


def test_those_who_enter_leave_the_others_as_they_were(room):
  params, insert, chunk, state = room
  key = _key()
  first = (2, -1, -1, 3, -1)
  state = insert(
    params, jnp.int32(0), state, *_arguments(key, places=(3, 1), source=first)
  )
  state, _ = chunk(params, jnp.int32(0), state)
  second = (-1, 0, 1, -1, -1)
  after = insert(
    params, jnp.int32(1), state, *_arguments(key, places=(0, 3), source=second)
  )
  inside = np.array([0, 3, 4])
  _equal(read_slots(after, inside), read_slots(state, inside))
  for name in ("keys", "last", "length", "budget", "active"):
    _equal(getattr(after, name)[inside], getattr(state, name)[inside])
  for name in ("prompt_k", "prompt_v"):
    old, new = getattr(state.cache, name), getattr(after.cache, name)
    for new_layer, old_layer in zip(new, old, strict=True):
      assert (new_layer[0] != old_layer[0]).any()
      _equal(new_layer[1:], old_layer[1:])
  _equal(after.cache.rings, state.cache.rings)


def test_what_has_ended_stays_readable_while_the_ring_goes_round(room):
  params, insert, chunk, state = room
  state = insert(params, jnp.int32(0), state, *_arguments(_key()))
  state, _ = chunk(params, jnp.int32(0), state)
  assert not state.active[0]
  expected, columns = read_slots(state, np.array([0])), 0
  for seed in range(9):
    others = _arguments(_key(seed), source=(-1, -1, -1, 0, 1))
    state = insert(params, jnp.int32(1), state, *others)
    while state.active.any():
      state, (steps, _) = chunk(params, jnp.int32(1), state)
      columns += int(steps)
  assert columns > 2 * TC
  _equal(read_slots(state, np.array([0])), expected)


def _largest(function, *arguments):
  """Shapes of all that a program makes."""
  jaxpr = jax.make_jaxpr(function)(*arguments)
  return {
    tuple(variable.aval.shape)
    for equation in equations(jaxpr.jaxpr)
    for variable in equation.outvars
  }


def test_no_program_makes_logits_of_whole_rows(room):
  params, insert, chunk, state = room
  inserted = (params, jnp.int32(0), state, *_arguments(_key()))
  shapes = _largest(chunk, params, jnp.int32(0), state)
  assert (S, V) in shapes
  assert max(map(np.prod, shapes)) < S * TC * V
  found = _largest(insert, *inserted)
  assert (P, V) in found
  for shape in shapes | found:
    # 23 words, and no other axis is so long.
    assert V not in shape or np.prod(shape) <= S * V
