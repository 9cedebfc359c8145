"""A device that is a thread: all of a process on one core, and back."""

import os
import pathlib
import threading

from benchmarks import overlap

HERE = pathlib.Path("/proc/self/task")


def _cores():
  return {
    int(task.name): os.sched_getaffinity(int(task.name))
    for task in HERE.iterdir()
  }


def test_every_thread_is_kept_on_one_core_and_let_go():
  done = threading.Event()
  other = threading.Thread(target=done.wait)
  other.start()
  try:
    before = _cores()
    assert other.native_id in before
    with overlap.one_core():
      held = _cores()
    assert {len(held[task]) for task in before} == {1}
    assert len(set.union(*held.values())) == 1
    after = _cores()
    assert {task: after[task] for task in before} == before
  finally:
    done.set()
    other.join()
