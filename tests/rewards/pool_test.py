"""The pool: order, deadlines, deaths; and mathematics that makes SymPy hang."""

import time

import numpy as np
import pytest

from scalerl_jax.rewards.judges import PoolJudge, math_question
from scalerl_jax.rewards.pool import Pool
from scalerl_jax.types import Prompt
from tests.fixtures.math_answers import MATH_ANSWERS

HANG = "while True: pass"


@pytest.fixture(scope="module")
def mathematics():
  with Pool("math", workers=1, seconds=20.0) as pool:
    yield pool


@pytest.fixture(scope="module")
def pool():
  # Code is the kind whose workers start at once and do as they are told.
  with Pool("code", workers=2, seconds=1.0) as pool:
    yield pool


def code(*texts):
  return [{"answer": "assert right", "text": text} for text in texts]


def test_answers_are_judged_as_mathematics(mathematics):
  prompts = [
    Prompt(uid, "q", np.zeros(0, np.int32), answer)
    for uid, (answer, *_) in enumerate(MATH_ANSWERS)
  ]
  judge = PoolJudge(mathematics, "</think>", math_question)
  texts = [text for _, text, _ in MATH_ANSWERS]
  found = judge.judge(prompts, texts, np.ones(len(texts), bool))
  expected = [right for *_, right in MATH_ANSWERS]
  wrong = [
    (answer[:40], text[:40], right)
    for (answer, text, right), got in zip(MATH_ANSWERS, found, strict=True)
    if got != right
  ]
  assert not wrong
  assert found.tolist() == expected
  assert len(MATH_ANSWERS) >= 60
  assert (mathematics.timeouts, mathematics.crashes) == (0, 0)
  # The same without what is clear at once: all through math-verify.
  short = [row for row in MATH_ANSWERS if row[1]]
  found = mathematics.judge([{"answer": a, "text": t} for a, t, _ in short])
  assert found.tolist() == [right for *_, right in short]


def test_what_hangs_is_wrong_counted_and_does_not_stop_the_rest():
  right = {"answer": "12", "text": "It is 12."}
  with Pool("math", workers=1, seconds=1.5) as pool:
    found = pool.judge(
      [{"answer": "12", "text": r"\boxed{9^{9^{9^9}}}"}, right]
    )
    assert found.tolist() == [False, True]
    assert (pool.timeouts, pool.crashes) == (1, 0)


def test_verdicts_come_in_the_order_of_the_requests(pool):
  texts = [
    f"import time; time.sleep({0.2 if row == 0 else 0}); right = {row % 3 == 0}"
    for row in range(7)
  ]
  expected = [row % 3 == 0 for row in range(7)]
  assert pool.judge(code(*texts)).tolist() == expected
  assert pool.judge(code()).tolist() == []


def test_a_hung_worker_is_replaced_and_the_pool_keeps_its_size(pool):
  before = pool.timeouts
  found = pool.judge(code(HANG, *["right = True"] * 4, HANG, "right = True"))
  assert found.tolist() == [False, True, True, True, True, False, True]
  assert pool.timeouts - before == 2
  assert pool.crashes == 0
  assert len(pool._workers) <= 2
  started = time.monotonic()
  assert pool.judge(code(HANG, HANG)).tolist() == [False, False]
  # One beside the other.
  assert time.monotonic() - started < 1.9 + 1.0


def test_a_worker_that_dies_is_wrong_and_replaced(pool):
  before = pool.crashes
  text = "import os; os._exit(0)"
  assert pool.judge(code("right = True", text, "right = True")).tolist() == [
    True,
    False,
    True,
  ]
  assert pool.crashes == before + 1


def test_junk_is_wrong_and_costs_no_worker(pool):
  before = pool.timeouts, pool.crashes
  junk = [
    *("raise SystemExit", "raise KeyboardInterrupt", "def", "\0", "\ud800"),
    "(" * 10_000,
    "def f(): f()\nf()",
    "x = bytearray(10**11)",
    "import sys; sys.stdout.write('[\"ready\", true]\\n'); sys.stdout.flush()",
    "import os; os.write(1, b'true\\n')",
  ]
  assert not pool.judge(code(*junk)).any()
  assert pool.judge(code("right = 1")).tolist() == [True]
  assert (pool.timeouts, pool.crashes) == before


def test_a_forged_reply_is_no_verdict(pool):
  before = pool.crashes
  text = (
    "import os\nfor fd in range(3, 9):\n  try: os.write(fd, b'[1, true]\\n')\n"
    "  except OSError: pass\nimport time; time.sleep(0.5); right = False"
  )
  assert pool.judge(code(text)).tolist() == [False]
  assert pool.crashes == before + 1


def test_workers_start_with_work_and_end_with_the_pool():
  with Pool("code", workers=3, seconds=5.0) as pool:
    assert not pool._workers
    pool.judge(code("right = True"))
    (worker,) = pool._workers  # no more than there was work for
    pool.judge(code("right = True"))
    assert pool._workers == [worker]  # and it stays warm
    assert not worker.ended
  assert worker.ended


def test_a_dead_idle_worker_is_nobodys_fault():
  with Pool("code", workers=1, seconds=5.0) as pool:
    pool.judge(code("right = True"))
    pool._workers[0]._process.kill()
    pool._workers[0]._process.wait()
    assert pool.judge(code("right = True")).tolist() == [True]
    assert pool.crashes == 0


def test_a_worker_that_cannot_start_says_why():
  pool = Pool("chess", workers=1, seconds=5.0)
  with pytest.raises(RuntimeError, match=r"'chess' must start, .*KeyError"):
    pool.judge(code("right = True"))
  assert not pool._workers
