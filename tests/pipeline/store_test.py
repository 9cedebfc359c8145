"""The store: rows find their groups, and everything comes back."""

import dataclasses

import numpy as np
import pytest

from scalerl_jax.pipeline.store import RolloutStore, Scored
from scalerl_jax.sampling.sampler import RECORDED, Finished
from scalerl_jax.types import FinishReason, Rollout

G, TP, TC, CAPACITY = 3, 5, 7, 4
FIELDS = [field.name for field in dataclasses.fields(Rollout)]


def _rollout(seed, finish=(0, 0, 0)):
  """A record in which every number is another one."""
  rng = np.random.default_rng(seed)

  def integers(*shape):
    return rng.integers(1, 1000, shape).astype(np.int32)

  return Rollout(
    uid=np.int32(100 + seed),
    first_sample=np.int32(10 * seed),
    prompt=integers(TP),
    prompt_length=np.int32(1 + seed % TP),
    tokens=integers(G, TC),
    length=integers(G),
    behavior_logps=-rng.random((G, TC)).astype(np.float32),
    versions=integers(G, TC),
    forced=rng.random((G, TC)) < 0.5,
    finish=np.array(finish, np.int32),
  )


def _finished(*names, seed=0):
  """Completions that ended, as (group, row) say."""
  rng = np.random.default_rng([7, seed])
  count = len(names)
  return Finished(
    groups=np.array([group for group, _ in names], np.int64),
    rows=np.array([row for _, row in names], np.int32),
    tokens=rng.integers(1, 99, (count, TC)).astype(np.int32),
    behavior_logps=-rng.random((count, TC)).astype(np.float32),
    versions=rng.integers(1, 99, (count, TC)).astype(np.int32),
    forced=rng.random((count, TC)) < 0.5,
    length=rng.integers(1, TC, count).astype(np.int32),
    finish=rng.integers(1, 3, count).astype(np.int32),
  )


def _store():
  return RolloutStore(CAPACITY, _rollout(0))


def _same(left, right):
  for name in FIELDS:
    found, expected = getattr(left, name), getattr(right, name)
    np.testing.assert_array_equal(found, expected, err_msg=name)
    assert np.asarray(found).dtype == np.asarray(expected).dtype, name
    assert np.shape(found) == np.shape(expected), name


def test_ended_rows_are_written_into_their_groups_and_nowhere_else():
  store = _store()
  before = {index: _rollout(index) for index in (4, 9)}
  store.in_flight = {index: _rollout(index) for index in (4, 9)}
  names = [(9, 2), (4, 0), (9, 0)]
  ended = _finished(*names)
  store.write(ended)
  written = {name: n for n, name in enumerate(names)}
  for group, row in np.ndindex(2, G):
    index = (4, 9)[group]
    n = written.get((index, row))
    for name in RECORDED:
      expected = (
        getattr(before[index], name)[row]
        if n is None
        else getattr(ended, name)[n]
      )
      found = getattr(store.in_flight[index], name)[row]
      np.testing.assert_array_equal(found, expected)
  for index in before:
    for name in ("uid", "first_sample", "prompt", "prompt_length"):
      np.testing.assert_array_equal(
        getattr(store.in_flight[index], name), getattr(before[index], name)
      )


def test_a_group_is_complete_when_its_last_row_has_ended():
  store = _store()
  store.in_flight = {index: _rollout(index) for index in (9, 4, 6)}
  assert store.complete() == []
  store.write(_finished((9, 0), (9, 1), (4, 0), (4, 1), (4, 2)))
  assert store.complete() == [4]
  store.write(_finished((6, 1), (9, 2), seed=1))
  # In the order of admission, not of the end.
  assert store.complete() == [4, 9]


def _filled():
  store = _store()
  ended = int(FinishReason.EOS)
  store.in_flight = {
    12: _rollout(3, finish=(0, ended, 0)),
    8: _rollout(2, finish=(ended, ended, ended)),
  }
  correct = np.array([0, 1, 1], np.int32)
  store.queued = {5: Scored(5, _rollout(1, finish=(1, 2, 1)), correct)}
  return store


def test_a_restored_store_holds_the_same_groups():
  store, restored = _filled(), _store()
  restored.in_flight = {99: _rollout(9)}
  restored.queued = {98: Scored(98, _rollout(8), np.ones(G, np.int32))}
  restored.load_state_dict(store.state_dict())
  assert list(restored.in_flight) == [8, 12]
  assert list(restored.queued) == [5]
  for index in (8, 12):
    _same(restored.in_flight[index], store.in_flight[index])
  _same(restored.queued[5].rollout, store.queued[5].rollout)
  assert restored.queued[5].index == 5
  np.testing.assert_array_equal(restored.queued[5].correct, [0, 1, 1])
  assert restored.complete() == store.complete() == [8]
  for name, value in store.state_dict().items():
    np.testing.assert_array_equal(restored.state_dict()[name], value)


def test_a_saved_state_does_not_follow_the_store():
  store = _filled()
  saved = store.state_dict()
  kept = {name: value.copy() for name, value in saved.items()}
  restored = _store()
  restored.load_state_dict(saved)
  store.write(_finished((12, 0), (12, 2)))
  restored.write(_finished((8, 1), (8, 0), seed=1))
  for name, value in kept.items():
    np.testing.assert_array_equal(saved[name], value)


@pytest.mark.parametrize("store", [_store(), _filled()])
def test_states_of_all_fillings_have_one_form(store):
  state = store.state_dict()
  empty = _store().state_dict()
  assert {n: (v.shape, v.dtype) for n, v in state.items()} == {
    n: (v.shape, v.dtype) for n, v in empty.items()
  }
  assert all(len(value) == CAPACITY for value in state.values())
  # Places of nobody hold 0.
  free = state["status"] == 0
  assert all(not value[free].any() for value in state.values())
  assert free.sum() == CAPACITY - len(store.in_flight) - len(store.queued)
