"""A process that judges: requests come in on lines of JSON, verdicts go out.

Started by `pool.py` as `python -m scalerl_jax.rewards.worker`. It imports what
its kind of judging needs, gives up its rights, and only then reads.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from scalerl_jax.rewards.answers import boxed
from scalerl_jax.rewards.confinement import confine

_ALONE = 5.0  # seconds behind the deadline after which an orphan ends itself
_MAX_TEXT = 20_000  # characters at the end of a completion that are looked at

Judgement = Callable[..., bool]


def math_judgement() -> Judgement:
  """Equality of mathematical answers, as math-verify sees it."""
  import math_verify

  latex = math_verify.LatexExtractionConfig(boxed_match_priority=0)
  targets = [latex, math_verify.ExprExtractionConfig()]

  def parse(text: str) -> list[Any]:
    # Without its own deadline, which would use the alarm.
    return math_verify.parse(text, targets, parsing_timeout=0)

  @functools.lru_cache(maxsize=256)  # a group has one right answer
  def gold(answer: str) -> list[Any]:
    return parse(f"\\boxed{{{answer}}}")

  def judge(answer: str, text: str) -> bool:
    text = tail(text)
    if r"\boxed" in text:
      content = boxed(text)
      if content is None:  # the last box does not close
        return False
      text = f"\\boxed{{{content}}}"
    return math_verify.verify(
      gold(answer),
      parse(text),
      allow_set_relation_comp=True,  # [2, 5] is 2 ≤ x ≤ 5
      timeout_seconds=0,
    )

  return judge


def gym_judgement() -> Judgement:
  """What a dataset of reasoning-gym scores 1: partial credit is wrong."""
  from reasoning_gym import factory

  @functools.lru_cache(maxsize=4)
  def dataset(name: str, options: str) -> Any:
    return factory.create_dataset(name, **json.loads(options))

  def judge(name: str, options: str, index: int, text: str) -> bool:
    made = dataset(name, options)
    return float(made.score_answer(text, made[index])) >= 1.0

  return judge


def code_judgement() -> Judgement:
  """Whether Python passes unit tests, in the same namespace.

  Both may import the standard library. Tests are statements (`assert`),
  functions `test_...` and `TestCase` classes.
  """
  import unittest

  def judge(answer: str, text: str) -> bool:
    namespace: dict[str, Any] = {"__name__": "solution"}
    exec(compile(text, "<solution>", "exec"), namespace)
    solution = dict(namespace)
    exec(compile(answer, "<tests>", "exec"), namespace)
    for name, value in list(namespace.items()):
      if value is solution.get(name):
        continue  # tests of its own say nothing
      if isinstance(value, type) and issubclass(value, unittest.TestCase):
        suite = unittest.defaultTestLoader.loadTestsFromTestCase(value)
        if not suite.run(unittest.TestResult()).wasSuccessful():
          return False
      elif name.startswith("test_") and callable(value):
        value()
    return True

  return judge


JUDGEMENTS: dict[str, Callable[[], Judgement]] = {
  "math": math_judgement,
  "gym": gym_judgement,
  "code": code_judgement,
}


@dataclasses.dataclass(frozen=True)
class Orders:
  """What a worker is told when it starts."""

  kind: str  # of JUDGEMENTS
  seconds: float  # a judgement
  megabytes: int  # address space
  scratch: str = ""  # folder of a worker that judges once, and may write there


def tail(text: str) -> str:
  """The end of a long text, from a space on: no number is cut in two.

  >>> tail("9" * 30_000), tail("1 + 1 = 2")
  ('', '1 + 1 = 2')
  """
  if len(text) <= _MAX_TEXT:
    return text
  return text[-_MAX_TEXT:].partition(" ")[2]


def main() -> None:
  """Serves until its input ends."""
  orders = Orders(**json.loads(sys.argv[1]))
  logging.disable(logging.CRITICAL)
  replies = os.fdopen(os.dup(1), "w")
  nothing = os.open(os.devnull, os.O_WRONLY)
  os.dup2(nothing, 1)  # what is printed while judging is no reply
  requests = sys.stdin.buffer
  judge = JUDGEMENTS[orders.kind]()
  sys.stdin = open(os.devnull)  # noqa: SIM115 (until the process ends)
  confine(
    megabytes=orders.megabytes,
    scratch=orders.scratch,
    cpu_seconds=math.ceil(orders.seconds) + 1 if orders.scratch else 0,
  )
  _reply(replies, "ready", True)
  for line in requests:
    request = json.loads(line)
    token = request.pop("token")
    # An orphan that hangs ends itself; math in C sees no other signal.
    signal.setitimer(signal.ITIMER_REAL, orders.seconds + _ALONE)
    correct = False
    # Junk may raise anything, also what is no Exception: it is wrong then.
    with contextlib.suppress(BaseException):
      correct = bool(judge(**request))
    signal.setitimer(signal.ITIMER_REAL, 0)
    _reply(replies, token, correct)


def _reply(replies: Any, token: str, correct: bool) -> None:
  replies.write(json.dumps([token, correct]) + "\n")
  replies.flush()


if __name__ == "__main__":
  main()
