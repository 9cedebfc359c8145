"""Which engines run, in which turns, and what is written of them."""

import json
import pathlib
import types

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


def test_torch_does_the_long_tail_once():
  log = []
  engines = {
    "a": Engine("tunix", "", "float32", ("long_tail",)),
    "b": Engine("transformers", "", "float32", ("long_tail", "sampling")),
  }
  running = {name: Fake(name, log) for name in engines}
  found = run.measure(running, engines, {"sampling": 1, "long_tail": 1})
  assert log == [
    *(("sampling", repeat, "b") for repeat in range(2)),
    ("long_tail", 0, "a"),
    *(("long_tail", 1, name) for name in "ab"),
  ]
  assert found["b"]["long_tail"].seconds == [2.0]


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


TRIVIAL = """
import sys

sys.path.insert(0, {folder!r})
import engine

assert "--workloads=step" in sys.argv
assert "--dtype=float32" in sys.argv
engine.serve(
  {{"step": lambda repeat: {{"seconds": 2.0, "tokens": 6, "extra": {{}}}}}},
  {{"package": "1.2"}},
)
"""


def _options(**others):
  chosen = {
    "engines": ["ours"],
    "workloads": ["step"],
    "repeats": 2,
    "out": "",
    "anyway": False,
  }
  return types.SimpleNamespace(FLAGS=types.SimpleNamespace(**chosen, **others))


def test_a_comparison_from_processes_to_table_and_file(
  tmp_path, monkeypatch, capsys
):
  file = tmp_path / "trivial.py"
  file.write_text(TRIVIAL.format(folder=str(pathlib.Path(run.__file__).parent)))
  engines = {"ours_float32": Engine(None, str(file), "float32", ("step",))}
  monkeypatch.setattr(run, "ENGINES", engines)
  monkeypatch.setattr(run.environments, "ROOT", tmp_path)
  monkeypatch.setattr(run.os, "getloadavg", lambda: (0.25, 0.0, 0.0))
  options = _options()
  options.FLAGS.out = str(tmp_path / "told.json")
  monkeypatch.setattr(run, "flags", options)
  run.main([])
  told = capsys.readouterr().out
  assert "package 1.2" in told
  assert "2.00 s [2.00, 2.00] 0.00 k/s 1.00x" in told
  written = json.loads((tmp_path / "told.json").read_text())
  assert written["results"]["ours_float32"]["step"]["seconds"] == [2.0, 2.0]
  saved = tmp_path / "build" / "peers" / "run" / "checkpoint"
  assert (saved / "model.safetensors").exists()


def test_a_busy_machine_is_refused(monkeypatch):
  monkeypatch.setattr(run.os, "getloadavg", lambda: (0.75, 0.0, 0.0))
  monkeypatch.setattr(run, "flags", _options())
  with pytest.raises(SystemExit, match=r"at most 0.5.*got 0.75"):
    run.main([])


def test_an_unknown_workload_is_refused_with_the_known_ones(monkeypatch):
  monkeypatch.setattr(run.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
  options = _options()
  options.FLAGS.workloads = ["stap"]
  monkeypatch.setattr(run, "flags", options)
  with pytest.raises(SystemExit, match=r"sampling, long_tail, step.*'stap'"):
    run.main([])
