"""Tasks as a run sees them: prompts, split, verifier, stored tokenizer."""

import dataclasses
import hashlib
import itertools
import json

import numpy as np
import pytest

from scalerl_jax.config import Config, SupervisedConfig, TaskConfig
from scalerl_jax.data import chain
from scalerl_jax.data.chain import ARITHMETIC, LOGIC
from scalerl_jax.data.pieces import PieceTokenizer
from scalerl_jax.data.tasks import load_task, question_set
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
  return [*task.train, *itertools.chain(*task.heldout.values())]


def assert_right(prompt, operations):
  chains = chain.parse(prompt.text, operations, 16)
  values = chain.running_values(chains, operations, 16)
  assert prompt.answer == f"{values[0, -1]:x}"
  assert prompt.task == operations.name
  assert prompt.difficulty == chains.lengths[0]


def test_prompts_are_right_distinct_and_of_the_stated_number(task):
  assert len(task.train) == 300
  assert list(task.heldout) == ["chain_arithmetic"]
  assert len(task.heldout["chain_arithmetic"]) == 70
  prompts = everything(task)
  assert len({prompt.uid for prompt in prompts}) == 370
  assert len({prompt.text for prompt in prompts}) == 370
  assert all(0 <= prompt.uid < 2**31 for prompt in prompts)
  for prompt in prompts:
    assert_right(prompt, ARITHMETIC)


def test_chain_arithmetic_is_what_published_runs_were_trained_on():
  # As the first version of this task made them; cached base policies and
  # published numbers hang on these prompts, ids and teacher texts. (2026-11)
  task = load(TaskConfig(), SupervisedConfig(seed=3))
  assert task.fingerprint() == "74becd3bba59"
  digest = hashlib.sha256()
  for array in task.supervised_batch(699):
    digest.update(np.ascontiguousarray(array).tobytes())
  assert digest.hexdigest()[:12] == "ca73ce73613f"


def test_difficulty_and_task_leave_the_fingerprint_alone(task):
  other = [
    dataclasses.replace(p, difficulty=p.difficulty + 1, task="x")
    for p in task.train
  ]
  changed = dataclasses.replace(task, train=other)
  assert changed.fingerprint() == task.fingerprint()


def test_chain_logic_has_prompts_and_symbols_of_its_own(task):
  logic = load(dataclasses.replace(TASK, name="chain_logic"))
  assert list(logic.heldout) == ["chain_logic"]
  assert logic.weights == {"chain_logic": 1.0}
  assert logic.tokenizer.vocab_size == 70
  prompts = everything(logic)
  assert len({prompt.text for prompt in prompts}) == 370
  for prompt in prompts:
    assert_right(prompt, LOGIC)
    assert prompt.tokens.shape == (14,)
  lengths, others = (
    [prompt.difficulty for prompt in everything(one)] for one in (logic, task)
  )
  assert lengths != others  # drawn with other random numbers
  answer = logic.train[0].answer
  assert logic.verify(logic.train[0], f"12={answer}", ended=True)
  assert not logic.verify(logic.train[0], f"12={answer}{answer}", ended=True)


@pytest.mark.parametrize("modulus", [3, 6, 10, 15])
def test_logic_needs_a_power_of_two(modulus):
  mixed = TaskConfig(name="mixture", mixture="chain_arithmetic:1,chain_logic:1")
  for config in (TaskConfig(name="chain_logic"), mixed):
    with pytest.raises(
      ValueError, match=rf"task\.modulus .* power of two .* got {modulus};"
    ):
      load(dataclasses.replace(config, modulus=modulus))
  small = TaskConfig(name="chain_logic", modulus=4, train_prompts=30)
  assert len(load(small).train) == 30


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


def test_difficulty_of_a_file_reaches_its_prompts(tmp_path):
  path = tmp_path / "graded.jsonl"
  rows = [
    {"prompt": f"{i}?", "answer": "0", "difficulty": i / 2} for i in range(5)
  ]
  del rows[1]["difficulty"]
  path.write_text("\n".join(map(json.dumps, rows)))
  task = load(
    TaskConfig(name="jsonl", path=str(path), train_prompts=3, heldout_prompts=2)
  )
  assert [p.difficulty for p in task.train] == [0.0, 0.0, 1.0]
  assert [p.difficulty for p in task.heldout["jsonl"]] == [1.5, 2.0]


def test_a_file_of_questions_is_a_held_out_set_by_its_name(tmp_path):
  path = tmp_path / "sums.jsonl"
  rows = [{"problem": f"{n}+{n}", "answer": str(2 * n)} for n in range(5)]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  config = TaskConfig(prompt_column="problem", instruction="=")
  words = PieceTokenizer.train(["0123456789+="], symbols=[])
  task = question_set(config, path, words, max_prompt_tokens=9)
  assert list(task.heldout) == ["sums"]
  assert not task.train
  asked = task.heldout["sums"]
  assert [p.text for p in asked] == [f"{n}+{n}=" for n in range(5)]
  ended = np.ones(2, bool)
  assert task.verify_batch(asked[3:], ["6", "6"], ended).tolist() == [1, 0]
  with pytest.raises(ValueError, match="max_prompt_tokens"):
    question_set(config, path, words, max_prompt_tokens=3)
