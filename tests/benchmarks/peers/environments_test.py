"""Environments of the peers are made once."""

import re

from benchmarks.peers import environments


def test_an_environment_with_the_same_pins_is_used_again(tmp_path, monkeypatch):
  calls = []

  def install(command, check):
    assert check
    calls.append(command)
    (tmp_path / "trl").mkdir(exist_ok=True)

  monkeypatch.setattr(environments.subprocess, "run", install)
  first = environments.interpreter("trl", tmp_path)
  assert first == str(tmp_path / "trl" / "bin" / "python")
  assert len(calls) == 2
  assert environments.interpreter("trl", tmp_path) == first
  assert len(calls) == 2
  (tmp_path / "trl" / "installed.txt").write_text("torch==1.0\n")
  environments.interpreter("trl", tmp_path)
  assert len(calls) == 4


def test_everything_in_an_environment_is_pinned():
  assert environments.PEERS == ("transformers", "trl", "tunix")
  for name in environments.PEERS:
    text = (environments.PINS / f"{name}.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
