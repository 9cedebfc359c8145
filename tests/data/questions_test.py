"""Questions with answers: instruction, verifier, what is too long."""

import dataclasses
import json

import numpy as np
import pyarrow.parquet
import pytest

from scalerl_jax.config import (
  Config,
  LengthConfig,
  SupervisedConfig,
  TaskConfig,
)
from scalerl_jax.data.array_records import write_array_records
from scalerl_jax.data.prompts import Line
from scalerl_jax.data.tasks import load_task
from tests.fixtures.byte_tokenizer import save_byte_tokenizer

TEMPLATE = "{% for m in messages %}<q>{{ m.content }}<a>{% endfor %}"


@pytest.fixture
def task(tmp_path):
  path = tmp_path / "questions.jsonl"
  rows = [{"prompt": "x" * n, "answer": str(n)} for n in (1, 9, 2, 3, 8, 4, 5)]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return TaskConfig(
    name="jsonl", path=str(path), train_prompts=3, heldout_prompts=2
  )


@pytest.fixture
def checkpoint(tmp_path):
  return str(save_byte_tokenizer(tmp_path / "checkpoint", template=TEMPLATE))


def load(task, budget=20, checkpoint=""):
  return load_task(
    task, SupervisedConfig(), max_prompt_tokens=budget, checkpoint=checkpoint
  )


def answers(prompts):
  return [prompt.answer for prompt in prompts]


def test_the_instruction_stands_behind_each_question(task, checkpoint):
  instructed = dataclasses.replace(task, instruction=" Why?")
  assert load(instructed).train[0].text == "x Why?"
  assert load(instructed, checkpoint=checkpoint).train[0].text == (
    "<q>x Why?<a>"
  )


def test_dropped_questions_are_counted_and_passed_over(task):
  dropping = dataclasses.replace(task, long_prompts="drop")
  made = load(dropping, budget=5)
  assert answers(made.train) == ["1", "2", "3"]
  assert answers(made.heldout["jsonl"]) == ["4", "5"]
  assert made.dropped == 2
  kept = load(dropping)
  assert answers(kept.train) == ["1", "9", "2"]
  assert kept.dropped == 0


def test_length_is_that_of_what_is_sampled_from(task, checkpoint):
  dropping = dataclasses.replace(task, long_prompts="drop")
  made = load(dropping, budget=11, checkpoint=checkpoint)
  # Six more tokens for the template.
  assert answers(made.train) == ["1", "2", "3"]
  assert {len(p.tokens) for p in made.train} == {7, 8, 9}


@pytest.mark.parametrize(
  ("verifier", "right"), [("own", False), ("exact", False), ("stated", True)]
)
def test_the_verifier_is_a_choice(task, verifier, right):
  made = load(dataclasses.replace(task, verifier=verifier))
  assert made.verify(made.train[0], "1", ended=True)
  assert made.verify(made.train[0], "It is 1.", ended=True) == right


def test_verifiers_see_what_is_behind_the_thinking(task):
  made = load(task)
  prompt = made.train[0]
  assert made.verify(prompt, "<think>2</think>1", ended=True)
  assert not made.verify(prompt, "1</think>2", ended=True)
  assert not made.verify(prompt, "<think>1", ended=True)
  other = load(dataclasses.replace(task, thinking_end="So:"))
  assert other.verify(prompt, "2? So: 1", ended=True)


def test_supervised_texts_end_with_the_answer(task, checkpoint):
  made = load(task, checkpoint=checkpoint)
  batch = made.supervised_batch(3)
  texts = {p.text: p.answer for p in made.train}
  for tokens, mask, length in zip(*batch, strict=True):
    prompt = made.tokenizer.decode(
      tokens[~mask & (np.arange(len(mask)) < length)]
    )
    assert made.tokenizer.decode(tokens[mask]) == texts[prompt]
    assert tokens[length - 1] == made.tokenizer.eos_ids[0]


def test_chains_have_a_vocabulary_of_their_own(checkpoint):
  for mixture in ("", "jsonl:1,chain_logic:1"):
    config = TaskConfig(
      name="mixture" if mixture else "chain_logic",
      mixture=mixture,
      path="nothing" if mixture else "",
    )
    with pytest.raises(ValueError, match=r"must be empty for chain_logic"):
      load(config, checkpoint=checkpoint)


def test_thinking_ends_where_it_is_interrupted(task):
  length = LengthConfig(
    control="interruption", phrase="stop</think>", thinking_end="</think>"
  )
  Config(task=task, length=length)
  Config(length=LengthConfig(control="interruption"))  # chains: another "end"
  with pytest.raises(ValueError, match=r"task\.thinking_end .* got '</think>'"):
    Config(task=task, length=LengthConfig(control="interruption"))


RECORDS = [
  {"problem": f"{n} + {n}?", "solution": f"{n} + {n} = {2 * n}.\n#### {2 * n}"}
  for n in range(6)
]


def _file(kind, folder):
  """The same records as a file of this kind."""
  if kind == "jsonl":
    path = folder / "set.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in RECORDS))
  elif kind == "parquet":
    path = folder / "set.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path)
  else:
    # Of our own builder, whose features have these names.
    lines = [Line(row["problem"], row["solution"]) for row in RECORDS]
    return str(write_array_records(lines, folder)), {}
  columns = {"prompt_column": "problem", "answer_column": "solution"}
  return str(path), columns


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "tfds"])
def test_every_kind_of_file_gives_the_same_task(kind, tmp_path):
  path, columns = _file(kind, tmp_path)
  task = TaskConfig(
    name=kind,
    path=path,
    train_prompts=4,
    heldout_prompts=2,
    verifier="stated",
    **columns,
  )
  made = load(task)
  assert [p.text for p in made.train] == [f"{n} + {n}?" for n in range(4)]
  # The answer alone, not the solution before it.
  assert answers(made.train) == ["0", "2", "4", "6"]
  assert answers(made.heldout[kind]) == ["8", "10"]
  assert made.verify(made.train[3], "So it is 6.", ended=True)
  # Exact text is compared with all that the file has.
  exact = load(dataclasses.replace(task, verifier="exact"))
  assert answers(exact.train) == [row["solution"] for row in RECORDS[:4]]


def test_a_task_may_be_judged_by_workers(task, tmp_path):
  rows = [
    {"prompt": "half?", "answer": r"\frac{1}{2}"},
    {"prompt": "hang?", "answer": "7"},
    {"prompt": "third?", "answer": r"\frac{1}{3}"},
  ]
  path = tmp_path / "math.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  config = TaskConfig(
    name="jsonl",
    path=str(path),
    train_prompts=2,
    heldout_prompts=1,
    verifier="math",
    verifier_workers=1,
    verifier_seconds=1.5,
  )
  made = load(config)
  said = [r"\boxed{0.5}", r"\boxed{9^{9^{9^9}}}", "<think>0.5"]
  half, hang = made.train
  found = made.verify_batch([half, hang, half], said, np.ones(3, bool))
  assert found.tolist() == [True, False, False]
  assert made.timeouts == 1


def test_a_task_may_be_code(tmp_path):
  rows = [
    {"prompt": f"add {n}", "answer": f"assert f(1) == {1 + n}"}
    for n in range(2)
  ]
  path = tmp_path / "code.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  made = load(
    TaskConfig(
      name="jsonl",
      path=str(path),
      train_prompts=1,
      heldout_prompts=1,
      verifier="code",
      verifier_workers=1,
    )
  )
  right = "```python\ndef f(x): return x\n```"
  assert made.verify(made.train[0], right, ended=True)
  assert not made.verify(made.heldout["jsonl"][0], right, ended=True)
