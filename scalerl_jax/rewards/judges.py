"""Judges: verifiers that see a batch, and what a policy wrote only in part.

The thinking part of a completion is cut off here, for every verifier.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool

from scalerl_jax.rewards.answers import (
  after_thinking,
  boxed,
  code_block,
  number,
  stated_answer,
)
from scalerl_jax.rewards.pool import Pool
from scalerl_jax.rewards.verifiers import Verifier, stated_match
from scalerl_jax.types import Prompt


@runtime_checkable
class Judge(Protocol):
  """Right or wrong for a batch of completions, in their order."""

  @property
  def timeouts(self) -> int:
    """Judgements so far that were given up: they count as wrong."""
    ...

  def judge(
    self,
    prompts: Sequence[Prompt],
    completions: Sequence[str],
    ended: Bool[np.ndarray, " B"],
  ) -> Bool[np.ndarray, " B"]:
    """Correctness of each completion; not a reward.

    Args:
      prompts: one a completion.
      completions: what the policy wrote, without end and padding tokens.
      ended: whether the policy drew an end token.
    """
    ...


class TextJudge:
  """A pure verifier of what stands behind the thinking.

  >>> from scalerl_jax.rewards.verifiers import exact_match
  >>> judge = TextJudge(exact_match, "</think>")
  >>> prompt = Prompt(0, "1 + 1?", np.zeros(0, np.int32), "2")
  >>> judge.judge([prompt] * 2, ["</think>2", "2</think>3"], np.ones(2, bool))
  array([ True, False])
  """

  timeouts = 0

  def __init__(self, verifier: Verifier, thinking_end: str):
    self._verifier, self._end = verifier, thinking_end

  def judge(
    self,
    prompts: Sequence[Prompt],
    completions: Sequence[str],
    ended: Bool[np.ndarray, " B"],
  ) -> Bool[np.ndarray, " B"]:
    correct = np.zeros(len(prompts), bool)
    for row, (prompt, completion, end) in enumerate(
      zip(prompts, completions, ended.tolist(), strict=True)
    ):
      text = after_thinking(prompt.text, completion, self._end)
      if text is not None:
        correct[row] = self._verifier(prompt.answer, text, ended=end)
    return correct


# A verdict, or the request that a pool is to answer.
Question = Callable[[Prompt, str], bool | Mapping[str, Any]]


class PoolJudge:
  """Verdicts that are clear at once, and a pool's on all others.

  Equal questions of a batch are asked once.
  """

  def __init__(self, pool: Pool, thinking_end: str, question: Question):
    """Keeps what is needed; the pool starts with the first question.

    Args:
      pool: judges.
      thinking_end: closes the part of a completion that nobody sees.
      question: of a prompt and the visible text of a completion.
    """
    self._pool, self._end, self._question = pool, thinking_end, question

  @property
  def timeouts(self) -> int:
    """Judgements that were given up, and those whose worker died."""
    return self._pool.timeouts + self._pool.crashes

  def judge(
    self,
    prompts: Sequence[Prompt],
    completions: Sequence[str],
    ended: Bool[np.ndarray, " B"],
  ) -> Bool[np.ndarray, " B"]:
    correct = np.zeros(len(prompts), bool)
    asked: dict[tuple[str, str], list[int]] = {}
    requests: list[Mapping[str, Any]] = []
    for row, (prompt, completion, end) in enumerate(
      zip(prompts, completions, ended.tolist(), strict=True)
    ):
      text = after_thinking(prompt.text, completion, self._end)
      if text is None or not text.strip() or not end:
        continue
      if (key := (prompt.text, text)) not in asked:
        answer = self._question(prompt, text)
        if isinstance(answer, bool):
          correct[row] = answer
          continue
        requests.append(answer)
      asked.setdefault(key, []).append(row)
    for rows, verdict in zip(
      asked.values(), self._pool.judge(requests).tolist(), strict=True
    ):
      correct[rows] = verdict
    return correct


def math_question(prompt: Prompt, text: str) -> bool | Mapping[str, Any]:
  """Whether a text comes to the right mathematical answer, by math-verify.

  A last box that holds the answer as it is written, or another integer than
  the right one, needs no mathematics.
  """
  content = boxed(text)
  if content is not None:
    if content == prompt.answer.strip():
      return True
    value, right = number(content), number(prompt.answer)
    if value is not None and right is not None:
      if value == right:
        return True
      if value.denominator == right.denominator == 1:
        return False
  return {"answer": prompt.answer, "text": text}


def gym_question(
  name: str, options: str, origins: Mapping[str, int]
) -> Question:
  """Whether reasoning-gym calls an answer right, where many may be.

  Args:
    name: of the dataset.
    options: of it, as JSON.
    origins: the item of each prompt's text.
  """

  def question(prompt: Prompt, text: str) -> bool | Mapping[str, Any]:
    if stated_match(prompt.answer, text, ended=True):
      return True
    return {
      "name": name,
      "options": options,
      "index": origins[prompt.text],
      "text": stated_answer(text, like=prompt.answer) or "",
    }

  return question


def code_question(prompt: Prompt, text: str) -> bool | Mapping[str, Any]:
  """Whether the last block of Python passes the tests that are the answer."""
  return {"answer": prompt.answer, "text": code_block(text)}
