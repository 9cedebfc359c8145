"""Which engines run, in which turns, and what is written of them."""

import json

import pytest

from benchmarks.peers import run, table
from benchmarks.peers.run import Engine


class Fake:
  versions = {"package": "1"}  # noqa: RUF012

  def __init__(self, name, log):
    self._name, self._log = name, log

  def run(self, workload, repeat):
    self._log.append((workload, repeat, self._name))
    share = [0.1, 0.7, 0.3][repeat]
    return {"seconds": 1.0 + repeat, "tokens": 9, "extra": {"share": share}}


@pytest.fixture
def measured():
  log = []
  engines = {
    "a": Engine(None, "", "float32", ("sampling", "step")),
    "b": Engine("tunix", "", "float32", ("step",)),
  }
  running = {name: Fake(name, log) for name in engines}
  found = run.measure(running, engines, {"sampling": 1, "step": 2})
  return found, log, running


def test_engines_take_turns_and_the_first_repeat_is_not_counted(measured):
  found, log, _ = measured
  assert log == [
    *(("sampling", repeat, "a") for repeat in range(2)),
    *(("step", repeat, name) for repeat in range(3) for name in "ab"),
  ]
  assert found["a"]["step"] == table.Measured([2.0, 3.0], 9, {"share": 0.5})
  assert found["a"]["sampling"].seconds == [2.0]
  assert set(found["b"]) == {"step"}


def test_a_record_is_plain_json(measured):
  found, _, running = measured
  told = json.loads(json.dumps(run.record(found, running, 0.25)))
  assert told["results"]["b"]["step"]["seconds"] == [2.0, 3.0]
  assert told["versions"]["a"] == {"package": "1"}
  assert told["load_at_start"] == 0.25


def test_a_kind_stands_for_its_engines():
  assert set(run.chosen(["tunix", "trl_float32"])) == {
    "tunix_float32",
    "tunix_bfloat16",
    "trl_float32",
  }


def test_an_unknown_engine_is_refused_with_the_known_ones():
  with pytest.raises(ValueError, match=r"trl_float32.*got 'tunics'"):
    run.chosen(["tunics"])


def test_targets_are_of_engines_and_workloads_that_exist():
  for target in table.TARGETS:
    for name in (target.ours, *target.others):
      assert target.workload in run.ENGINES[name].workloads
