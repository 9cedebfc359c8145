"""The sampler: round trips, addressed randomness, versions, stops, traces."""

import dataclasses
import functools
from unittest import mock

import jax
import numpy as np
import pytest
from flax import nnx

from scalerl_jax.config import SamplerConfig
from scalerl_jax.learning.batching import collate
from scalerl_jax.learning.train_step import completion_logps
from scalerl_jax.models.sharding import make_mesh
from scalerl_jax.sampling import programs, rings
from scalerl_jax.sampling.entering import no_entry
from scalerl_jax.sampling.sampler import Group, Sampler, warp_settings
from scalerl_jax.sampling.slots import without_rings
from scalerl_jax.types import FinishReason
from tests.helpers import (
  SHAPE,
  V,
  compilations,
  equations,
  moved,
  small_policy,
  weights,
)
from tests.reference import transformer as reference
from tests.sampling.parts import restore, saved

ONE_LAYER = dataclasses.replace(SHAPE, num_layers=1)
G, TP, TC, CHUNK = 3, 5, 7, 3
EOS_IDS = (2, 11)
CONFIG = SamplerConfig(
  slots=2 * G, chunk=CHUNK, max_prompt_tokens=TP, max_completion_tokens=TC
)


def _sampler(shape=SHAPE, config=CONFIG, *, seed=0, mesh=None):
  mesh = mesh or make_mesh()
  graph, params = nnx.split(small_policy(shape, mesh=mesh))
  sampler = Sampler(
    graph,
    params,
    config,
    group_size=G,
    eos_ids=EOS_IDS,
    seed=seed,
    mesh=mesh,
  )
  return sampler, params


@pytest.fixture(scope="module")
def compiled():
  """One sampler for most of the tests, and what it was when it was new."""
  sampler, params = _sampler()
  return sampler, params, saved(sampler)


@pytest.fixture
def room(compiled):
  """(sampler, params) with nobody in any slot."""
  sampler, params, new = compiled
  restore(sampler, new)
  return sampler, params


def _prompt(uid):
  """A prompt of 1 to 5 tokens."""
  rng = np.random.default_rng(uid)
  return rng.integers(0, V, 1 + uid % TP).astype(np.int32)


def _groups(*uids, first_sample=0):
  return [
    Group(index=n, uid=uid, first_sample=first_sample, tokens=_prompt(uid))
    for n, uid in enumerate(uids)
  ]


def _read(sampler, into):
  """Adds what has ended to `into`: (group, row) -> its record."""
  ended = sampler.finished()
  if ended is None:
    return
  for n, name in enumerate(zip(ended.groups, ended.rows, strict=True)):
    length = int(ended.length[n])
    into[tuple(map(int, name))] = {
      "tokens": ended.tokens[n, :length].tolist(),
      "logps": ended.behavior_logps[n, :length],
      "versions": ended.versions[n, :length].tolist(),
      "finish": int(ended.finish[n]),
    }


def _drain(sampler, params, version=0):
  records = {}
  while sampler.busy:
    sampler.start_chunk(params, version)
    _read(sampler, records)
  return records


def _same(left, right, logps=0.0):
  assert left.keys() == right.keys()
  for name in left:
    assert left[name]["tokens"] == right[name]["tokens"]
    assert left[name]["finish"] == right[name]["finish"]
    np.testing.assert_allclose(
      left[name]["logps"], right[name]["logps"], rtol=0, atol=logps
    )


# The same distribution on both sides.


def _gap(sampler, params, shape):
  """Largest difference between the sampler's log-probs and the learner's."""
  groups = _groups(*range(8))
  rollouts = sampler.generate(params, 0, groups)
  graph = nnx.graphdef(small_policy(shape, mesh=sampler.mesh))
  zeros = np.zeros((len(groups), G), np.int32)
  batch = collate(rollouts, zeros, zeros.astype(np.float32))
  assert batch.mask.sum() == sum(int(r.length.sum()) for r in rollouts)
  warp = tuple(warp_settings(sampler.config).items())

  @jax.jit
  def rescored(params, batch):
    return completion_logps(nnx.merge(graph, params), batch, warp)[0]

  logps = np.asarray(rescored(params, jax.device_put(batch)))
  return np.abs(logps - batch.behavior_logps)[batch.mask].max()


def test_the_learner_gives_the_log_probs_that_were_recorded(room):
  assert _gap(*room, SHAPE) <= 1e-4


# Measured in bfloat16: 4.1e-2, the largest of 100 tokens at temperature 0.6,
# which makes 2.5e-2 of the logits' own error 1 / 0.6 larger.
@pytest.mark.parametrize(
  ("warp", "dtype", "bound"),
  [
    ({"temperature": 1.3, "top_k": 9, "top_p": 0.7}, "float32", 1e-4),
    ({"temperature": 0.6}, "bfloat16", 6e-2),
  ],
  ids=["warm_and_cut", "cool_bfloat16"],
)
def test_the_learner_scores_under_the_distribution_drawn_from(
  warp, dtype, bound
):
  shape = dataclasses.replace(SHAPE, num_layers=1, dtype=dtype)
  sampler, params = _sampler(shape, dataclasses.replace(CONFIG, **warp))
  assert _gap(sampler, params, shape) <= bound


def test_products_of_bfloat16_are_the_same_on_both_sides():
  # Measured: 1.7e-3, where a sum falls on the other side of a rounding.
  shape = dataclasses.replace(SHAPE, dot_dtype="bfloat16")
  sampler, params = _sampler(shape)
  assert _gap(sampler, params, shape) <= 5e-3
  # A learner with products of float32 is another policy: 6.7e-2.
  assert _gap(sampler, params, SHAPE) > 1e-2


# Randomness is addressed.


def _generate(sampler, params, groups):
  """Records by (uid, sample index)."""
  records = {}
  for rollout in sampler.generate(params, 0, groups):
    for row in range(G):
      length = int(rollout.length[row])
      name = int(rollout.uid), int(rollout.first_sample) + row
      records[name] = {
        "tokens": rollout.tokens[row, :length].tolist(),
        "logps": rollout.behavior_logps[row, :length],
        "finish": int(rollout.finish[row]),
      }
  return records


def test_a_completion_has_the_same_bits_in_any_slot_beside_anybody(compiled):
  sampler, params, new = compiled

  def generate(*uids):
    restore(sampler, new)
    return _generate(sampler, params, _groups(*uids))

  both = generate(8, 13)
  _same(generate(13, 8), both)
  for uid in (8, 13):
    alone = generate(uid)
    _same(alone, {name: both[name] for name in alone})


def test_a_completion_has_the_same_tokens_whenever_it_enters(room):
  sampler, params = room
  several = _generate(sampler, params, _groups(8, 13, 4, 21, 30))
  reverse = _generate(sampler, params, _groups(30, 4, 21, 13, 8))
  # Another column of the ring, another order of the same sums.
  _same(several, reverse, logps=1e-5)


def test_samples_differ_and_are_found_again_by_their_index(room):
  sampler, params = room
  first = _generate(sampler, params, _groups(8))
  later = _generate(sampler, params, _groups(8, first_sample=1))
  shared = first.keys() & later.keys()
  assert shared == {(8, 1), (8, 2)}
  left, right = ({n: found[n] for n in shared} for found in (first, later))
  _same(left, right, logps=1e-5)
  fresh = _generate(sampler, params, _groups(8, first_sample=40))
  texts = [tuple(r["tokens"]) for r in (*first.values(), *fresh.values())]
  assert len(set(texts)) == 2 * G
  # The same tokens asked by another prompt are another question.
  twin = dataclasses.replace(_groups(8)[0], uid=9)
  other = _generate(sampler, params, [twin])
  assert [r["tokens"] for r in other.values()] != [
    r["tokens"] for r in first.values()
  ]


# Stops.


def test_completions_end_at_any_end_token_or_at_the_budget(room):
  sampler, params = room
  rollouts = sampler.generate(params, 0, _groups(*range(20)))
  ends = set()
  for rollout in rollouts:
    for row in range(G):
      length = rollout.length[row]
      tokens = rollout.tokens[row]
      assert not np.isin(tokens[: length - 1], EOS_IDS).any()
      ended = tokens[length - 1] in EOS_IDS
      assert ended or length == TC
      assert rollout.finish[row] == (
        FinishReason.EOS if ended else FinishReason.BUDGET
      )
      for record in (tokens, rollout.behavior_logps[row]):
        assert not record[length:].any()
      assert (rollout.behavior_logps[row, :length] < 0.0).all()
      ends.add(int(tokens[length - 1]) if ended else "budget")
  assert ends == {*EOS_IDS, "budget"}
  assert not any(rollout.forced.any() for rollout in rollouts)


def test_rollouts_come_in_the_order_of_their_groups(room):
  sampler, params = room
  groups = [
    dataclasses.replace(group, index=99 - n)
    for n, group in enumerate(_groups(12, 3, 25, 9, 7))
  ]
  rollouts = sampler.generate(params, 6, groups)
  assert [int(rollout.uid) for rollout in rollouts] == [12, 3, 25, 9, 7]
  for rollout, group in zip(rollouts, groups, strict=True):
    known = rollout.prompt[: rollout.prompt_length]
    np.testing.assert_array_equal(known, group.tokens)
    drawn = np.arange(TC) < rollout.length[:, None]
    np.testing.assert_array_equal(rollout.versions, np.where(drawn, 6, 0))


def test_every_token_is_counted_once(room):
  sampler, params = room
  groups = _groups(0, 1)
  sampler.insert(params, 0, groups)
  records, drawn = {}, G * len(groups)
  while sampler.busy:
    sampler.start_chunk(params, 0)
    steps, tokens = sampler.chunk_stats()
    assert 0 <= tokens <= steps * CONFIG.slots
    assert sampler.chunk_stats() == (0, 0)
    drawn += tokens
    _read(sampler, records)
  assert len(records) == G * len(groups)
  assert drawn == sum(len(record["tokens"]) for record in records.values())
  assert sampler.finished() is None


# Versions.


def _versions(params):
  """Three versions of the policy by their numbers."""
  return {
    4: params,
    5: moved(params, 0.1, seed=1),
    9: moved(params, 0.1, seed=2),
  }


def test_each_token_carries_its_version_and_keeps_the_cache_of_older_ones(room):
  sampler, params = room
  versions = _versions(params)
  groups = _groups(13, 9)
  sampler.insert(versions[4], 4, groups)
  records = {}
  for version in (5, 9):
    sampler.start_chunk(versions[version], version)
    _read(sampler, records)
  assert not sampler.busy
  switched = [4, *[5] * CHUNK, *[9] * CHUNK]
  tables = {number: weights(some) for number, some in versions.items()}
  gaps = []
  for (group, _), record in records.items():
    length = len(record["tokens"])
    assert record["versions"] == switched[:length]
    prompt = groups[group].tokens
    slow = reference.decode_logps(
      tables, SHAPE, prompt, record["tokens"], record["versions"]
    )
    np.testing.assert_allclose(record["logps"], slow, rtol=1e-4, atol=1e-4)
    # One version for all, or a cache made again, would be seen.
    for other in ([4] * length, [9] * length):
      wrong = reference.decode_logps(
        tables, SHAPE, prompt, record["tokens"], other
      )
      gaps.append(np.abs(wrong - slow).max())
  assert len(records) == 2 * G
  assert max(gaps) > 1e-2


def test_a_new_sequence_reads_no_prompt_cache_of_an_older_version(compiled):
  sampler, params, new = compiled
  newer = moved(params, 0.2, seed=3)
  late = dataclasses.replace(_groups(9, first_sample=G)[0], index=1)
  restore(sampler, new)
  sampler.insert(newer, 1, [late])
  expected = _drain(sampler, newer, 1)
  restore(sampler, new)
  sampler.insert(params, 0, _groups(9))
  sampler.start_chunk(params, 0)
  # The same prompt again after a publish, while its first group still runs.
  sampler.insert(newer, 1, [late])
  records = _drain(sampler, newer, 1)
  assert len(records) == 2 * G
  again = {name: record for name, record in records.items() if name[0] == 1}
  _same(again, expected, logps=1e-5)
  assert all(set(record["versions"]) == {1} for record in again.values())
  older = [r["versions"] for n, r in records.items() if n[0] == 0]
  assert all(numbers[0] == 0 for numbers in older)
  assert any(numbers[-1] == 1 for numbers in older)


# One program for all.


def _counted(patch):
  """Programs made under this patch are nobody else's, to be counted."""
  patch.setattr(programs, "with_settings", functools.partial)


def test_one_trace_for_all_lengths_and_versions(monkeypatch):
  _counted(monkeypatch)
  sampler, params = _sampler()
  for version in range(3):
    groups = _groups(*range(5 * version, 5 * version + 5))
    sampler.generate(moved(params, 0.1, seed=version), version, groups)
  made = sampler._programs._made
  assert set(made) == {"insert", ("decode", sampler._layout.full)}
  for program in made.values():
    assert program._cache_size() == 1


def test_a_half_written_state_goes_on_as_if_nothing_had_happened(room):
  sampler, params = room
  sampler.insert(params, 0, _groups(13, 9))
  sampler.start_chunk(params, 0)
  half = saved(sampler)
  expected = _drain(sampler, params)
  assert not sampler.busy
  restore(sampler, half)
  assert sampler.busy
  _same(_drain(sampler, params), expected)


# Plans of the rings.

LONG = SamplerConfig(
  slots=16, chunk=2, max_prompt_tokens=TP, max_completion_tokens=20
)


def _long_sampler(ways=1):
  """Completions of a few words, so that most end early and some do not."""
  mesh = make_mesh(jax.devices()[:ways])
  policy = small_policy(ONE_LAYER, vocab_size=13, mesh=mesh)
  graph, params = nnx.split(policy)
  sampler = Sampler(
    graph, params, LONG, group_size=2, eos_ids=(2,), seed=3, mesh=mesh
  )
  return sampler, params


def _long_groups():
  rng = np.random.default_rng(4)
  return [
    Group(n, n, 0, rng.integers(0, 13, 1 + n % TP).astype(np.int32))
    for n in range(13)
  ]


@pytest.fixture(scope="module")
def long_rollouts():
  """What one ring for everybody writes."""
  sampler, params = _long_sampler()
  assert len(sampler._layout.menu) == 1
  rollouts = sampler.generate(params, 0, _long_groups())
  lengths = np.stack([rollout.length for rollout in rollouts])
  assert lengths.min() < 4
  assert lengths.max() == 20
  return rollouts


@pytest.fixture(scope="module")
def planned(long_rollouts):
  """The same on one device, with rings of 8, 16 and 20 columns in plans that
  change often.
  """
  del long_rollouts  # was made with one plan
  with pytest.MonkeyPatch.context() as patch:
    _counted(patch)
    patch.setattr(rings, "NARROWEST", 8)
    patch.setattr(rings, "DENSE_COLUMNS", 1)
    patch.setattr(rings, "AHEAD", 4)
    yield _long_sampler()


def _same_rollouts(found, expected, logps=1e-5):
  for left, right in zip(found, expected, strict=True):
    for name in ("tokens", "length", "finish"):
      np.testing.assert_array_equal(
        getattr(left, name), getattr(right, name), name
      )
    np.testing.assert_allclose(
      left.behavior_logps, right.behavior_logps, rtol=0, atol=logps
    )


# With four devices a plan of few slots would have one for each.
@pytest.mark.parametrize(
  ("ways", "plans"),
  [
    (1, 4),
    pytest.param(2, 4, marks=pytest.mark.slow),
    pytest.param(4, 3, marks=pytest.mark.slow),
  ],
)
def test_any_plans_write_what_one_ring_writes(
  ways, plans, planned, long_rollouts
):
  sampler, params = planned if ways == 1 else _long_sampler(ways)
  layout, taken = sampler._layout, []
  choose = layout.choose

  def remember(ages):
    choice = choose(ages)
    if choice is not None:
      taken.append(choice[0])
    return choice

  with mock.patch.object(layout, "choose", remember):
    found = sampler.generate(params, 0, _long_groups())
  _same_rollouts(found, long_rollouts)
  # Narrow and wide, together and alone, few and all.
  assert len({width for plan in taken for _, width in plan}) == 3
  assert len(set(taken)) >= plans
  few = any(sum(rows for rows, _ in plan) == 4 for plan in taken)
  assert few == (ways < 4)
  # Each program is compiled when its plan is first taken, and once.
  made = sampler._programs._made

  def decoded():
    return {key[1] for key in made if key[0] == "decode"}

  before = decoded()
  assert before <= {*taken, layout.menu[0]} <= set(layout.menu)
  _same_rollouts(sampler.generate(params, 0, _long_groups()), found, logps=0.0)
  assert decoded() == before
  for key, program in made.items():
    sizes = len(sampler._sizes.prompts) if key == "insert" else 1
    assert program._cache_size() <= sizes, key


def test_a_state_saved_under_any_plan_goes_on_identically(planned):
  sampler, params = planned
  new = jax.tree.map(lambda x: (x.shape, x.dtype), saved(sampler))
  halves, records, waiting = {}, {}, _long_groups()
  while waiting or sampler.busy:
    enter, waiting = waiting[: sampler.room], waiting[sampler.room :]
    if enter:
      sampler.insert(params, 0, enter)
    sampler.start_chunk(params, 0)
    _read(sampler, records)
    if not waiting and sampler.busy:
      halves[sampler._layout.plan] = saved(sampler), dict(records)
  assert len(halves) >= 3
  for plan, (half, before) in halves.items():
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), half)
    assert shapes == new
    restore(sampler, half)
    assert sampler._layout.plan == plan
    _same(before | _drain(sampler, params), records)


# Prompts.


def test_a_prompt_is_computed_once_for_all_of_its_group():
  config = dataclasses.replace(CONFIG, slots=64, max_prompt_tokens=9)
  graph, params = nnx.split(small_policy(ONE_LAYER))
  sampler = Sampler(
    graph, params, config, group_size=16, eos_ids=(2,), seed=0, mesh=make_mesh()
  )
  sampler.insert(params, 0, _groups(*range(4)))
  work = sampler.take_work()
  assert (work.prefilled_rows, work.prefilled_tokens) == (4, 4 * 9)
  assert (sampler.state.length == 1).all()
  # The program has no row of prompt tokens for each completion.
  insert = sampler._programs.insert(sampler.state)
  entry = no_entry(4, 9, config, places=8, group_size=16)
  jaxpr = jax.make_jaxpr(insert)(
    params, np.int32(0), without_rings(sampler.state), sampler._key, *entry
  )
  shapes = {
    tuple(variable.aval.shape)
    for equation in equations(jaxpr.jaxpr)
    for variable in equation.outvars
  }
  assert (4, 9, SHAPE.width) in shapes
  assert not [s for s in shapes if 9 in s and 64 in s]


def test_devices_of_a_mesh_draw_the_same_tokens(room):
  sampler, params = room
  expected = _generate(sampler, params, _groups(8, 13, 4))
  mesh = make_mesh(jax.devices()[:4], tensor=2)
  sharded, sharded_params = _sampler(mesh=mesh)
  (ring,) = sharded.state.cache.rings
  for part, width, share in (
    (ring.k, TC, G),
    (sharded.state.cache.prompt_k, TP, 2),
  ):
    assert len(part) == SHAPE.num_layers
    pieces = {x.data.shape for y in part for x in y.addressable_shards}
    assert pieces == {(share, 1, SHAPE.head_width, width)}
  with compilations() as count:
    sharded.compile(sharded_params)
  assert count
  assert not sharded.busy
  with compilations() as count:
    found = _generate(sharded, sharded_params, _groups(8, 13, 4))
  assert not count
  _same(found, expected, logps=1e-4)


# One sentence for bad input, before anybody enters.


@pytest.mark.parametrize("length", [0, TP + 1])
def test_a_prompt_without_tokens_or_over_the_budget_is_refused(room, length):
  sampler, params = room
  wrong = Group(1, 77, 0, np.zeros((length,), np.int32))
  with pytest.raises(
    ValueError, match=rf"prompt 77 has {length} tokens; .*1 to .*\({TP}\)"
  ):
    sampler.insert(params, 0, [*_groups(8), wrong])
  assert not sampler.busy


def test_more_groups_than_room_are_refused_and_nobody_enters(room):
  sampler, params = room
  assert sampler.room == 2
  with pytest.raises(ValueError, match=r"3 groups cannot enter: .*room for 2"):
    sampler.insert(params, 0, _groups(8, 13, 4))
  assert not sampler.busy


def test_generate_needs_an_empty_sampler(room):
  sampler, params = room
  sampler.insert(params, 0, _groups(13))
  with pytest.raises(ValueError, match="busy"):
    sampler.generate(params, 0, _groups(8))
