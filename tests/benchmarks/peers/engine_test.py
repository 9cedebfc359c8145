"""An engine's protocol, over a real process and a loop of another's."""

import pathlib
import sys

import pytest

from benchmarks.peers import engine
from benchmarks.peers.run import Running

TRIVIAL = """
import os
import sys

sys.path.insert(0, {folder!r})
import engine


def work(repeat):
  print("noise")
  os.system("echo noise of a child")
  if repeat == 7:
    raise KeyError("seven")
  return {{"seconds": repeat / 4, "tokens": 5, "extra": {{"share": 0.5}}}}


engine.serve({{"work": work}}, {{"package": "1.2"}})
"""


@pytest.fixture
def running(tmp_path):
  folder = str(pathlib.Path(engine.__file__).parent)
  (tmp_path / "trivial.py").write_text(TRIVIAL.format(folder=folder))
  command = [sys.executable, str(tmp_path / "trivial.py")]
  process = Running("trivial", command, {}, tmp_path / "log")
  yield process
  process.close()


def test_answers_are_not_mixed_with_what_an_engine_prints(running, tmp_path):
  assert running.versions == {"package": "1.2"}
  for repeat in (0, 3):
    assert running.run("work", repeat) == {
      "seconds": repeat / 4,
      "tokens": 5,
      "extra": {"share": 0.5},
    }
  assert (tmp_path / "log").read_text().count("noise of a child") == 2


def test_an_engine_that_fails_says_why(running):
  with pytest.raises(RuntimeError, match=r"(?s)code 1;.*seven"):
    running.run("work", 7)


def test_an_unknown_order_names_the_known_ones(running):
  with pytest.raises(RuntimeError, match=r"of \['work'\].*sleep 1"):
    running.run("sleep", 1)


def test_turns_are_the_steps_of_the_loop():
  took = []

  def loop(wait):
    for step in range(3):
      wait()
      took.append(step)
    wait()

  turns = engine.Turns(loop)
  assert not took
  for count in (1, 2, 3):
    assert turns.step() >= 0
    assert took == list(range(count))


def test_turns_hand_over_what_ended_the_loop():
  def loop(wait):
    wait()
    raise KeyError("inside")

  with pytest.raises(KeyError, match="inside"):
    engine.Turns(loop).step()
  with pytest.raises(RuntimeError, match="ended before the runner"):
    engine.Turns(lambda wait: wait()).step()
