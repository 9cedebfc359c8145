"""Staleness ≤ k, no deadlock, nothing lost: by hand, and by simulation."""

import collections
import copy
import dataclasses
import itertools

import hypothesis
import numpy as np
import pytest
import scipy.stats
from hypothesis import strategies as st

from scalerl_jax.pipeline.clock import LogicalClock
from scalerl_jax.pipeline.schedule import StalenessLedger

bounded = hypothesis.settings(
  derandomize=True, database=None, deadline=None, max_examples=40
)


@dataclasses.dataclass(frozen=True)
class Case:
  """One run: its shape, and the seed of all that is random in it."""

  prompts: int
  group_size: int
  slots: int
  max_staleness: int
  steps: int
  chunk: int
  discard_rate: float
  chunks_per_step: int | None  # None: the wall schedule, random durations
  seed: int

  @property
  def total(self):
    return self.steps * self.prompts

  def ledger(self):
    return StalenessLedger(self.prompts, self.max_staleness, self.total)


@st.composite
def cases(draw, max_staleness=8, max_prompts=6, discards=True):
  group_size = draw(st.integers(1, 4))
  prompts = draw(st.integers(1, max_prompts))
  k = draw(st.integers(0, max_staleness))
  rates = st.sampled_from([0.0, 0.0, 0.2, 0.6]) if discards else st.just(0.0)
  return Case(
    prompts=prompts,
    group_size=group_size,
    # From one group, with slots to spare that no group fits in, to more
    # groups than may ever be outstanding.
    slots=draw(
      st.integers(group_size, (k + 2) * prompts * group_size)
      | st.just(group_size)
    ),
    max_staleness=k,
    steps=draw(st.integers(1, 12)),
    chunk=draw(st.integers(1, 16)),
    discard_rate=draw(rates),
    chunks_per_step=draw(st.none() | st.integers(1, 8)),
    seed=draw(st.integers(0, 2**31)),
  )


def oracle_in_time(versions, version, case):
  """Whether updates version + 1, ... of P groups, oldest first, suffice."""
  return all(
    version + 1 + index // case.prompts - each <= case.max_staleness
    for index, each in enumerate(sorted(versions))
  )


class Simulation:
  """A loop around the ledger that keeps its own books.

  Groups enter when all their completions fit; a completion advances by a
  chunk of tokens; lengths are long-tailed and addressed by group, so that
  they do not depend on the schedule. A group's first token is drawn at
  admission (prefill), with the weights published then.
  """

  def __init__(self, case):
    self.case = case
    self.ledger = case.ledger()
    self.clock = LogicalClock(case.chunks_per_step or 1)
    self.rng = np.random.default_rng([case.seed, 0])
    self.chunk = 0
    self.published = 0
    self.ready_at = 0  # of the running update, under the wall schedule
    self.next_id = 0
    self.update = []  # ids
    self.running = {}  # id -> lengths left, one a completion
    self.queue = []  # ids
    self.fates = {}  # id -> what becomes of it, of every group ever
    self.versions = {}  # id -> version at admission, of every group ever
    self.trained, self.discarded, self.staleness = [], [], []
    self.waits = collections.Counter()
    self.events = []

  def lengths(self, group):
    rng = np.random.default_rng([self.case.seed, 1, group])
    tail = rng.pareto(0.9, self.case.group_size)
    return np.minimum(1 + (3 * tail).astype(int), 100)

  def fate(self, group):
    rng = np.random.default_rng([self.case.seed, 2, group])
    if rng.random() >= self.case.discard_rate:
      return "train"
    return "abort" if rng.random() < 0.3 else "discard"

  def idle(self):
    return not self.running and not self.ledger.admissible()

  def publish(self):
    if not self.update:
      return False
    if self.case.chunks_per_step is None:
      due = self.chunk >= self.ready_at
    else:
      due = self.clock.due(self.chunk, self.idle())
    if due:
      self.ledger.publish()
      if self.case.chunks_per_step is not None:
        self.clock.publish()
      self.published += 1
      self.trained += self.update
      self.update = []
      self.events.append(("publish", self.chunk, self.published))
    return due

  def check_offer(self, offer):
    """The offer is the oldest finished groups, if the rest stays in time."""
    if self.update:
      assert offer is None
      return
    waiting = [*self.running, *self.queue]
    oldest = sorted(self.queue, key=lambda i: (self.versions[i], i))
    candidate = oldest[: self.case.prompts]
    rest = [self.versions[i] for i in waiting if i not in candidate]
    full = len(candidate) == self.case.prompts
    allowed = full and oracle_in_time(rest, self.published, self.case)
    assert offer == (candidate if allowed else None)

  def take(self):
    offer = self.ledger.next_batch()
    self.check_offer(offer)
    if offer is None:
      self.waits[self.ledger.blocked_on()] += 1
      return False
    staleness = self.ledger.take(offer)
    own = [self.published - self.versions[group] for group in offer]
    np.testing.assert_array_equal(staleness, own)
    self.staleness += own
    self.update = offer
    for group in offer:
      self.queue.remove(group)
    if self.case.chunks_per_step is not None:
      self.clock.start_update(self.chunk)
    self.ready_at = self.chunk + self.rng.integers(0, 12)
    self.events.append(("take", self.chunk, tuple(offer)))
    return True

  def admit(self):
    admitted = False
    busy = sum(left.size for left in self.running.values())
    while (
      self.ledger.admissible()
      and busy + self.case.group_size <= self.case.slots
    ):
      self.ledger.admit(self.next_id, self.published)
      self.versions[self.next_id] = self.published
      self.running[self.next_id] = self.lengths(self.next_id)
      self.fates[self.next_id] = self.fate(self.next_id)
      self.events.append(("admit", self.chunk, self.next_id))
      busy += self.case.group_size
      self.next_id += 1
      admitted = True
    return admitted

  def decode(self):
    for group, left in list(self.running.items()):
      left = left - self.case.chunk
      self.running[group] = left[left > 0]  # finished slots are free at once
      fate = self.fates[group]
      if fate == "abort" or not self.running[group].size:
        del self.running[group]
        if fate != "abort":
          self.ledger.finish(group)
          self.queue.append(group)
        if fate != "train":
          self.ledger.discard(group)
          self.discarded.append(group)
          self.queue = [each for each in self.queue if each != group]
    self.chunk += 1

  def advance(self):
    """One boundary between chunks, in any order of its acts, and a chunk."""
    acts = [self.publish, self.take, self.admit]
    progress = [acts[i]() for i in self.rng.permutation(3)]
    assert any(progress) or self.running or self.update, "deadlock"
    assert self.ledger.version == self.published
    assert self.ledger.in_flight == len(self.running)
    assert self.ledger.queued == len(self.queue)
    assert self.ledger.updating == bool(self.update)
    self.decode()

  def run(self):
    while not self.ledger.done:
      self.advance()
    return self


def drawn_lengths(simulation, groups):
  return np.concatenate([simulation.lengths(group) for group in groups])


@bounded
@hypothesis.given(cases())
def test_no_deadlock_and_staleness_at_most_k(case):
  run = Simulation(case).run()
  assert len(run.staleness) == case.total
  assert min(run.staleness) >= 0
  assert max(run.staleness) <= case.max_staleness
  assert run.published == case.steps
  assert run.ledger.admissible() == run.ledger.outstanding == 0
  assert run.ledger.blocked_on() is None


@bounded
@hypothesis.given(cases())
def test_nothing_is_lost_or_used_twice(case):
  run = Simulation(case).run()
  used = run.trained + run.discarded
  assert sorted(used) == list(range(run.next_id))
  assert len(run.trained) == case.total


@bounded
@hypothesis.given(cases(discards=False))
def test_trained_lengths_are_generated_lengths_over_the_run(case):
  run = Simulation(case).run()
  trained = drawn_lengths(run, run.trained)
  generated = drawn_lengths(run, range(run.next_id))
  np.testing.assert_array_equal(np.sort(trained), np.sort(generated))
  assert scipy.stats.ks_2samp(trained, generated).statistic == 0


def test_an_early_window_is_biased_to_short_lengths():
  # What the run's multiset equality repairs, and that the lengths simulated
  # above have a tail long enough to show it.
  case = Case(8, 2, 160, 8, 40, 1, 0.0, 1, seed=0)
  run = Simulation(case).run()
  early = drawn_lengths(run, run.trained[:32])
  generated = drawn_lengths(run, range(run.next_id))
  assert early.mean() < 0.5 * generated.mean()
  test = scipy.stats.ks_2samp(early, generated, alternative="greater")
  assert test.pvalue < 1e-3


@bounded
@hypothesis.given(cases(max_staleness=0))
def test_staleness_zero_is_exactly_synchronous(case):
  run = Simulation(case).run()
  assert set(run.staleness) == {0}
  updating = False
  for name, _, what in run.events:
    # No group starts before the weights of the running update are published,
    # and a batch is drawn by the newest weights alone.
    assert not (updating and name == "admit")
    if name == "take":
      assert {run.versions[group] for group in what} == {run.versions[what[0]]}
      updating = True
    elif name == "publish":
      updating = False


@bounded
@hypothesis.given(cases(max_staleness=3, max_prompts=3))
def test_no_other_batch_is_allowed_when_the_oldest_is_not(case):
  run = Simulation(case)
  while not run.ledger.done:
    if not run.update and run.ledger.next_batch() is None:
      for batch in itertools.combinations(run.queue, case.prompts):
        rest = [*run.running, *(i for i in run.queue if i not in batch)]
        versions = [run.versions[group] for group in rest]
        assert not oracle_in_time(versions, run.published, case)
    run.advance()


def test_asynchrony_is_used_and_the_oldest_blocks_it():
  # Ample slots and slow updates fill the whole allowance; a long tail then
  # makes the learner wait for the oldest group.
  case = Case(4, 1, 36, 8, 60, 1, 0.0, 4, seed=3)
  run = Simulation(case).run()
  assert max(run.staleness) == 8
  assert len(set(run.staleness)) > 2
  assert run.waits["oldest"] > 0
  assert run.waits["queue"] > 0
  assert run.waits["update"] > 0


@bounded
@hypothesis.given(cases(), st.integers(0, 60))
def test_restored_state_goes_on_the_same(case, chunks):
  run = Simulation(case)
  while run.chunk < chunks and not run.ledger.done:
    run.advance()
  resumed = copy.deepcopy(run)
  resumed.ledger, resumed.clock = (
    case.ledger(),
    LogicalClock(case.chunks_per_step or 1),
  )
  resumed.ledger.load_state_dict(run.ledger.state_dict())
  resumed.clock.load_state_dict(run.clock.state_dict())
  assert run.run().events == resumed.run().events
  assert run.staleness == resumed.staleness
  np.testing.assert_equal(run.ledger.state_dict(), resumed.ledger.state_dict())


def test_state_has_fixed_shapes_and_shares_no_memory():
  ledger = StalenessLedger(3, max_staleness=1, total_groups=9)
  fresh = ledger.state_dict()
  for group in (7, 5):
    ledger.admit(group, version=0)
  state = ledger.state_dict()
  for name, value in fresh.items():
    assert np.shape(value) == np.shape(state[name])
    assert np.asarray(value).dtype == np.asarray(state[name]).dtype
  np.testing.assert_array_equal(state["group_ids"], [7, 5, 0, 0, 0, 0])
  np.testing.assert_array_equal(state["statuses"], [1, 1, 0, 0, 0, 0])
  ledger.finish(7)
  np.testing.assert_array_equal(state["statuses"], [1, 1, 0, 0, 0, 0])


def test_hand_worked_schedule():
  """P = 2, k = 1, 10 groups (5 steps), so at most 4 are outstanding.

  The use rule for k = 1: after a batch, no remaining group of version v − 1,
  and at most 2 of version ≤ v.
  """
  ledger = StalenessLedger(2, max_staleness=1, total_groups=10)
  finish = ledger.finish

  def admit(*groups):
    for group in groups:
      ledger.admit(group, version=ledger.version)

  # v = 0. Three groups enter (no slot for a fourth), one more may.
  assert ledger.admissible() == 4
  admit(0, 1, 2)
  assert ledger.admissible() == 1
  # 1 alone is no batch.
  finish(1)
  assert (ledger.next_batch(), ledger.blocked_on()) == (None, "queue")
  # 1 and 2 are; 0 remains, of version 0 ≤ v: 1 ≤ 2.
  finish(2)
  assert (ledger.next_batch(), ledger.blocked_on()) == ([1, 2], None)
  assert ledger.take([1, 2]).tolist() == [0, 0]
  # The update runs. Its two groups are still outstanding: 3 of 4 are taken.
  assert ledger.outstanding == 3
  assert ledger.admissible() == 1
  admit(3)
  assert ledger.admissible() == 0
  assert (ledger.next_batch(), ledger.blocked_on()) == (None, "update")
  # v = 1. Outstanding 0 and 3, both of version 0; two more may enter.
  ledger.publish()
  assert (ledger.version, ledger.admissible()) == (1, 2)
  admit(4, 5)
  # 3, 4, 5 are finished, the oldest batch is 3 and 4; but 0, of version
  # v − 1, would remain and be of staleness 2 afterwards. The learner waits.
  finish(5)
  finish(4)
  finish(3)
  assert (ledger.next_batch(), ledger.blocked_on()) == (None, "oldest")
  # 0 is done: oldest first are 0 and 3; 4 and 5 remain, of version ≤ v: 2.
  finish(0)
  assert ledger.next_batch() == [0, 3]
  assert ledger.take([0, 3]).tolist() == [1, 1]
  assert ledger.admissible() == 0
  # v = 2. Outstanding 4 and 5 of version 1, queued. 4 is discarded, so three
  # may enter; only 6 does.
  ledger.publish()
  assert ledger.admissible() == 2
  ledger.discard(4)
  assert ledger.admissible() == 3
  admit(6)
  finish(6)
  # A batch of two versions: staleness 2 − 1 and 2 − 2.
  assert ledger.next_batch() == [5, 6]
  assert ledger.take([5, 6]).tolist() == [1, 0]
  assert ledger.admissible() == 2
  admit(7, 8)
  # v = 3. 6 groups are trained, 2 outstanding: 2 to go, and 2 places.
  ledger.publish()
  assert ledger.admissible() == 2
  admit(9)
  # 7 is discarded in flight: it has to be replaced for the run to end.
  ledger.discard(7)
  assert ledger.admissible() == 2
  admit(10)
  finish(9)
  finish(10)
  # 9 and 10 are of version 3, and 8 of version 2 would be left too old.
  assert (ledger.next_batch(), ledger.blocked_on()) == (None, "oldest")
  finish(8)
  assert ledger.take([8, 9]).tolist() == [1, 0]
  assert ledger.admissible() == 1
  # v = 4. The last group may come as late as it likes, at any version ≤ 4.
  ledger.publish()
  assert ledger.admissible() == 1
  admit(11)
  assert ledger.admissible() == 0
  assert (ledger.next_batch(), ledger.blocked_on()) == (None, "queue")
  finish(11)
  assert ledger.take([10, 11]).tolist() == [1, 0]
  ledger.publish()
  # 5 updates of 2 groups: the run is drained.
  assert ledger.done
  assert (ledger.version, ledger.outstanding, ledger.admissible()) == (5, 0, 0)


def small_ledger():
  """1 in flight, 2 queued, 3 and 4 in the running update of version 0."""
  ledger = StalenessLedger(2, max_staleness=2, total_groups=6)
  for group in (3, 4, 1, 2):
    ledger.admit(group, version=0)
  for group in (3, 4, 2):
    ledger.finish(group)
  ledger.take([3, 4])
  return ledger


@pytest.mark.parametrize(
  ("misuse", "message"),
  [
    (lambda x: x.admit(1, 0), "already outstanding"),
    (lambda x: x.admit(9, 1), "must be the published 0, got 1"),
    (lambda x: [x.admit(i, 0) for i in (7, 8, 9)], "group 9 must not be adm"),
    (lambda x: x.finish(2), "in flight to be finished, but it is queued"),
    (lambda x: x.finish(3), "to be finished, but it is in update"),
    (lambda x: x.finish(9), "group 9 .* not outstanding"),
    (lambda x: x.discard(3), "in flight or queued to be discarded"),
    (lambda x: x.discard(9), "group 9 .* not outstanding"),
    (lambda x: x.take([3, 4]), "on offer, None, got"),
    (lambda x: [x.publish(), x.publish()], "version 2 must not be published"),
    (lambda x: [x.publish(), x.finish(3)], "trained on already"),
    (lambda x: x.load_state_dict({"version": 1}), "must have the fields"),
    (
      lambda x: x.load_state_dict(StalenessLedger(3, 2, 6).state_dict()),
      "prompts_per_step of the ledger state must be 2, got 3",
    ),
    (
      lambda x: x.load_state_dict(StalenessLedger(2, 1, 6).state_dict()),
      "max_staleness of the ledger state must be 2, got 1",
    ),
    (
      lambda x: StalenessLedger(2, 2, 2).load_state_dict(x.state_dict()),
      "total_groups must be at least the 4",
    ),
  ],
)
def test_misuse_is_one_sentence(misuse, message):
  ledger = small_ledger()
  with pytest.raises(ValueError, match=message) as error:
    misuse(ledger)
  assert str(error.value).endswith(".")
  assert "\n" not in str(error.value)


def test_refused_calls_change_nothing():
  ledger = small_ledger()
  before = ledger.state_dict()
  for call in (
    lambda: ledger.admit(1, 0),
    lambda: ledger.admit(9, 1),
    lambda: ledger.finish(2),
    lambda: ledger.discard(4),
    lambda: ledger.take([2, 3]),
    lambda: ledger.load_state_dict({}),
  ):
    with pytest.raises(ValueError, match=r"\.$"):
      call()
  np.testing.assert_equal(ledger.state_dict(), before)


def test_only_the_offered_batch_is_taken():
  ledger = StalenessLedger(2, max_staleness=1, total_groups=4)
  for group in (0, 1, 2):
    ledger.admit(group, version=0)
    ledger.finish(group)
  for other in ([1, 0], [0, 2], [0], [0, 0], [0, 1, 2], []):
    with pytest.raises(ValueError, match=r"on offer, \[0, 1\]"):
      ledger.take(other)
  assert ledger.take(np.array([0, 1])).tolist() == [0, 0]


def test_bad_sizes_are_refused():
  with pytest.raises(ValueError, match="prompts_per_step must be at least 1"):
    StalenessLedger(0, 1, 4)
  with pytest.raises(ValueError, match="max_staleness must be at least 0"):
    StalenessLedger(2, -1, 4)
  with pytest.raises(ValueError, match="total_groups must be at least 1"):
    StalenessLedger(2, 1, 0)
  with pytest.raises(ValueError, match="multiple of prompts_per_step = 2"):
    StalenessLedger(2, 1, 5)
  with pytest.raises(TypeError, match="max_staleness"):
    StalenessLedger(2, 1.0, 4)  # pyright: ignore[reportArgumentType]


def test_a_resumed_run_may_be_longer():
  ledger = small_ledger()
  longer = StalenessLedger(2, max_staleness=2, total_groups=8)
  longer.load_state_dict(ledger.state_dict())
  ledger.publish()
  longer.publish()
  assert ledger.admissible() == 2
  assert longer.admissible() == 4
