"""The order of prompts: fair, shuffled, addressed, restorable; retirement."""

import collections
import dataclasses
import fractions
import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from scalerl_jax.config import CurriculumConfig
from scalerl_jax.data import curriculum as curriculum_room
from scalerl_jax.data.curriculum import PromptStream
from scalerl_jax.run.checkpoint import load_tree, save_tree
from scalerl_jax.types import Prompt

NO_POSITIVES = CurriculumConfig(no_positive_resampling=True)


def make(count, task="", first=100):
  return [
    Prompt(
      first + i,
      f"p{i}",
      np.zeros(3, np.int32),
      "0",
      task=task,
      difficulty=float(5 * i % 3),
    )
    for i in range(count)
  ]


PROMPTS = make(7)
MIXED = [*make(5, "sums"), *make(3, "logic", 200), *make(4, "code", 300)]
SHARES = {"sums": 0.5, "logic": 0.2, "code": 0.3}


def order(prompt_stream, count):
  return [(p.uid, visit) for p, visit in prompt_stream.next(count)]


def uids(prompt_stream, count):
  return [uid for uid, _ in order(prompt_stream, count)]


def judge(prompt_stream, correct, samples=16):
  for uid, right in correct.items():
    prompt_stream.record(uid, right, samples)


# Uniform order.


def test_the_default_order_is_the_one_that_old_runs_had():
  # Given by the stream that knew the uniform order only.
  assert uids(PromptStream(PROMPTS, seed=3), 21) == [
    *(106, 101, 105, 103, 104, 102, 100),
    *(105, 103, 106, 102, 104, 100, 101),
    *(101, 104, 102, 105, 100, 106, 103),
  ]
  given = uids(PromptStream(make(4000, first=0), seed=0), 12_000)
  assert given[:6] == [477, 1113, 641, 2017, 3681, 1356]
  assert given[4000:4006] == [3654, 1425, 3690, 1258, 786, 3768]
  assert given[8000:8006] == [2432, 1704, 3847, 662, 266, 1283]


def test_every_prompt_once_an_epoch_and_visits_count_up():
  given = order(PromptStream(PROMPTS, seed=3), 3 * 7)
  for epoch in range(3):
    part = given[7 * epoch : 7 * (epoch + 1)]
    assert {uid for uid, _ in part} == {p.uid for p in PROMPTS}
    assert {visit for _, visit in part} == {epoch}
  assert max(collections.Counter(given).values()) == 1


def test_epochs_and_seeds_differ_in_order():
  given = uids(PromptStream(PROMPTS, seed=3), 14)
  other = uids(PromptStream(PROMPTS, seed=4), 7)
  assert given[:7] != given[7:]
  assert given[:7] != other


def test_the_size_of_requests_does_not_matter():
  whole = order(PromptStream(MIXED, seed=0, weights=SHARES), 24)
  pieces = PromptStream(MIXED, seed=0, weights=SHARES)
  assert [x for n in (1, 0, 5, 10, 8) for x in order(pieces, n)] == whole


def test_an_epoch_is_ordered_once(monkeypatch):
  epochs = []

  def counted(seed, purpose, index):
    epochs.append(index)
    return np.random.default_rng(index)

  monkeypatch.setattr(curriculum_room, "stream", counted)
  prompt_stream = PromptStream(PROMPTS, seed=3)
  for _ in range(15):
    prompt_stream.next(1)
  assert epochs == [0, 1, 2]


# Easy to hard.


def test_easy_to_hard_sorts_an_epoch_and_keeps_the_shuffle_of_equals():
  config = CurriculumConfig(order="easy_to_hard")
  given = PromptStream(PROMPTS, seed=3, curriculum=config).next(21)
  uniform = PromptStream(PROMPTS, seed=3).next(21)
  for epoch in range(3):
    part = slice(7 * epoch, 7 * epoch + 7)
    assert given[part] == sorted(uniform[part], key=lambda g: g[0].difficulty)
  assert given[:7] != given[7:14]


def test_a_difficulty_that_cannot_be_ordered_is_refused():
  config = CurriculumConfig(order="easy_to_hard")
  strange = Prompt(9, "p", np.zeros(3, np.int32), "0", difficulty=np.nan)
  with pytest.raises(ValueError, match=r"finite .* got nan for prompt 9"):
    PromptStream([*PROMPTS, strange], seed=0, curriculum=config)


# No-Positive-Resampling.


class Scalar:
  """What a stream may give, one prompt and one verdict at a time."""

  def __init__(self, pools, config):
    self.config = config
    self.active = [set(pool) for pool in pools]
    self.left = [set(pool) for pool in pools]
    self.epoch = [0] * len(pools)
    self.verdicts = collections.defaultdict(list)
    self.retired = set()

  def rate(self, uid):
    verdicts = self.verdicts[uid]
    if self.config.history == "last_visit":
      verdicts = verdicts[-1:]
    samples = sum(s for _, s in verdicts)
    return fractions.Fraction(sum(c for c, _ in verdicts), samples or 1)

  def end_epoch(self, pool):
    bound = fractions.Fraction(str(self.config.retire_at))
    leaves = {
      uid
      for uid in self.active[pool]
      if self.config.no_positive_resampling
      and len(self.verdicts[uid]) >= self.config.min_visits
      and self.rate(uid) >= bound
    }
    if leaves == self.active[pool]:
      lowest = min(self.rate(uid) for uid in leaves)
      leaves = {uid for uid in leaves if self.rate(uid) > lowest}
    self.retired |= leaves
    self.active[pool] -= leaves
    self.left[pool] = set(self.active[pool])
    self.epoch[pool] += 1

  def accept(self, uid, visit):
    pool = next(i for i, p in enumerate(self.active) if uid in p)
    if not self.left[pool]:
      self.end_epoch(pool)
    assert visit == self.epoch[pool]
    assert uid in self.left[pool]
    self.left[pool].remove(uid)


CONFIGS = st.fixed_dictionaries(
  {
    "order": st.sampled_from(["uniform", "easy_to_hard"]),
    "no_positive_resampling": st.sampled_from([True, True, True, False]),
    "retire_at": st.sampled_from([0.9, 0.5, 0.7, 1.0]),
    "min_visits": st.integers(1, 3),
    "history": st.sampled_from(["cumulative", "last_visit"]),
  }
)
# (prompts to give, which groups in flight to judge and how, whether to resume)
SCRIPTS = st.lists(
  st.tuples(
    st.integers(0, 9),
    st.lists(st.tuples(st.integers(0, 99), st.sampled_from([0, 5, 7, 9, 10]))),
    st.booleans(),
  ),
  min_size=1,
  max_size=12,
)


@pytest.mark.parametrize("weights", [None, SHARES])
@hypothesis.given(choices=CONFIGS, script=SCRIPTS, seed=st.integers(0, 99))
def test_any_history_gives_what_a_scalar_loop_allows(
  weights, choices, script, seed
):
  config = CurriculumConfig(**choices)

  def fresh():
    return PromptStream(MIXED, seed=seed, curriculum=config, weights=weights)

  pools = collections.defaultdict(set)
  for prompt in MIXED:
    pools[prompt.task if weights else ""].add(prompt.uid)
  scalar, whole, resumed = Scalar(pools.values(), config), fresh(), fresh()
  in_flight, seen = [], set()
  for count, verdicts, resumes in script:
    if resumes:  # in the middle of epochs, with verdicts not yet acted on
      state, resumed = resumed.state(), fresh()
      resumed.next(5)
      resumed.restore(state)
    given = order(whole, count)
    assert order(resumed, count) == given
    assert not seen & set(given)
    seen |= set(given)
    for uid, visit in given:
      scalar.accept(uid, visit)
      in_flight.append(uid)
    for which, correct in verdicts:
      if in_flight:  # ends in any order
        uid = in_flight.pop(which % len(in_flight))
        scalar.verdicts[uid].append((correct, 10))
        whole.record(uid, correct, 10)
        resumed.record(uid, correct, 10)
    assert whole.retired_share == len(scalar.retired) / len(MIXED)
  for name, value in whole.state().items():
    np.testing.assert_array_equal(resumed.state()[name], value)


def test_a_retired_prompt_is_never_given_again():
  prompts, rng = make(50), np.random.default_rng(0)
  skill = dict(zip((p.uid for p in prompts), rng.beta(1, 2, 50), strict=True))
  right = dict.fromkeys(skill, 0)
  prompt_stream = PromptStream(prompts, seed=1, curriculum=NO_POSITIVES)
  epochs, could = {}, {}
  for _ in range(900):
    ((uid, visit),) = order(prompt_stream, 1)
    if visit not in epochs:
      # 9/10 of the completions so far, of `visit` groups each.
      before = epochs.get(visit - 1, [])
      able = {u for u in before if 10 * right[u] >= 9 * 16 * visit}
      could[visit] = could.get(visit - 1, set()) | able
      epochs[visit] = []
    epochs[visit].append(uid)
    assert uid not in could[visit]
    if uid % 3:  # the others never learn, so some stay
      skill[uid] += 0.3 * (1 - skill[uid])
    correct = int(rng.binomial(16, skill[uid]))
    right[uid] += correct
    prompt_stream.record(uid, correct, 16)
  assert len(epochs) > 20
  for before, after in itertools.pairwise(list(epochs.values())):
    assert len(set(after)) == len(after)
    assert set(after) <= set(before)
  assert len(epochs[0]) == 50
  assert len(epochs[20]) < 25
  assert prompt_stream.retired_share == len(could[max(epochs)]) / 50


@pytest.mark.parametrize(
  ("retire_at", "correct", "samples", "retires"),
  [
    (0.9, 9, 10, True),
    (0.9, 15, 16, True),
    (0.9, 14, 16, False),
    (0.9, 90_000_000, 100_000_000, True),
    (0.9, 89_999_999, 100_000_000, False),
    (0.55, 55, 100, True),  # 0.55 · 100 rounds to above 55
    (0.6, 3, 5, True),
    (2 / 3, 2, 3, True),
    (1.0, 16, 16, True),
    (1.0, 15, 16, False),
  ],
)
def test_the_threshold_is_exact(retire_at, correct, samples, retires):
  config = CurriculumConfig(no_positive_resampling=True, retire_at=retire_at)
  prompt_stream = PromptStream(PROMPTS, seed=0, curriculum=config)
  prompt_stream.next(7)
  prompt_stream.record(103, correct, samples)
  assert (103 not in uids(prompt_stream, 7)) == retires
  assert prompt_stream.retired_share == (1 / 7 if retires else 0)


@hypothesis.given(
  thousandths=st.integers(1, 1000),
  samples=st.integers(1, 100_000),
  near=st.integers(-1, 1),
)
def test_rounding_flips_no_threshold(thousandths, samples, near):
  bound = fractions.Fraction(thousandths, 1000)
  correct = min(max(int(bound * samples) + near, 0), samples)
  config = CurriculumConfig(
    no_positive_resampling=True, retire_at=thousandths / 1000
  )
  prompt_stream = PromptStream(PROMPTS[:2], seed=0, curriculum=config)
  prompt_stream.next(2)
  prompt_stream.record(100, correct, samples)
  prompt_stream.next(1)
  retires = fractions.Fraction(correct, samples) >= bound
  assert (prompt_stream.retired_share > 0) == retires


@pytest.mark.parametrize(
  ("history", "verdicts", "retires"),
  [
    ("cumulative", [8, 16], False),  # 24 of 32
    ("last_visit", [8, 16], True),
    ("cumulative", [16, 14], True),  # 30 of 32
    ("last_visit", [16, 14], False),
  ],
)
def test_the_history_is_all_visits_or_the_newest(history, verdicts, retires):
  config = CurriculumConfig(
    no_positive_resampling=True, history=history, min_visits=2
  )
  prompt_stream = PromptStream(PROMPTS, seed=0, curriculum=config)
  for correct in verdicts:
    assert 103 in uids(prompt_stream, 7)
    prompt_stream.record(103, correct, 16)
  assert (103 not in uids(prompt_stream, 7)) == retires


def test_so_many_groups_are_judged_before_a_prompt_retires():
  config = CurriculumConfig(no_positive_resampling=True, min_visits=3)
  prompt_stream = PromptStream(PROMPTS, seed=0, curriculum=config)
  for _ in range(3):
    assert 103 in uids(prompt_stream, 7)
    prompt_stream.record(103, 16, 16)
  assert 103 not in uids(prompt_stream, 6)


def test_late_verdicts_count_when_the_next_epoch_ends():
  prompt_stream = PromptStream(PROMPTS, seed=0, curriculum=NO_POSITIVES)
  prompt_stream.next(7)
  first = uids(prompt_stream, 1)[0]  # epoch 1 has begun
  late = next(p.uid for p in PROMPTS if p.uid != first)
  judge(prompt_stream, {first: 16, late: 16})
  assert late in uids(prompt_stream, 6)
  assert prompt_stream.retired_share == 0
  third = uids(prompt_stream, 5)
  assert prompt_stream.retired_share == 2 / 7
  assert not {first, late} & set(third)
  # In flight while it was retired: recorded, and it stays retired.
  prompt_stream.record(late, 0, 16)
  place = late - 100
  assert prompt_stream.state()["samples"][place] == 32
  assert prompt_stream.state()["correct"][place] == 16
  assert late not in uids(prompt_stream, 10)


def test_an_epoch_ends_when_the_next_one_is_asked_for():
  prompt_stream = PromptStream(PROMPTS, seed=0, curriculum=NO_POSITIVES)
  prompt_stream.next(7)
  prompt_stream.record(104, 16, 16)
  assert prompt_stream.retired_share == 0
  prompt_stream.next(1)
  assert prompt_stream.retired_share == 1 / 7


@pytest.mark.parametrize(
  ("correct", "stay"),
  [
    ([16, 15, 16, 16, 16, 16, 16], {101}),
    ([16, 15, 16, 15, 16, 16, 16], {101, 103}),
    ([16] * 7, {p.uid for p in PROMPTS}),
  ],
)
def test_the_hardest_stay_when_all_would_go(correct, stay):
  prompt_stream = PromptStream(PROMPTS, seed=0, curriculum=NO_POSITIVES)
  given = order(prompt_stream, 7)
  judge(
    prompt_stream, dict(zip((p.uid for p in PROMPTS), correct, strict=True))
  )
  after = order(prompt_stream, 2 * len(stay))
  assert {uid for uid, _ in after} == stay
  assert prompt_stream.retired_share == (7 - len(stay)) / 7
  assert max(collections.Counter(given + after).values()) == 1
  # Not for ever: they go as soon as another stays.
  if len(stay) == 2:
    prompt_stream.record(103, 0, 16)
    assert set(uids(prompt_stream, 3)) == {103}


def test_nothing_retires_when_it_is_off():
  judged = PromptStream(PROMPTS, seed=3)
  given = order(judged, 7)
  judge(judged, dict.fromkeys((uid for uid, _ in given), 16))
  given += order(judged, 14)
  assert given == order(PromptStream(PROMPTS, seed=3), 21)
  assert judged.retired_share == 0


@pytest.mark.parametrize(
  ("uid", "correct", "samples", "sentence"),
  [
    (7, 1, 2, "prompt of this stream, got 7"),
    (100, 3, 2, "got 3 correct of 2 for prompt 100"),
    (100, -1, 2, "got -1 correct of 2"),
    (100, 0, 0, "got 0 correct of 0"),
  ],
)
def test_a_strange_verdict_is_refused(uid, correct, samples, sentence):
  with pytest.raises(ValueError, match=sentence):
    PromptStream(PROMPTS, seed=0).record(uid, correct, samples)


# Several tasks.


@hypothesis.given(
  raw=st.lists(
    st.one_of(st.integers(1, 60), st.floats(0.01, 50.0)),
    min_size=2,
    max_size=7,
  )
)
@hypothesis.settings(max_examples=40)
@hypothesis.example(raw=[50, 1, 1, 3, 50])  # the largest deficit alone fails
@hypothesis.example(raw=[1, 1])
def test_each_task_keeps_to_its_share(raw):
  names = "abcdefg"[: len(raw)]
  weights = {n: w / sum(raw) for n, w in zip(names, raw, strict=True)}
  prompts = [p for i, n in enumerate(names) for p in make(3, n, 10 * i)]
  prompt_stream = PromptStream(prompts, seed=0, weights=weights)
  exact = {name: fractions.Fraction(w) for name, w in weights.items()}
  total = sum(exact.values())
  counts = dict.fromkeys(names, 0)
  for n, (prompt, _) in enumerate(prompt_stream.next(110), start=1):
    counts[prompt.task] += 1
    for name in names:
      off = abs(n * exact[name] / total - counts[name])
      assert off <= 1 - fractions.Fraction(1, 2 * len(raw) - 2)


def test_each_task_has_its_own_epochs():
  given = PromptStream(MIXED, seed=0, weights=SHARES).next(100)
  orders = {}
  for name, size in (("sums", 5), ("logic", 3), ("code", 4)):
    of_task = [(p.uid, visit) for p, visit in given if p.task == name]
    assert len(of_task) == pytest.approx(100 * SHARES[name])
    uids_of_task = {p.uid for p in MIXED if p.task == name}
    for start in range(0, len(of_task) - size, size):
      part = of_task[start : start + size]
      assert {uid for uid, _ in part} == uids_of_task
      assert {visit for _, visit in part} == {start // size}
    orders[name] = [uid for uid, _ in of_task]
  assert orders["sums"][:5] != orders["sums"][5:10]


def test_tasks_of_one_size_are_shuffled_apart():
  both = [*make(9, "sums", 0), *make(9, "code", 10)]
  weights = {"sums": 0.5, "code": 0.5}
  given = PromptStream(both, seed=0, weights=weights).next(18)
  sums = [p.uid for p, _ in given if p.task == "sums"]
  code = [p.uid - 10 for p, _ in given if p.task == "code"]
  assert sorted(sums) == sorted(code) == list(range(9))
  assert sums != code


def test_each_task_retires_its_own_and_is_never_emptied():
  prompt_stream = PromptStream(
    MIXED, seed=0, weights=SHARES, curriculum=NO_POSITIVES
  )
  prompt_stream.next(30)
  judge(prompt_stream, {200: 16, 201: 15, 202: 16, 300: 16})
  prompt_stream.next(30)
  counts = collections.Counter(uids(prompt_stream, 300))
  assert prompt_stream.retired_share == 3 / 12
  assert {200, 202, 300}.isdisjoint(counts)
  assert counts[201] == pytest.approx(60, abs=1)
  assert all(counts[uid] == pytest.approx(30, abs=1) for uid in range(301, 304))


def test_one_name_is_one_pool():
  plain = order(PromptStream(PROMPTS, seed=3), 21)
  one = PromptStream(PROMPTS, seed=3, weights={"chain_arithmetic": 1.0})
  assert order(one, 21) == plain


@pytest.mark.parametrize(
  ("weights", "sentence"),
  [
    ({}, r"above 0 and sum to 1, got \{\}"),
    ({"sums": 0.5, "logic": 0.2, "code": 0.2}, "sum to 1, got .*'code': 0.2"),
    ({"sums": 1.5, "logic": -0.2, "code": -0.3}, "must be above 0"),
    ({"sums": np.nan, "logic": 0.2, "code": 0.3}, "must be above 0"),
    ({"sums": 2.0}, "sum to 1, got"),
    ({"sums": 0.5, "logic": 0.5}, "a weight .sums, logic., got 'code' for"),
    ({**SHARES, "code": 0.2, "proofs": 0.1}, "got none for 'proofs'"),
  ],
)
def test_bad_weights_are_refused(weights, sentence):
  with pytest.raises(ValueError, match=sentence):
    PromptStream(MIXED, seed=0, weights=weights)


# State.


@pytest.mark.parametrize("taken", [0, 3, 7, 9, 15, 40])
def test_a_stream_goes_on_from_a_checkpoint(taken, tmp_path):
  def fresh():
    return PromptStream(MIXED, seed=1, weights=SHARES, curriculum=NO_POSITIVES)

  original = fresh()
  for uid in uids(original, taken):
    original.record(uid, 16 if uid % 2 else 14, 16)
  save_tree(tmp_path / "state", original.state())
  restored = fresh()
  restored.next(4)
  restored.restore(load_tree(tmp_path / "state", restored.state()))
  assert order(restored, 37) == order(original, 37)
  assert restored.retired_share == original.retired_share
  assert (original.retired_share > 0) == (taken > 3)
  for name, value in original.state().items():
    np.testing.assert_array_equal(restored.state()[name], value)


def test_the_shapes_of_a_state_never_change():
  prompt_stream = PromptStream(
    MIXED, seed=1, weights=SHARES, curriculum=NO_POSITIVES
  )

  def shapes():
    state = prompt_stream.state()
    return {name: (v.shape, v.dtype) for name, v in state.items()}

  before = shapes()
  for uid in uids(prompt_stream, 40):
    prompt_stream.record(uid, 16 if uid % 2 else 14, 16)
  prompt_stream.next(40)
  assert prompt_stream.retired_share > 0
  assert shapes() == before


def test_a_state_is_a_copy_both_ways():
  prompt_stream = PromptStream(PROMPTS, seed=1, curriculum=NO_POSITIVES)
  prompt_stream.next(3)
  state = prompt_stream.state()
  kept = {name: value.copy() for name, value in state.items()}
  for _ in range(2):
    prompt_stream.next(9)
    prompt_stream.record(101, 16, 16)
    for name, value in kept.items():
      np.testing.assert_array_equal(state[name], value)
    prompt_stream.restore(state)


@pytest.mark.parametrize(
  ("changes", "sentence"),
  [
    ({"offset": None}, "the entries given, epoch, .* got"),
    ({"position": np.zeros(1, int)}, "the entries given, epoch, .* got"),
    ({"groups": np.zeros(6, int)}, r"shape \(7,\) as 'groups', got .*\(6,\)"),
    ({"epoch": np.zeros(2, int)}, r"shape \(1,\) as 'epoch'"),
    ({"samples": np.zeros(7)}, "integers .* got float64"),
    ({"retired": np.zeros(7, int)}, "bool of shape .* got int64"),
    ({"epoch": np.array([-1])}, "0 or more as 'epoch', got -1"),
    ({"correct": np.ones(7, int)}, "got 1 of 0 for prompt 100"),
    ({"retired": np.ones(7, bool)}, "got 0 of 0 in task 0"),
    ({"offset": np.array([8])}, "got 8 of 7 in task 0"),
    ({"given": np.array([3])}, "'given' in 0 .. 0 .* got 3"),
  ],
)
def test_a_strange_state_is_refused(changes, sentence):
  prompt_stream = PromptStream(PROMPTS, seed=0, curriculum=NO_POSITIVES)
  state = {**prompt_stream.state(), **changes}
  state = {name: value for name, value in state.items() if value is not None}
  prompt_stream.next(3)
  with pytest.raises(ValueError, match=sentence):
    prompt_stream.restore(state)
  assert prompt_stream.state()["offset"] == 3  # as it was


def test_a_state_with_retired_prompts_needs_a_curriculum_that_retires():
  retiring = PromptStream(PROMPTS, seed=0, curriculum=NO_POSITIVES)
  judge(retiring, dict.fromkeys(uids(retiring, 3), 16))
  retiring.next(5)
  with pytest.raises(ValueError, match=r"no retired prompts.* got 43%"):
    PromptStream(PROMPTS, seed=0).restore(retiring.state())


# Prompts.


def test_no_prompts_are_refused():
  with pytest.raises(ValueError, match="at least one prompt, got none"):
    PromptStream([], seed=0)


def test_two_prompts_of_one_uid_are_refused():
  with pytest.raises(ValueError, match="different uids, got 103 twice"):
    PromptStream([*PROMPTS, PROMPTS[3]], seed=0)


def test_an_order_by_equal_difficulties_is_refused():
  config = CurriculumConfig(order="easy_to_hard")
  equal = [dataclasses.replace(p, difficulty=2.0) for p in PROMPTS]
  with pytest.raises(ValueError, match=r"'uniform' .* same difficulty, 2;"):
    PromptStream(equal, seed=0, curriculum=config)
