"""Judges of batches: order, and what they see of a completion."""

import numpy as np

from scalerl_jax.rewards.judges import Judge, TextJudge
from scalerl_jax.rewards.verifiers import stated_match
from scalerl_jax.types import Prompt


def prompt(answer, text="q"):
  return Prompt(0, text, np.zeros(0, np.int32), answer)


def test_each_completion_is_judged_by_its_own_prompt():
  judge = TextJudge(stated_match, "</think>")
  assert isinstance(judge, Judge)
  prompts = [prompt(str(n)) for n in range(5)]
  texts = ["0", "2", "it is 2", "<think>4</think>3", "<think>4"]
  ended = np.array([True, True, True, True, True])
  found = judge.judge(prompts, texts, ended)
  assert found.tolist() == [True, False, True, True, False]
  assert judge.timeouts == 0


def test_a_truncated_completion_is_wrong():
  judge = TextJudge(stated_match, "</think>")
  ended = np.array([False, True])
  assert judge.judge([prompt("1")] * 2, ["1", "1"], ended).tolist() == [
    False,
    True,
  ]


def test_thinking_that_the_prompt_opened_is_not_seen():
  judge = TextJudge(stated_match, "</think>")
  prompts = [prompt("1", "q<think>\n")] * 2
  found = judge.judge(prompts, ["so 1", "so 1</think>1"], np.ones(2, bool))
  assert found.tolist() == [False, True]
