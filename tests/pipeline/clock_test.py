"""An update lasts its count of chunks, or until the sampler is idle."""

import pytest

from scalerl_jax.pipeline.clock import LogicalClock


def test_update_is_due_after_its_chunks_exactly():
  clock = LogicalClock(chunks_per_step=3)
  published = []
  for chunk in range(12):
    if clock.due(chunk, sampler_idle=False):
      clock.publish()
      published.append(chunk)
    if chunk in (2, 5, 9):
      clock.start_update(chunk)
  # 2 + 3, then at once again 5 + 3; that of chunk 9 is due at 12.
  assert published == [5, 8]
  assert clock.due(12, sampler_idle=False)


def test_idle_sampler_makes_a_running_update_due():
  clock = LogicalClock(chunks_per_step=3)
  assert not clock.due(0, sampler_idle=True)
  clock.start_update(1)
  assert not clock.due(1, sampler_idle=False)
  assert clock.due(1, sampler_idle=True)
  assert clock.due(2, sampler_idle=True)
  clock.publish()
  assert not clock.due(2, sampler_idle=True)


def test_restored_clock_is_due_at_the_same_chunk():
  for started in (None, 0, 4):
    clock, restored = LogicalClock(2), LogicalClock(2)
    restored.start_update(7)
    if started is not None:
      clock.start_update(started)
    restored.load_state_dict(clock.state_dict())
    assert restored.state_dict() == clock.state_dict()
    chunks = range(3) if started is None else range(started, started + 3)
    expected = [started is not None and n == started + 2 for n in chunks]
    assert [restored.due(n, sampler_idle=False) for n in chunks] == expected


def test_misuse_is_one_sentence():
  with pytest.raises(ValueError, match="chunks_per_step must be at least 1"):
    LogicalClock(0)
  with pytest.raises(TypeError, match="chunks_per_step"):
    LogicalClock(1.5)  # pyright: ignore[reportArgumentType]
  clock = LogicalClock(2)
  with pytest.raises(ValueError, match="no update is running; start one"):
    clock.publish()
  with pytest.raises(ValueError, match="chunk must be at least 0, got -1"):
    clock.start_update(-1)
  clock.start_update(4)
  with pytest.raises(ValueError, match="that of chunk 4 is running"):
    clock.start_update(5)
  for chunk in (3, 7):
    with pytest.raises(ValueError, match=rf"in 4\.\.6 .*, got {chunk}"):
      clock.due(chunk, sampler_idle=False)
  with pytest.raises(ValueError, match="must have the fields"):
    clock.load_state_dict({})
  with pytest.raises(ValueError, match="must be 2, got 3"):
    clock.load_state_dict(LogicalClock(3).state_dict())
  assert clock.state_dict() == {"chunks_per_step": 2, "started_at": 4}
