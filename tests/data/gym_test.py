"""Questions of reasoning-gym: addressed, different, split, refused."""

import dataclasses

import numpy as np
import pytest

from scalerl_jax.config import SupervisedConfig, TaskConfig
from scalerl_jax.data.gym import gym_seed, make_dataset, read_parameters
from scalerl_jax.data.tasks import load_task
from tests.fixtures.byte_tokenizer import save_byte_tokenizer

TASK = TaskConfig(
  name="reasoning_gym",
  dataset="basic_arithmetic",
  parameters="max_terms=2, max_digits=1, operators=('+', '-')",
  train_prompts=20,
  heldout_prompts=7,
)
TEMPLATE = (
  "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
  "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def load(task=TASK, budget=80, checkpoint=""):
  return load_task(
    task, SupervisedConfig(), max_prompt_tokens=budget, checkpoint=checkpoint
  )


@pytest.fixture
def checkpoint(tmp_path):
  folder = tmp_path / "checkpoint"
  return str(save_byte_tokenizer(folder, template=TEMPLATE))


def texts(prompts):
  return [prompt.text for prompt in prompts]


def test_questions_are_right_different_and_split():
  task = load()
  heldout = task.heldout["reasoning_gym"]
  assert (len(task.train), len(heldout)) == (20, 7)
  assert [p.uid for p in [*heldout, *task.train]] == list(range(27))
  assert len(set(texts([*heldout, *task.train]))) == 27
  for prompt in task.train:
    expression = prompt.text.removeprefix("Calculate ").removesuffix(".")
    assert eval(expression) == int(prompt.answer)
    said = f"{expression} = {prompt.answer}."
    assert task.verify(prompt, said, ended=True)
    assert not task.verify(prompt, said, ended=False)
    assert not task.verify(prompt, expression, ended=True)


def test_questions_are_addressed_by_seed_and_index():
  task, again = load(), load()
  assert task.fingerprint() == again.fingerprint()
  more = load(dataclasses.replace(TASK, train_prompts=25))
  assert texts(more.train)[:20] == texts(task.train)
  other = load(dataclasses.replace(TASK, seed=1))
  # Item i of a dataset has its seed + i: neighbours must not overlap.
  assert len(set(texts(other.train)) & set(texts(task.train))) < 10
  assert abs(gym_seed(TASK) - gym_seed(dataclasses.replace(TASK, seed=1))) > 99


def test_a_checkpoint_is_asked_in_its_own_words(checkpoint):
  plain, asked = load(), load(checkpoint=checkpoint)
  for prompt, bare in zip(asked.train, plain.train, strict=True):
    assert prompt.text == f"<user>{bare.text}<assistant>"
    assert asked.tokenizer.decode(prompt.tokens) == prompt.text
  instructed = dataclasses.replace(TASK, instruction=" Be brief.")
  text = load(instructed, checkpoint=checkpoint).train[0].text
  assert text == f"<user>{plain.train[0].text} Be brief.<assistant>"
  batch = asked.supervised_batch(0)
  row = batch.tokens[0][: batch.lengths[0]]
  text, _, answer = asked.tokenizer.decode(row).partition("<assistant>")
  assert eval(text.removeprefix("<user>Calculate ")[:-1]) == int(answer)
  assert row[-1] == asked.tokenizer.eos_ids[0]


def test_long_questions_are_refused_or_replaced(checkpoint):
  lengths = [len(p.tokens) for p in load(checkpoint=checkpoint).train]
  budget = sorted(lengths)[len(lengths) // 2]
  with pytest.raises(ValueError, match=rf"max_prompt_tokens \({budget}\)"):
    load(budget=budget, checkpoint=checkpoint)
  dropping = dataclasses.replace(TASK, long_prompts="drop")
  task = load(dropping, budget=budget, checkpoint=checkpoint)
  assert (len(task.train), len(task.heldout["reasoning_gym"])) == (20, 7)
  assert max(len(p.tokens) for p in task.train) <= budget
  assert task.dropped > 0
  assert load(checkpoint=checkpoint).dropped == 0
  with pytest.raises(ValueError, match=r"27 and 0 questions among"):
    load(dropping, budget=3, checkpoint=checkpoint)


def test_too_many_questions_are_one_sentence():
  few = "max_terms=2, max_digits=1, operators='+', allow_parentheses=False"
  task = dataclasses.replace(TASK, parameters=few, train_prompts=150)
  with pytest.raises(ValueError, match=r"got 157 and \d+ questions among"):
    load(task)


@pytest.mark.parametrize(
  ("text", "values"),
  [
    ("", {}),
    ("a=1", {"a": 1}),
    ("a=-1.5, b='x,y', c=[1, 2]", {"a": -1.5, "b": "x,y", "c": [1, 2]}),
    ("a=True, b=None", {"a": True, "b": None}),
  ],
)
def test_parameters_are_read(text, values):
  assert read_parameters(text) == values


@pytest.mark.parametrize(
  "text", ["a", "a=", "1", "**{}", "a=open('x')", "a=1)(b=2", "a=b"]
)
def test_parameters_that_are_none_are_one_sentence(text):
  with pytest.raises(ValueError, match=r"task\.parameters must be values"):
    read_parameters(text)


@pytest.mark.parametrize(
  ("name", "parameters", "message"),
  [
    ("nothing", {}, r"task\.dataset must be one of .* got 'nothing'; they are"),
    ("gcd", {"size": 3}, r"name parameters of gcd, got 'size'; they are"),
    ("gcd", {"nothing": 3}, r"got 'nothing'; they are .*min_numbers"),
    ("gcd", {"min_numbers": -1}, r"values that reasoning-gym's gcd takes"),
    ("gcd", {"min_numbers": "a"}, r"values that reasoning-gym's gcd takes"),
  ],
)
def test_a_bad_dataset_is_one_sentence(name, parameters, message):
  with pytest.raises(ValueError, match=message):
    make_dataset(name, parameters, seed=0, size=10)


def test_a_dataset_with_a_scorer_of_its_own_asks_it_elsewhere():
  task = load(
    TaskConfig(
      name="reasoning_gym",
      dataset="countdown",
      parameters="min_numbers=2, max_numbers=2, min_value=1, max_value=9,"
      " min_target=2, max_target=18, operators=['+']",
      train_prompts=4,
      heldout_prompts=2,
      verifier_workers=1,
      verifier_seconds=20.0,
    ),
    budget=2000,
  )
  # Each is scored as the item that it is, whose numbers are its own.
  prompts = [*task.train, *task.heldout["reasoning_gym"]]
  turned = [
    "+".join(p.answer.replace(" ", "").split("+")[::-1]) for p in prompts
  ]
  others = [*turned[1:], turned[0]]
  assert task.verify_batch(prompts, turned, np.ones(6, bool)).all()
  wrong = task.verify_batch(prompts, others, np.ones(6, bool))
  same = [a == b for a, b in zip(turned, others, strict=True)]
  assert not wrong[~np.array(same)].any()
  assert task.timeouts == 0
