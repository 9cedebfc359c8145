"""Forced interruption against a slow sampler that forces by the book."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scalerl_jax.config import LengthConfig, SamplerConfig
from scalerl_jax.data.pieces import PieceTokenizer
from scalerl_jax.learning.batching import collate
from scalerl_jax.learning.train_step import completion_logps
from scalerl_jax.models import kv_cache
from scalerl_jax.models.sharding import make_mesh
from scalerl_jax.sampling import interruption as interruptions
from scalerl_jax.sampling.interruption import Interruption, make_interruption
from scalerl_jax.sampling.sampler import Group, Sampler, warp_settings
from scalerl_jax.sampling.slots import empty_slots
from scalerl_jax.types import FinishReason
from tests.helpers import (
  SHAPE,
  compilations,
  equations,
  optimised,
  small_policy,
  weights,
)
from tests.reference import transformer as reference
from tests.sampling.parts import restore, saved

ONE_LAYER = dataclasses.replace(SHAPE, num_layers=1)
# Few words: whatever can be drawn is drawn by some of the completions.
V, G, TP, TC, CHUNK = 7, 3, 5, 13, 3
EOS_IDS = (2,)
CONFIG = SamplerConfig(
  slots=2 * G, chunk=CHUNK, max_prompt_tokens=TP, max_completion_tokens=TC
)
# A drawn 4 makes the marker together with the phrase's first token.
MARKER = Interruption(
  min_thinking=2,
  max_thinking=5,
  answer_tokens=4,
  phrase_ids=(5, 3, 4, 5),
  end_ids=(4, 5),
)
SINGLE = Interruption(
  min_thinking=1,
  max_thinking=4,
  answer_tokens=2,
  phrase_ids=(4,),
  end_ids=(4,),
)
UIDS = range(20)


def _sampler(interruption=None, *, mesh=None):
  mesh = mesh or make_mesh()
  policy = small_policy(ONE_LAYER, vocab_size=V, mesh=mesh)
  graph, params = nnx.split(policy)
  sampler = Sampler(
    graph,
    params,
    CONFIG,
    group_size=G,
    eos_ids=EOS_IDS,
    seed=0,
    mesh=mesh,
    interruption=interruption,
  )
  return sampler, params


@pytest.fixture(scope="module")
def compiled():
  """One sampler for most of the tests, and what it was when it was new."""
  sampler, params = _sampler(MARKER)
  return sampler, params, saved(sampler)


@pytest.fixture
def room(compiled):
  """(sampler, params) with nobody in any slot."""
  sampler, params, new = compiled
  restore(sampler, new)
  return sampler, params


def _groups(*uids):
  return [
    Group(
      index=n,
      uid=uid,
      first_sample=uid % 2,
      tokens=np.random.default_rng(uid)
      .integers(0, V, 1 + uid % TP)
      .astype(np.int32),
    )
    for n, uid in enumerate(uids)
  ]


def _records(sampler, params, groups):
  """What was sampled, by (uid, sample index)."""
  records = {}
  for rollout in sampler.generate(params, 6, groups):
    for row in range(G):
      length = int(rollout.length[row])
      assert not rollout.forced[row, length:].any()
      assert (rollout.versions[row, :length] == 6).all()
      name = int(rollout.uid), int(rollout.first_sample) + row
      records[name] = {
        "tokens": rollout.tokens[row, :length].tolist(),
        "forced": rollout.forced[row, :length].tolist(),
        "logps": rollout.behavior_logps[row, :length],
        "finish": int(rollout.finish[row]),
      }
  return records


def _read(sampler, into):
  """Adds what has ended to `into`: (group, row) -> its record."""
  ended = sampler.finished()
  if ended is None:
    return
  for n, name in enumerate(zip(ended.groups, ended.rows, strict=True)):
    length = int(ended.length[n])
    into[tuple(map(int, name))] = {
      "tokens": ended.tokens[n, :length].tolist(),
      "forced": ended.forced[n, :length].tolist(),
      "logps": ended.behavior_logps[n, :length],
      "finish": int(ended.finish[n]),
    }


def _same(left, right, logps=0.0):
  assert left.keys() == right.keys()
  for name in left:
    for part in ("tokens", "forced", "finish"):
      assert left[name][part] == right[name][part], (name, part)
    np.testing.assert_allclose(
      left[name]["logps"], right[name]["logps"], rtol=0, atol=logps
    )


def _key(uid, sample):
  key = jax.random.key(0, impl="threefry2x32")
  return jax.random.fold_in(jax.random.fold_in(key, uid), sample)


@jax.jit
def _uniform(uid, sample, position):
  return jax.random.uniform(jax.random.fold_in(_key(uid, sample), position))


@jax.jit
def _draw_budget(uid, sample, low, high):
  # No token has this position.
  key = jax.random.fold_in(_key(uid, sample), np.uint32(4294967295))
  return jax.random.randint(key, (), low, high + 1)


def _thinking_budget(uid, sample, rule):
  return int(_draw_budget(uid, sample, rule.min_thinking, rule.max_thinking))


def _by_the_book(table, group, sample, rule):
  """A completion's record by the book, in float64, and what happened in it."""
  sequence, end = reference.Sequence(ONE_LAYER), list(rule.end_ids)
  budget = _thinking_budget(group.uid, sample, rule)
  for token in group.tokens:
    hidden = sequence.read(table, token)
  tokens, logps, forced, happened = [], [], [], set()
  thinks, waiting, allowed = True, [], TC
  while True:
    if thinks and not waiting and len(tokens) == budget:
      waiting = list(rule.phrase_ids)
      happened.add("interrupted")
      happened.add(("phrase starts in chunk at", (budget - 1) % CHUNK))
      happened.add(("budget", budget))
    forced.append(bool(waiting))
    if waiting:
      tokens.append(waiting.pop(0))
      logps.append(0.0)
      over = not waiting
      if not over and tokens[-len(end) :] == end:
        happened.add("marker across the phrase's first token")
    else:
      row = reference.log_softmax(reference.logits(table, hidden))
      uniform = float(_uniform(group.uid, sample, len(tokens)))
      tokens.append(int((np.cumsum(np.exp(row)) <= uniform).sum()))
      logps.append(row[tokens[-1]])
      over = tokens[-len(end) :] == end
    if over and not thinks:
      happened.add("thinking opened again")
    if over and thinks:
      thinks, allowed = False, min(TC, len(tokens) + rule.answer_tokens)
      how = "forced end" if forced[-1] else "drawn end"
      happened.update({how, (how, "at token", len(tokens))})
    if tokens[-1] in EOS_IDS:
      finish = FinishReason.EOS
      happened.add(f"end token, thinking {thinks}")
      break
    if len(tokens) == allowed:
      finish = FinishReason.BUDGET
      happened.add(f"budget, thinking {thinks}")
      break
    hidden = sequence.read(table, tokens[-1])
  record = {
    "tokens": tokens,
    "forced": forced,
    "logps": np.array(logps),
    "finish": int(finish),
  }
  return record, happened


def _all_by_the_book(params, groups, rule):
  table, records, happened = weights(params), {}, set()
  for group in groups:
    for row in range(G):
      name = group.uid, group.first_sample + row
      records[name], events = _by_the_book(table, group, name[1], rule)
      happened |= events
  return records, happened


ALWAYS = {
  "interrupted",
  "drawn end",
  "forced end",
  "thinking opened again",
  "end token, thinking True",
  "end token, thinking False",
  "budget, thinking False",
  *[("phrase starts in chunk at", n) for n in range(CHUNK)],
}


def test_a_phrase_of_several_tokens_is_forced_by_the_book(room):
  sampler, params = room
  groups = _groups(*UIDS)
  expected, happened = _all_by_the_book(params, groups, MARKER)
  _same(_records(sampler, params, groups), expected, logps=1e-4)
  assert happened >= ALWAYS | {
    "marker across the phrase's first token",
    *[("budget", n) for n in range(2, 6)],
  }


def test_devices_of_a_mesh_force_a_phrase_of_one_token_by_the_book():
  sampler, params = _sampler(SINGLE, mesh=make_mesh(jax.devices()[:2]))
  thinking = sampler.state.thinking
  assert {x.data.shape for x in thinking.forced.addressable_shards} == {(TC, G)}
  for per_slot in (thinking.budget, thinking.ended):
    assert {x.data.shape for x in per_slot.addressable_shards} == {(G,)}
  groups = _groups(*UIDS)
  expected, happened = _all_by_the_book(params, groups, SINGLE)
  sampler.compile(params)
  assert not sampler.busy
  with compilations() as count:
    found = _records(sampler, params, groups)
  assert not count
  _same(found, expected, logps=1e-4)
  # The first token, which the prefill draws, ends the thinking, or is all of
  # it.
  assert happened >= ALWAYS | {
    ("drawn end", "at token", 1),
    ("forced end", "at token", 2),
    *[("budget", n) for n in range(1, 5)],
  }


def test_the_answer_budget_counts_from_the_end_of_thinking(room):
  sampler, params = room
  found = set()
  # Many: a drawn end and no end token after it is rare.
  records = _records(sampler, params, _groups(*range(60)))
  for (uid, sample), record in records.items():
    tokens, forced = record["tokens"], np.flatnonzero(record["forced"])
    if forced.size:
      start = _thinking_budget(uid, sample, MARKER)
      assert forced.tolist() == list(range(start, start + 4))
      assert tuple(tokens[start : start + 4]) == MARKER.phrase_ids
      assert not record["logps"][forced].any()
      ended = start + 4
    else:
      pairs = list(itertools.pairwise(tokens))
      if MARKER.end_ids not in pairs:
        assert tokens[-1] in EOS_IDS
        continue
      ended = pairs.index(MARKER.end_ids) + 2
      assert ended <= _thinking_budget(uid, sample, MARKER)
    answer = len(tokens) - ended
    if record["finish"] == FinishReason.BUDGET:
      assert answer == MARKER.answer_tokens
      opened = MARKER.end_ids in itertools.pairwise(tokens[ended:])
      found.add((bool(forced.size), opened))
    assert answer <= MARKER.answer_tokens
  # Cut after a forced and after a drawn end, thinking opened again or not.
  assert found >= {(True, True), (True, False), (False, False)}


def test_the_learner_reads_forced_tokens_and_trains_on_none(room):
  sampler, params = room
  groups = _groups(*range(8))
  rollouts = sampler.generate(params, 0, groups)
  zeros = np.zeros((len(groups), G), np.int32)
  batch = collate(rollouts, zeros, zeros.astype(np.float32))
  forced = sum(int(rollout.forced.sum()) for rollout in rollouts)
  lengths = sum(int(rollout.length.sum()) for rollout in rollouts)
  assert forced > 0
  assert batch.mask.sum() == lengths - forced
  graph = nnx.graphdef(small_policy(ONE_LAYER, vocab_size=V, mesh=sampler.mesh))
  warp = tuple(warp_settings(CONFIG).items())

  @jax.jit
  def rescored(params, batch):
    return completion_logps(nnx.merge(graph, params), batch, warp)[0]

  logps = np.asarray(rescored(params, jax.device_put(batch)))
  gaps = np.abs(logps - batch.behavior_logps)
  # Tokens of answers that follow a phrase are among those that count.
  answers = 0
  for n, rollout in enumerate(rollouts):
    for row in range(G):
      where = np.flatnonzero(rollout.forced[row])
      if where.size:
        after = int(rollout.prompt_length) + where[-1] + 1
        last = int(rollout.prompt_length) + int(rollout.length[row])
        assert batch.mask[n * G + row, after:last].all()
        answers += last - after
  assert answers > 0
  assert gaps[batch.mask].max() <= 1e-4


# Randomness is addressed.

BUDGETS = jax.jit(interruptions.thinking_budgets, static_argnums=1)


def _keys(names):
  return jnp.stack([jax.random.key_data(_key(*name)) for name in names])


def test_thinking_budgets_are_uniform_between_both_ends():
  rule = dataclasses.replace(MARKER, min_thinking=3, max_thinking=9)
  count = 7000
  keys = jax.jit(jax.vmap(lambda n: jax.random.key_data(_key(17, n))))
  budgets = np.asarray(BUDGETS(keys(jnp.arange(count)), rule))
  counts = np.bincount(budgets, minlength=10)
  assert not counts[:3].any()
  assert counts[3:].sum() == count
  # Six degrees of freedom: chance passes 22.5 once in a thousand.
  expected = count / 7
  assert ((counts[3:] - expected) ** 2 / expected).sum() < 22.5


def test_a_thinking_budget_is_addressed_by_prompt_and_sample():
  names = [(uid, sample) for uid in (3, 8, 2**31 - 1) for sample in range(5)]
  rule = dataclasses.replace(MARKER, min_thinking=10, max_thinking=10_000)
  budgets = BUDGETS(_keys(names), rule).tolist()
  assert budgets == [_thinking_budget(*name, rule) for name in names]
  assert len(set(budgets)) == len(names)


def test_one_length_of_thinking_is_a_range_too():
  rule = dataclasses.replace(MARKER, min_thinking=4, max_thinking=4)
  keys = _keys([(1, 0), (1, 1), (4, 0)])
  assert BUDGETS(keys, rule).tolist() == [4, 4, 4]


def test_an_interruption_is_the_same_in_any_slot_beside_anybody(compiled):
  sampler, params, new = compiled

  def generate(*uids):
    restore(sampler, new)
    return _records(sampler, params, _groups(*uids))

  both = generate(8, 13)
  assert any(any(record["forced"]) for record in both.values())
  _same(generate(13, 8), both)
  for uid in (8, 13):
    alone = generate(uid)
    _same(alone, {name: both[name] for name in alone})
  # Another time of entering: another column, another order of the same sums.
  later = generate(0, 1, 8, 2, 13)
  _same({name: later[name] for name in both}, both, logps=1e-5)


# State.


def test_a_state_saved_inside_a_phrase_goes_on_identically(room):
  sampler, params = room
  sampler.insert(params, 0, _groups(8, 13))
  records, halves = {}, []
  while sampler.busy:
    halves.append((saved(sampler), dict(records)))
    sampler.start_chunk(params, 0)
    _read(sampler, records)
  inside = [
    (half, before)
    for half, before in halves
    if _inside_a_phrase(half["slots"]).any()
  ]
  assert inside
  for half, before in inside:
    restore(sampler, half)
    again = dict(before)
    while sampler.busy:
      sampler.start_chunk(params, 0)
      _read(sampler, again)
    _same(again, records)


def _inside_a_phrase(slots):
  """Slots whose newest token was forced, with more of the phrase to come."""
  newest = (slots.start + slots.length - 1) % TC
  forced = slots.thinking.forced[newest, np.arange(len(newest))]
  return slots.active & forced & (slots.thinking.ended == 0)


# Off.


def test_what_comes_before_an_interruption_is_what_would_have_come():
  # Bit for bit in programs that are optimised, as a user's are.
  with optimised():
    sampler, params = _sampler(MARKER)
    free, free_params = _sampler()
    groups = _groups(8, 13)
    found = _records(sampler, params, groups)
    expected = _records(free, free_params, groups)
  assert not any(any(record["forced"]) for record in expected.values())
  changed = 0
  for name, record in found.items():
    forced = np.flatnonzero(record["forced"])
    length = forced[0] if forced.size else len(record["tokens"])
    other = expected[name]
    assert record["tokens"][:length] == other["tokens"][:length]
    np.testing.assert_array_equal(
      record["logps"][:length], other["logps"][:length]
    )
    changed += forced.size
  assert changed


def test_without_interruption_a_chunk_remembers_nothing_of_thinking(room):
  sampler, params = room
  free, _ = _sampler()

  def flags(sampler):
    """Whether a chunk makes anything of a flag a token and slot."""
    decode = sampler._programs.decode(sampler.state, sampler._layout.plan)
    jaxpr = jax.make_jaxpr(decode)(params, 0, sampler.state)
    return any(
      variable.aval.shape == (TC, CONFIG.slots) and variable.aval.dtype == bool
      for equation in equations(jaxpr.jaxpr)
      for variable in equation.outvars
    )

  assert free.state.thinking is None
  assert flags(sampler)
  assert not flags(free)


# From texts to tokens.

TEXTS = ["0123456789 abcdefghijklmnopqrstuvwxyz<>/.="]


def _tokenizer(*symbols, end_symbols=()):
  return PieceTokenizer.train(TEXTS, symbols=symbols, end_symbols=end_symbols)


def _length(**changes):
  return LengthConfig(control="interruption", **changes)


def _make(tokenizer, max_completion_tokens=64, **changes):
  return make_interruption(
    _length(**changes), tokenizer, max_completion_tokens=max_completion_tokens
  )


@pytest.mark.parametrize("control", ["none", "penalty"])
def test_other_length_controls_interrupt_nothing(control):
  length = LengthConfig(control=control, phrase="?=")
  assert (
    make_interruption(length, _tokenizer(), max_completion_tokens=1) is None
  )


@pytest.mark.parametrize(("symbols", "count"), [(("</think>",), 1), ((), 8)])
def test_texts_become_the_special_ids_where_there_are_some(symbols, count):
  tokenizer = _tokenizer(*symbols)
  made = _make(
    tokenizer, phrase="time is up. </think>", thinking_end="</think>"
  )
  assert len(made.end_ids) == count
  assert len(made.phrase_ids) == len("time is up. ") + count
  assert tokenizer.decode(made.phrase_ids) == "time is up. </think>"
  assert tokenizer.decode(made.end_ids) == "</think>"
  assert (made.min_thinking, made.max_thinking) == (10, 12)
  assert made.answer_tokens == 2
  if symbols:
    assert made.end_ids == (tokenizer.pieces.index("</think>"),)
  # A static of compiled programs.
  assert hash(made) == hash(dataclasses.replace(made))


class _Odd(PieceTokenizer):
  """A tokenizer that encodes one text in a way of its own."""

  odd = ("", ())

  def encode(self, text):
    if text == self.odd[0]:
      return np.array(self.odd[1], np.int32)
    return super().encode(text)


def _odd(text, tokens):
  tokenizer = _Odd(_tokenizer("=")._model)
  tokenizer.odd = (text, tokens)
  return tokenizer


@pytest.mark.parametrize(
  ("tokenizer", "changes", "message"),
  [
    (
      _tokenizer,
      {"phrase": "stop!="},
      r"length\.phrase: .*'stop!=' with the unknown piece '!'",
    ),
    (
      _tokenizer,
      {"phrase": "?", "thinking_end": "?"},
      r"length\.phrase: .*unknown piece '\?'",
    ),
    (
      lambda: _tokenizer(end_symbols=["<end>"]),
      {"phrase": "<end>", "thinking_end": "<end>"},
      r"length\.phrase must be encoded as the tokenizer's own piece '<end>'"
      r" \(3\), got the tokens \(\d+(, \d+){4}\); ",
    ),
    (
      lambda: _odd("stop=", _tokenizer("=").encode("stip=")),
      {"phrase": "stop="},
      r"length\.phrase must come back .*'stop=' of which .* make 'stip='",
    ),
    (
      lambda: _tokenizer("e="),
      {"phrase": "done="},
      r"length\.phrase must end with the tokens of length\.thinking_end"
      r" \(\d+,\), got the tokens \(\d+(, \d+){3}\); ",
    ),
    (
      _tokenizer,
      {"phrase": "a=b="},
      r"length\.phrase must hold the tokens .* only at its end, got",
    ),
    (
      _tokenizer,
      {"phrase": "zababa", "thinking_end": "aba"},
      r"length\.phrase must hold the tokens .* only at its end, got",
    ),
    (
      lambda: _odd("b=", [1, *_tokenizer("=").encode("b=")]),
      {"phrase": "b="},
      r"length\.phrase must hold no token that ends a completion, got the"
      r" tokens .* with the end token 1; ",
    ),
  ],
  ids=[
    "unknown_piece",
    "unknown_end",
    "piece_out_of_reach",
    "another_text_back",
    "end_inside_a_piece",
    "end_twice",
    "ends_that_overlap",
    "end_token",
  ],
)
def test_texts_that_cannot_be_forced_as_promised_are_refused(
  tokenizer, changes, message
):
  with pytest.raises(ValueError, match=message) as caught:
    _make(tokenizer(), **changes)
  assert "\n" not in str(caught.value)


def test_budgets_over_the_completion_budget_are_refused_with_the_numbers():
  budgets = {
    "max_thinking_tokens": 12,
    "answer_tokens": 3,
    "phrase": "stop=",
  }
  assert _make(_tokenizer(), 20, **budgets) is not None
  with pytest.raises(
    ValueError,
    match=r"sampler\.max_completion_tokens \(19\), got 12 \+ 5 \+ 3 = 20; ",
  ):
    _make(_tokenizer(), 19, **budgets)


def test_a_sampler_refuses_what_it_could_not_force():
  with pytest.raises(ValueError, match=r"\(13\), got 6 \+ 4 \+ 4 = 14"):
    _sampler(dataclasses.replace(MARKER, max_thinking=6))
  with pytest.raises(ValueError, match="with the end token 2"):
    _sampler(dataclasses.replace(MARKER, phrase_ids=(2, 4, 5)))


def test_a_marker_is_looked_for_in_the_completion_alone():
  rule = dataclasses.replace(MARKER, phrase_ids=(3, 4, 5, 6), end_ids=(4, 5, 6))
  state = empty_slots(
    kv_cache.empty_cache(
      layers=1,
      unrolled=True,
      prompts=1,
      slots=5,
      kv_heads=1,
      head_width=2,
      prompt_tokens=2,
      completion_tokens=TC,
      dtype=jnp.float32,
    ),
    completion_tokens=TC,
    interrupted=True,
  )
  # The ring's first columns and its last one make the marker with a 6 in all
  # slots but the third; in the first two it is not all of the slot's own.
  ring = state.tokens.at[TC - 1].set(4).at[0].set(5)
  ring = ring.at[TC - 1, 2].set(3)
  state = dataclasses.replace(
    state,
    tokens=ring,
    length=jnp.array([0, 1, 3, 2, 3], jnp.int32),
    active=jnp.array([True, True, True, True, False]),
    thinking=dataclasses.replace(
      state.thinking, budget=jnp.full(5, 9, jnp.int32)
    ),
  )
  _, logps, thinking = interruptions.interrupt(
    state, jnp.int32(1), jnp.full(5, 6, jnp.int32), jnp.full(5, -0.5), rule
  )
  assert thinking.ended.tolist() == [0, 0, 0, 3, 0]
  assert not thinking.forced.any()
  assert (logps == -0.5).all()


def test_the_answer_budget_never_passes_the_completion_budget():
  allowed = interruptions.answer_budget(
    jnp.array([9, 9, 5, 9], jnp.int32),
    jnp.array([0, 3, 3, 7], jnp.int32),
    MARKER,
  )
  assert allowed.tolist() == [9, 7, 5, 9]
