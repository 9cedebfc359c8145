"""Verdicts: in order, at once or beside the loop, errors carried over."""

import dataclasses
import json
import threading

import numpy as np
import pytest

from scalerl_jax.pipeline.judging import Judging
from scalerl_jax.pipeline.store import no_rollout
from scalerl_jax.pipeline.timeline import Timeline
from scalerl_jax.types import FinishReason
from tests.pipeline import parts
from tests.pipeline.parts import G

SECONDS = 30.0


def _task(verifier):
  return dataclasses.replace(parts.tiny_task(), verifier=verifier)


def _rollout(prompt, text, ended):
  """A group whose completions all say `text`, the first ones ended."""
  task = parts.tiny_task()
  tokens = task.tokenizer.encode(text)
  rollout = no_rollout(G, parts.SAMPLER)
  rollout.uid = np.int32(task.train[prompt].uid)
  rollout.tokens[:, : len(tokens)] = tokens
  rollout.length[:] = len(tokens)
  rollout.finish[:] = FinishReason.BUDGET
  rollout.finish[:ended] = FinishReason.EOS
  return rollout


@pytest.fixture
def judge():
  """Makes judging rooms; their threads end with the test."""
  made = []

  def make(verifier, beside, timeline=None):
    timeline = timeline or Timeline(None)
    made.append(Judging(_task(verifier), beside=beside, timeline=timeline))
    return made[-1]

  yield make
  for one in made:
    one.close()
  assert not [t for t in threading.enumerate() if t.name.startswith("judge")]


@pytest.mark.parametrize("beside", [False, True])
def test_a_verdict_is_the_verifiers_of_prompt_text_and_end(judge, beside):
  asked = []

  def verifier(answer, completion, *, ended):
    asked.append((answer, completion, ended))
    return ended

  task = parts.tiny_task()
  judging = judge(verifier, beside)
  judging.put([7, 9], [_rollout(2, "1", 2), _rollout(0, "02", 1)])
  judging.put([8], [_rollout(1, "2", 0)])
  first, second = judging.take(), judging.take()
  assert not judging.pending
  assert [first.indices, second.indices] == [[7, 9], [8]]
  np.testing.assert_array_equal(first.correct, [[1, 1, 0], [1, 0, 0]])
  np.testing.assert_array_equal(second.correct, [[0, 0, 0]])
  read = first.rollouts[1]
  text = task.tokenizer.decode_batch(read.tokens, read.length)[0]
  assert [answer for answer, _, _ in asked[::G]] == [
    task.train[n].answer for n in (2, 0, 1)
  ]
  assert asked[G] == (task.train[0].answer, text, True)


def test_at_once_means_at_once(judge):
  asked = []
  judging = judge(lambda *_, ended: asked.append(ended) is None, False)
  assert not judging.ready
  judging.put([0], [_rollout(0, "1", G)])
  assert len(asked) == G
  assert judging.ready


def test_beside_means_that_nobody_waits(judge):
  go = threading.Event()

  def slow(answer, completion, *, ended):
    del answer, completion, ended
    assert go.wait(SECONDS)
    return True

  judging = judge(slow, True)
  for index in range(3):
    judging.put([index], [_rollout(index, "1", G)])
  assert judging.pending
  assert not judging.ready
  go.set()
  assert [judging.take().indices for _ in range(3)] == [[0], [1], [2]]
  assert not judging.ready


@pytest.mark.parametrize("beside", [False, True])
def test_an_error_comes_out_where_the_verdict_is_taken(judge, beside):
  def broken(answer, completion, *, ended):
    raise ArithmeticError("of the verifier")

  judging = judge(broken, beside)

  def ask():
    judging.put([0], [_rollout(0, "1", G)])
    return judging.take()

  with pytest.raises(ArithmeticError, match="of the verifier"):
    ask()


@pytest.mark.parametrize("beside", [False, True])
def test_what_was_given_up_is_told_with_its_groups(judge, beside):
  class Impatient:
    timeouts = 100  # an evaluation's

    def judge(self, prompts, completions, ended):
      self.timeouts += len(prompts) - 1
      return np.zeros(len(prompts), bool)

  judging = judge(Impatient(), beside)
  judging.put([0], [_rollout(0, "1", G)])
  judging.put([1, 2], [_rollout(0, "1", G), _rollout(1, "1", G)])
  assert [judging.take().given_up for _ in range(2)] == [G - 1, 2 * G - 1]


def test_the_timeline_shows_every_judgement(judge, tmp_path):
  timeline = Timeline(tmp_path / "t.json")
  judging = judge(parts.even, True, timeline)
  judging.put([0, 1], [_rollout(0, "1", G), _rollout(1, "2", G)])
  judging.take()
  timeline.close()
  event = json.loads((tmp_path / "t.json").read_text())[-1]
  assert (event["name"], event["args"]) == ("verify", {"completions": 2 * G})
