"""Pure functions that say whether a completion's text holds the answer.

A task names its verifier. No verifier raises on what a policy wrote, and none
executes it; whatever it cannot read is wrong.
"""

import re
from collections.abc import Callable

from scalerl_jax.rewards.answers import number, stated_answer

# (answer, completion, *, ended) -> correct
Verifier = Callable[..., bool]

_MARKS = "*_`$\"'. \n"  # what may stand around an answer
MARKER = "="  # the answer stands after the first one


def chain_answer(answer: str, completion: str, *, ended: bool) -> bool:
  """Strict answer after a marker: exactly the answer, then the end token.

  Everything after the first `=` must be the answer, character by character
  (no spaces, no second marker); what stands before it is not looked at.

  Args:
    answer: the right answer, not empty.
    completion: what the policy wrote, without end and padding tokens.
    ended: whether the policy drew an end token (a truncated completion is
      wrong whatever it says).

  Returns:
    Correctness; not a reward.

  >>> chain_answer("0", "a20=0", ended=True)
  True
  >>> chain_answer("0", "a20=0", ended=False)
  False
  """
  return ended and completion.partition(MARKER)[2] == answer


def exact_match(answer: str, completion: str, *, ended: bool) -> bool:
  """Exact match of stripped text, with or without reasoning before a marker.

  Right if the whole completion is the answer, or if everything after its first
  `=` is; spaces around either do not count. So an answer may hold `=` itself.

  Args:
    answer: the right answer, not empty.
    completion: what the policy wrote, without end and padding tokens.
    ended: whether the policy drew an end token (a truncated completion is
      wrong whatever it says).

  Returns:
    Correctness; not a reward.

  >>> exact_match("12", "7 and 5 make = 12", ended=True)
  True
  >>> exact_match("12", "about 12", ended=True)
  False
  """
  answer = answer.strip()
  after = completion.partition(MARKER)[2]
  return (
    ended and bool(answer) and answer in (completion.strip(), after.strip())
  )


def stated_match(answer: str, completion: str, *, ended: bool) -> bool:
  """The answer that a text comes to, whatever is said around it.

  Boxed or tagged where it is; else the last number, or the last line if the
  right answer is no number. Numbers are compared by value, exactly; other
  answers, and numbers with leading zeros, as text without marks around it.

  Args:
    answer: the right answer, not empty.
    completion: what the policy wrote, without end and padding tokens.
    ended: whether the policy drew an end token (a truncated completion is
      wrong whatever it says).

  Returns:
    Correctness; not a reward.

  >>> stated_match("1200", "30 times 40 is **1,200**.", ended=True)
  True
  >>> stated_match("1200", "30 times 40 is 1200, give or take 5.", ended=True)
  False
  """
  stated = stated_answer(completion, like=answer)
  if not ended or stated is None:
    return False
  if stated == answer.strip():
    return True
  value = number(answer)
  if value is not None and not re.match(r"\s*[-+]?0\d", answer):
    return number(stated) == value
  said = stated.strip(_MARKS)
  return bool(said) and said == answer.strip(_MARKS)
