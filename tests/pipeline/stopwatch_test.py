"""The stopwatch: waits for each piece of work, carries errors, ends."""

import json
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.pipeline.stopwatch import Stopwatch
from scalerl_jax.pipeline.timeline import Timeline


def _threads(name):
  return [
    t for t in threading.enumerate() if t.name.startswith(f"watch-{name}")
  ]


class _Work:
  """Looks like an array in the making; done when it is told so."""

  def __init__(self, error=None):
    self.done, self.error = threading.Event(), error

  def block_until_ready(self):
    assert self.done.wait(30.0)
    if self.error is not None:
      raise self.error


def test_stopping_waits_for_the_end_of_the_work_and_counts_until_then():
  watch, work = Stopwatch("waits"), _Work()
  before = time.perf_counter()
  watch.start(work)
  started = time.perf_counter()
  stopped = threading.Event()

  def stop():
    watch.stop()
    stopped.set()

  thread = threading.Thread(target=stop)
  thread.start()
  assert not stopped.wait(0.02)
  ended = time.perf_counter()
  work.done.set()
  thread.join(30.0)
  assert stopped.is_set()
  after = time.perf_counter()
  assert ended - started <= watch.busy_seconds <= after - before
  watch.close()


def test_pieces_are_added_and_none_twice():
  watch = Stopwatch("adds")
  assert watch.busy_seconds == 0.0
  watch.stop()
  assert watch.busy_seconds == 0.0
  spent = []
  for _ in range(3):
    work = _Work()
    work.done.set()
    watch.start(work)
    watch.stop()
    spent.append(watch.busy_seconds)
    watch.stop()
    assert watch.busy_seconds == spent[-1]
  assert 0.0 < spent[0] < spent[1] < spent[2]
  watch.close()


def test_a_piece_starts_where_the_one_before_it_ended(tmp_path):
  timeline = Timeline(tmp_path / "trace.json")
  watch = Stopwatch("sampler", timeline)
  works = [_Work() for _ in range(4)]
  before = time.perf_counter()
  for n, work in enumerate(works[:3]):
    watch.start(work, f"piece {n}", told=n)
  for work in works:
    time.sleep(0.002)
    work.done.set()
  watch.stop(last=True)
  ended = time.perf_counter()
  assert watch.busy_seconds <= ended - before
  time.sleep(0.002)
  watch.idle("a reason")
  watch.start(works[3], "after a pause")
  watch.stop()
  timeline.close()
  watch.close()
  spans = [
    event
    for event in json.loads((tmp_path / "trace.json").read_text())
    if event["ph"] == "X"
  ]
  assert [span["name"] for span in spans] == [
    *("piece 0", "piece 1", "piece 2", "idle", "after a pause")
  ]
  ends = [span["ts"] + span["dur"] for span in spans]
  starts = [span["ts"] for span in spans]
  np.testing.assert_allclose(starts[1:], ends[:-1], atol=0.01)
  busy = sum(s["dur"] for s in spans if s["name"] != "idle")
  np.testing.assert_allclose(busy, 1e6 * watch.busy_seconds, atol=0.01)
  assert [span["args"] for span in spans] == [
    *({"told": 0}, {"told": 1}, {"told": 2, "last": True}),
    *({"reason": "a reason"}, {}),
  ]
  assert spans[3]["dur"] >= 2000.0
  assert watch.pieces["after a pause"] == 1


def test_work_begins_when_it_is_said_to(tmp_path):
  watch, work = Stopwatch("learner"), _Work()
  work.done.set()
  watch.start(work, began=time.perf_counter() - 1.0)
  watch.stop()
  assert 1.0 <= watch.busy_seconds < 31.0
  watch.close()


def test_arrays_of_a_program_are_waited_for_and_not_changed():
  watch = Stopwatch("arrays")
  arrays = jax.jit(lambda x: {"a": x + 1.0, "b": x * 2.0})(jnp.arange(3.0))
  watch.start(arrays)
  watch.stop()
  assert arrays["a"].is_ready()
  np.testing.assert_array_equal(arrays["b"], [0.0, 2.0, 4.0])
  assert watch.busy_seconds > 0.0
  watch.close()


def test_an_error_of_the_work_is_raised_where_it_is_stopped():
  watch, work = Stopwatch("error"), _Work(ArithmeticError("of the device"))
  work.done.set()
  watch.start(work)
  with pytest.raises(ArithmeticError, match="of the device"):
    watch.stop()
  watch.close()
  assert not _threads("error")


def test_closing_ends_the_thread():
  watch, work = Stopwatch("closes"), _Work()
  watch.start(work)
  assert _threads("closes")
  work.done.set()
  watch.close()
  assert not _threads("closes")
