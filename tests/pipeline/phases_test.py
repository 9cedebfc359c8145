"""PPO-off-policy-k: phases alternate, staleness is 0 .. k − 1, no hang."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.pipeline.phases import PhaseLedger
from scalerl_jax.pipeline.schedule import StalenessLedger


def _simulate(ledger, rng, *, slots, discard_share=0.0, discards=0):
  """Drives a run at random; gives (staleness of each update, overlaps).

  An overlap is a moment at which a group was in flight while updates of its
  phase had begun, or an admission while an update was running.
  """
  staleness, overlaps, group, flying = [], [], 0, []
  moves = 0
  while not ledger.done:
    moves += 1
    assert moves < 10_000, "the run hangs"
    progress = False
    count = min(ledger.admissible(), slots - len(flying))
    if count:
      overlaps.append(ledger.updating)
    for _ in range(count):
      ledger.admit(group, ledger.version)
      flying.append(group)
      group += 1
      progress = True
    if flying and rng.random() < 0.7:
      ended = flying.pop(int(rng.integers(len(flying))))
      if discards and rng.random() < discard_share:
        discards -= 1
        ledger.discard(ended)
      else:
        ledger.finish(ended)
      progress = True
    batch = ledger.next_batch()
    if batch is not None:
      overlaps.append(bool(flying))
      staleness.append(ledger.take(batch).tolist())
      assert not ledger.admissible()
      ledger.publish()
      progress = True
    assert progress or flying
  return staleness, overlaps


@settings(max_examples=60, deadline=None)
@given(
  prompts=st.integers(1, 4),
  k=st.integers(1, 5),
  updates=st.integers(1, 13),
  slots=st.integers(1, 9),
  seed=st.integers(0, 2**16),
)
def test_staleness_runs_from_zero_to_k_minus_one(
  prompts, k, updates, slots, seed
):
  ledger = PhaseLedger(prompts, k, updates * prompts)
  rng = np.random.default_rng(seed)
  staleness, overlaps = _simulate(
    ledger, rng, slots=slots, discard_share=0.5, discards=7
  )
  assert staleness == [[u % k] * prompts for u in range(updates)]
  assert not any(overlaps)


def test_one_update_a_phase_is_the_synchronous_ledger():
  phases = PhaseLedger(3, 1, 12)
  synchronous = StalenessLedger(3, 0, 12)
  for ledger in (phases, synchronous):
    told = []
    for step in range(4):
      told.append(ledger.admissible())
      for n in range(3):
        ledger.admit(3 * step + n, step)
        told.append((ledger.admissible(), ledger.blocked_on()))
      for n in (2, 0, 1):
        ledger.finish(3 * step + n)
        told.append(ledger.next_batch())
      ledger.take(ledger.next_batch())
      told.append(ledger.admissible())
      ledger.publish()
    if ledger is phases:
      expected = told
  assert told == expected
  assert phases.done
  assert synchronous.done


def test_a_phase_resumes_between_its_updates():
  def half_way():
    ledger = PhaseLedger(2, 3, 12)
    for group in range(6):
      ledger.admit(group, 0)
      ledger.finish(group)
    ledger.take(ledger.next_batch())
    ledger.publish()
    return ledger

  ledger = half_way()
  restored = PhaseLedger(2, 3, 12)
  restored.load_state_dict(ledger.state_dict())
  for each in (ledger, restored):
    assert each.admissible() == 0
    assert each.next_batch() == [2, 3]
    assert each.take([2, 3]).tolist() == [1, 1]
    each.publish()
    assert each.take(each.next_batch()).tolist() == [2, 2]
    each.publish()
    assert each.admissible() == 6
  with pytest.raises(ValueError, match="max_staleness"):
    PhaseLedger(2, 2, 12).load_state_dict(half_way().state_dict())


@pytest.mark.parametrize(
  ("k", "error", "rule"),
  [
    (0, ValueError, "updates_per_phase must be at least 1, got 0"),
    (2.0, TypeError, "updates_per_phase"),
  ],
)
def test_a_bad_k_is_refused(k, error, rule):
  with pytest.raises(error, match=rule):
    PhaseLedger(2, k, 12)
