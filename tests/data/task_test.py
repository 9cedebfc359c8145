"""A task's verdicts: one verifier or several, pure ones and judges."""

import dataclasses

import numpy as np
import pytest

from scalerl_jax.config import SupervisedConfig, TaskConfig
from scalerl_jax.data.tasks import load_task
from scalerl_jax.types import Prompt


class Longest:
  """Calls the longest completion of a batch right, and gives up on others."""

  timeouts = 0

  def judge(self, prompts, completions, ended):
    self.tasks = {prompt.task for prompt in prompts}
    lengths = np.array([len(text) for text in completions])
    self.timeouts += int((lengths < lengths.max()).sum())
    return ended & (lengths == lengths.max())


def exact(answer, completion, *, ended):
  return ended and completion == answer


@pytest.fixture(scope="module")
def task():
  return load_task(
    TaskConfig(train_prompts=3, heldout_prompts=2),
    SupervisedConfig(),
    max_prompt_tokens=14,
  )


def prompts(tasks):
  return [
    Prompt(uid, str(uid), np.zeros(0, np.int32), str(uid), task=name)
    for uid, name in enumerate(tasks)
  ]


def test_each_row_goes_to_its_tasks_verifier_and_back(task):
  judge = Longest()
  mixed = dataclasses.replace(task, verifier={"a": exact, "b": judge})
  found = mixed.verify_batch(
    prompts("babbab"),
    ["xx", "1", "x", "xxx", "5", "xxx"],
    np.array([True, True, True, True, True, False]),
  )
  assert found.tolist() == [False, True, False, True, False, False]
  assert found.dtype == bool
  assert judge.tasks == {"b"}
  assert mixed.timeouts == judge.timeouts == 2


def test_one_verifier_judges_all(task):
  judge = Longest()
  for verifier, expected in ((judge, [True, False]), (exact, [False, True])):
    alone = dataclasses.replace(task, verifier=verifier)
    found = alone.verify_batch(prompts("ab"), ["xx", "1"], np.ones(2, bool))
    assert found.tolist() == expected
  alone = dataclasses.replace(task, verifier=judge)
  assert alone.verify(prompts("a")[0], "x", ended=True)
  assert not alone.verify(prompts("a")[0], "x", ended=False)


def test_nothing_to_judge_is_nothing(task):
  assert task.verify_batch([], [], np.zeros(0, bool)).tolist() == []
  assert task.timeouts == 0
