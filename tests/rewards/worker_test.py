"""Judgements of workers: unit tests of code, and scorers of reasoning-gym."""

import json

import numpy as np
import pytest
import reasoning_gym

from scalerl_jax.rewards.judges import PoolJudge, code_question, gym_question
from scalerl_jax.rewards.pool import Pool
from scalerl_jax.rewards.worker import tail
from scalerl_jax.types import Prompt

SUM = "def add(a, b):\n  return a + b\n"
PRODUCT = "def add(a, b):\n  return a * b\n"
TESTS = {
  "statements": "assert add(1, 2) == 3\nassert add(0, 0) == 0",
  "functions": "def test_add():\n  assert add(1, 2) == 3",
  "a class": "import unittest\nclass AddTest(unittest.TestCase):\n"
  "  def test_add(self):\n    self.assertEqual(add(1, 2), 3)",
}


def prompts(*answers):
  return [
    Prompt(uid, f"q{uid}", np.zeros(0, np.int32), answer)
    for uid, answer in enumerate(answers)
  ]


def test_code_is_right_that_passes_its_tests():
  texts = {
    "alone": (SUM, True),
    "wrong": (PRODUCT, False),
    "in a block": (f"Here:\n```python\n{SUM}```\nThat is it.", True),
    "the last block": (f"```python\n{PRODUCT}```\n```\n{SUM}```", True),
    "no function": ("x = 1", False),
    "nothing": ("", False),
    "behind the thinking": (f"<think>{PRODUCT}</think>{SUM}", True),
    "still thinking": (f"<think>{SUM}", False),
    "tests of its own": ("def test_add(): pass", False),
    "ends first": ("raise SystemExit(0)", False),
  }
  rows = [(t, *row) for t in TESTS.values() for row in texts.values()]
  with Pool("code", workers=2, seconds=5.0) as pool:
    judge = PoolJudge(pool, "</think>", code_question)
    found = judge.judge(
      prompts(*[tests for tests, *_ in rows]),
      [text for _, text, _ in rows],
      np.ones(len(rows), bool),
    )
    assert found.tolist() == [right for *_, right in rows]
    assert judge.timeouts == 0


def test_a_gyms_own_scorer_decides_where_many_answers_are_right(tmp_path):
  options = {"seed": 7, "size": 40}
  dataset = reasoning_gym.create_dataset("countdown", **options)
  item = dataset[3]
  target = item["metadata"]["target"]
  assert str(target) in item["question"]
  other = f"({item['metadata']['expression']})"  # as right as the first
  path = tmp_path / "written"
  (prompt,) = prompts(item["answer"])
  texts = {
    item["answer"]: True,
    f"<answer>{other}</answer>": True,
    "1 + 1": False,
    "nothing": False,
    str(target): False,  # not from the numbers
    # Scorers of nine datasets execute what they are given.
    f"open({str(path)!r}, 'w').write('x')": False,
    f"__import__('os').system('touch {path}')": False,
  }
  with Pool("gym", workers=1, seconds=10.0) as pool:
    question = gym_question("countdown", json.dumps(options), {prompt.text: 3})
    judge = PoolJudge(pool, "</think>", question)
    found = judge.judge(
      [prompt] * len(texts), list(texts), np.ones(len(texts), bool)
    )
    assert dict(zip(texts, found.tolist(), strict=True)) == texts
    assert not path.exists()
    # A scorer that does write, of whatever it is given: the process may not.
    row = {"name": "spiral_matrix", "options": json.dumps(options), "index": 0}
    assert not pool.judge([{**row, "text": f"open({str(path)!r}, 'w')"}])[0]
    assert not path.exists()
    assert (pool.timeouts, pool.crashes) == (0, 0)


@pytest.mark.parametrize(
  ("text", "end"),
  [
    ("1 + 1 = 2", "1 + 1 = 2"),
    ("9" * 30_000, ""),
    ("9" * 30_000 + " 12", "12"),
    ("a " * 15_000, "a " * 9_999),
  ],
)
def test_a_long_text_is_read_from_a_space_on(text, end):
  assert tail(text) == end
