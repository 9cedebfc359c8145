"""Tasks as a run sees them: prompts, split, verifier, stored tokenizer."""

import dataclasses
import json

import numpy as np
import pytest

from scalerl_jax.config import Config, SupervisedConfig, TaskConfig
from scalerl_jax.data import chain
from scalerl_jax.data.tasks import load_task
from scalerl_jax.types import Rollout

TASK = TaskConfig(train_prompts=300, heldout_prompts=70)
SUPERVISED = SupervisedConfig()


def load(task=TASK, supervised=SUPERVISED, path=None, budget=14):
  return load_task(task, supervised, path, max_prompt_tokens=budget)


@pytest.fixture(scope="module")
def task():
  return load()


@pytest.fixture
def questions(tmp_path):
  path = tmp_path / "questions.jsonl"
  path.write_text(
    "\n".join(
      json.dumps({"prompt": f"{i}+{i}?", "answer": str(2 * i)})
      for i in range(30)
    )
  )
  return TaskConfig(
    name="jsonl", path=str(path), train_prompts=20, heldout_prompts=8
  )


def everything(task):
  (heldout,) = task.heldout.values()
  return [*task.train, *heldout]


def test_prompts_are_right_distinct_and_of_the_stated_number(task):
  assert len(task.train) == 300
  assert list(task.heldout) == ["chain_arithmetic"]
  assert len(task.heldout["chain_arithmetic"]) == 70
  prompts = everything(task)
  assert len({prompt.uid for prompt in prompts}) == 370
  assert len({prompt.text for prompt in prompts}) == 370
  assert all(0 <= prompt.uid < 2**31 for prompt in prompts)
  for prompt in prompts:
    values = chain.running_values(chain.parse(prompt.text, 16), 16)
    assert prompt.answer == f"{values[0, -1]:x}"


def test_every_prompt_has_the_budget_of_the_default_config(task):
  budget = Config().sampler
  assert task.tokenizer.vocab_size == 70
  for prompt in everything(task):
    assert prompt.tokens.shape == (budget.max_prompt_tokens,)
    assert prompt.tokens.dtype == np.int32
    assert task.tokenizer.decode(prompt.tokens) == prompt.text
  batch = task.supervised_batch(0)
  assert batch.tokens.shape[1] == (
    budget.max_prompt_tokens + budget.max_completion_tokens
  )


def test_the_seed_decides_the_prompts(task):
  again = load(supervised=dataclasses.replace(SUPERVISED, seed=4))
  texts = [prompt.text for prompt in everything(task)]
  assert [prompt.text for prompt in everything(again)] == texts
  other = load(dataclasses.replace(TASK, seed=1))
  shared = {prompt.text for prompt in everything(other)} & set(texts)
  assert len(shared) < 5  # a short chain may be drawn by chance


def test_heldout_prompts_stay_when_training_grows(task):
  larger = load(dataclasses.replace(TASK, train_prompts=400))
  for name, prompts in task.heldout.items():
    texts = [(prompt.uid, prompt.text) for prompt in larger.heldout[name]]
    assert texts == [(prompt.uid, prompt.text) for prompt in prompts]
  assert [p.text for p in larger.train[:300]] == [p.text for p in task.train]


def test_verification_of_a_batch_equals_one_by_one(task):
  prompts = task.train[:5]
  right = [f"12={prompt.answer}" for prompt in prompts]
  texts = [*right[:3], "", right[4] + "0"]
  ended = np.array([True, False, True, True, True])
  correct = task.verify_batch(prompts, texts, ended)
  assert correct.dtype == np.bool_
  assert correct.tolist() == [True, False, True, False, False]
  for prompt, text, end, expected in zip(
    prompts, texts, ended.tolist(), correct, strict=True
  ):
    assert task.verify(prompt, text, ended=end) == expected


def test_single_turn_tasks_are_done_after_one_completion(task):
  rollout = Rollout(*range(10))
  assert task.max_turns == 1
  assert task.respond(rollout) is None


def test_a_task_refuses_a_shared_prompt(task):
  leaked = dataclasses.replace(task.train[3], uid=9999)
  with pytest.raises(ValueError, match="must not be trained on"):
    dataclasses.replace(task, heldout={"leak": [leaked]})


def test_the_tokenizer_is_stored_and_read_back(tmp_path, task):
  path = tmp_path / "run" / "tokenizer.model"
  load(path=path)
  stored = path.read_bytes()
  again = load(dataclasses.replace(TASK, seed=7), path=path)
  assert again.tokenizer.pieces == task.tokenizer.pieces
  assert path.read_bytes() == stored
  with pytest.raises(ValueError, match=r"70 pieces.*choose another workdir"):
    load(path=path, task=dataclasses.replace(TASK, modulus=10))


def test_too_many_prompts_for_the_chains_are_refused():
  # 2 · (6 + 36) = 84 chains.
  small = TaskConfig(
    modulus=2,
    min_operations=1,
    max_operations=2,
    train_prompts=30,
    heldout_prompts=12,
  )
  assert len(load(small).train) == 30
  with pytest.raises(ValueError, match=r"half of the 84 different.*got 43"):
    load(dataclasses.replace(small, heldout_prompts=13))


def test_long_prompts_are_refused(questions):
  with pytest.raises(ValueError, match=r"got 370 of 370.*14 tokens"):
    load(budget=13)
  # "10+10?" and above have six characters: 10 to 29 without the two unused.
  with pytest.raises(ValueError, match=r"got 18 of 28.*6 tokens"):
    load(questions, budget=5)


def test_jsonl_splits_by_line_and_matches_exactly(questions):
  task = load(questions)
  assert [p.text for p in task.train] == [f"{i}+{i}?" for i in range(20)]
  heldout = task.heldout["jsonl"]
  assert [p.text for p in heldout] == [f"{i}+{i}?" for i in range(22, 30)]
  assert len({p.uid for p in everything(task)}) == 28
  for prompt in everything(task):
    assert task.tokenizer.decode(prompt.tokens) == prompt.text
  assert task.verify(task.train[4], "4+4 = 8", ended=True)
  assert task.verify(heldout[0], " 44", ended=True)
  assert not task.verify(heldout[0], "44", ended=False)


def test_jsonl_supervised_texts_are_training_prompts_with_answers(questions):
  task = load(questions, dataclasses.replace(SUPERVISED, batch_size=200))
  batch = task.supervised_batch(2)
  assert batch.tokens.shape == (200, 6 + 3)  # "10+10?", "20" and the end
  seen = set()
  for tokens, mask, length in zip(*batch, strict=True):
    assert tokens[length - 1] in task.tokenizer.eos_ids
    assert mask[length - 1]
    assert not mask[length:].any()
    prompt = task.tokenizer.decode(tokens[:length][~mask[:length]])
    seen.add((prompt, task.tokenizer.decode(tokens[mask])))
  assert seen == {(prompt.text, prompt.answer) for prompt in task.train}
  for one, other in zip(batch, next(task.supervised(2)), strict=True):
    np.testing.assert_array_equal(one, other)


def test_jsonl_with_too_few_lines_is_refused(questions):
  with pytest.raises(ValueError, match=r"\(25 \+ 8 = 33\).*the 30 prompts"):
    load(dataclasses.replace(questions, train_prompts=25))
