"""Judges: verifiers that see a batch, and what a policy wrote only in part.

The thinking part of a completion is cut off here, for every verifier.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool

from scalerl_jax.rewards.answers import after_thinking
from scalerl_jax.rewards.verifiers import Verifier
from scalerl_jax.types import Prompt


@runtime_checkable
class Judge(Protocol):
  """Right or wrong for a batch of completions, in their order."""

  timeouts: int  # judgements so far that were given up: they count as wrong

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
