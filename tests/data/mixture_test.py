"""Mixtures: the prompts of every part, uids apart, texts by weight."""

import collections
import dataclasses
import itertools
import json

import numpy as np
import pytest

from scalerl_jax import config as config_lib
from scalerl_jax.config import SupervisedConfig, TaskConfig
from scalerl_jax.data import chain
from scalerl_jax.data.chain import ARITHMETIC, LOGIC
from scalerl_jax.data.mixture import MixedTexts, mix_rows
from scalerl_jax.data.prompts import pad_texts
from scalerl_jax.data.tasks import load_task

MIXTURE = TaskConfig(
  name="mixture",
  mixture="chain_arithmetic:3,chain_logic:1",
  train_prompts=50,
  heldout_prompts=20,
)
SUPERVISED = SupervisedConfig()


def load(task, supervised=SUPERVISED):
  return load_task(task, supervised, max_prompt_tokens=14)


def load_alone(name):
  return load(dataclasses.replace(MIXTURE, name=name, mixture=""))


@pytest.fixture(scope="module")
def mixture():
  return load(MIXTURE)


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
    name="mixture",
    mixture="chain_logic:1,jsonl:2",
    path=str(path),
    train_prompts=20,
    heldout_prompts=8,
  )


def everything(task):
  return [*task.train, *itertools.chain(*task.heldout.values())]


def test_a_mixture_has_the_prompts_of_its_parts(mixture):
  assert mixture.name == "mixture"
  assert mixture.weights == {"chain_arithmetic": 0.75, "chain_logic": 0.25}
  assert list(mixture.heldout) == ["chain_arithmetic", "chain_logic"]
  assert [prompt.task for prompt in mixture.train] == (
    ["chain_arithmetic"] * 50 + ["chain_logic"] * 50
  )
  prompts = everything(mixture)
  assert len({prompt.uid for prompt in prompts}) == 140
  assert all(0 <= prompt.uid < 2**31 for prompt in prompts)
  for name in chain.OPERATIONS:
    alone = load_alone(name)
    train = [prompt for prompt in mixture.train if prompt.task == name]
    for found, expected in (
      (train, alone.train),
      (mixture.heldout[name], alone.heldout[name]),
    ):
      assert len(found) == len(expected)
      for one, other in zip(found, expected, strict=True):
        assert one.task == other.task == name
        for field in ("text", "answer", "difficulty"):
          assert getattr(one, field) == getattr(other, field)
        assert mixture.tokenizer.decode(one.tokens) == one.text
        assert one.tokens.shape == (14,)


def test_the_order_of_parts_decides_ids_and_weights_do_not(mixture):
  turned, heavier = (
    load(dataclasses.replace(MIXTURE, mixture=text))
    for text in (
      "chain_logic:1,chain_arithmetic:3",
      "chain_arithmetic:1,chain_logic:5",
    )
  )
  assert list(turned.heldout) == ["chain_logic", "chain_arithmetic"]
  assert turned.tokenizer.pieces != mixture.tokenizer.pieces
  assert set(turned.tokenizer.pieces) == set(mixture.tokenizer.pieces)
  assert turned.train[0].task == "chain_logic"
  assert heavier.tokenizer.pieces == mixture.tokenizer.pieces
  assert heavier.fingerprint() == mixture.fingerprint()
  assert [p.uid for p in heavier.train] == [p.uid for p in mixture.train]
  for task, first in ((mixture, ARITHMETIC), (turned, LOGIC)):
    alone = load_alone(first.name)
    assert [p.uid for p in task.train[:50]] == [p.uid for p in alone.train]
    symbols = chain.symbols(first, 16)
    ids = [task.tokenizer.encode(text).item() for text in symbols]
    assert ids == [alone.tokenizer.encode(text).item() for text in symbols]


def test_mixtures_with_other_weights_do_not_share_a_base():
  heavier = dataclasses.replace(
    MIXTURE, mixture="chain_arithmetic:1,chain_logic:5"
  )
  one, other = (config_lib.fingerprint(c) for c in (MIXTURE, heavier))
  assert one != other  # a part of the key of cached base policies


def test_uids_of_a_mixture_stay_when_training_grows(mixture):
  larger = load(dataclasses.replace(MIXTURE, train_prompts=90))
  uids = {prompt.text: prompt.uid for prompt in everything(larger)}
  for prompt in everything(mixture):
    assert uids[prompt.text] == prompt.uid


def part_of(text):
  found = [
    name
    for name, operations in chain.OPERATIONS.items()
    if set(text) & set(operations.symbols)
  ]
  (name,) = found
  return name


def test_a_mixed_batch_has_rows_of_each_part_by_weight(mixture):
  counts = collections.Counter()
  for index in range(40):
    batch = mixture.supervised_batch(index)
    assert batch.tokens.shape == (96, 29)
    for tokens, mask, length in zip(*batch, strict=True):
      prompt = mixture.tokenizer.decode(tokens[:14])
      name = part_of(prompt)
      counts[name] += 1
      chain.parse(prompt, chain.OPERATIONS[name], 16)
      assert mask[14:length].all()
      assert mask.sum() == length - 14
      assert tokens[length - 1] == mixture.tokenizer.eos_ids[0]
  rows = 40 * 96
  # Five standard deviations of a share of 3/4.
  spread = 5 * (0.75 * 0.25 / rows) ** 0.5
  assert abs(counts["chain_arithmetic"] / rows - 0.75) < spread


def test_mixed_rows_are_those_of_the_part_alone(mixture):
  alone = load_alone("chain_arithmetic")
  rows = 0
  for index in (0, 3):
    mixed, own = (t.supervised_batch(index) for t in (mixture, alone))
    for row in range(96):
      text = mixture.tokenizer.decode(mixed.tokens[row])
      if part_of(text) == "chain_arithmetic":
        rows += 1
        assert text == alone.tokenizer.decode(own.tokens[row])
        np.testing.assert_array_equal(mixed.mask[row], own.mask[row])
  assert rows > 100


def test_mixed_batches_are_addressed_and_hang_on_the_seed(mixture):
  first = [mixture.supervised_batch(index) for index in range(2)]
  again = next(mixture.supervised(start=1))
  for one, other in zip(first[1], again, strict=True):
    np.testing.assert_array_equal(one, other)
  other = load(MIXTURE, dataclasses.replace(SUPERVISED, seed=1))
  for batch in (first[1], other.supervised_batch(0)):
    names = [
      [part_of(mixture.tokenizer.decode(row)) for row in b.tokens]
      for b in (first[0], batch)
    ]
    assert names[0] != names[1]  # which part a row is of


def test_no_heldout_chain_of_a_mixture_is_imitated():
  # 20 of each part's 84 chains are held out: a plain draw would meet them.
  small = dataclasses.replace(
    MIXTURE, modulus=2, min_operations=1, max_operations=2, train_prompts=20
  )
  task = load(small, dataclasses.replace(SUPERVISED, batch_size=300))
  heldout = {p.text for found in task.heldout.values() for p in found}
  seen = {
    task.tokenizer.decode(row[:4])
    for index in range(15)
    for row in task.supervised_batch(index).tokens
  }
  assert len(heldout) == 40
  assert not seen & heldout
  assert len(seen) == 2 * (84 - 20)


def test_a_file_may_be_part_of_a_mixture(questions):
  task = load(questions, dataclasses.replace(SUPERVISED, batch_size=200))
  assert list(task.heldout) == ["chain_logic", "jsonl"]
  assert len(task.train) == 2 * 20
  for prompt in everything(task):
    assert task.tokenizer.decode(prompt.tokens) == prompt.text
  batch = task.supervised_batch(0)
  assert batch.tokens.shape == (200, 29)
  pairs = {(p.text, p.answer) for p in task.train if p.task == "jsonl"}
  seen = set()
  for tokens, mask, length in zip(*batch, strict=True):
    prompt = task.tokenizer.decode(tokens[:length][~mask[:length]])
    assert not mask[length:].any()
    assert mask[length - 1]
    if "?" in prompt:
      seen.add((prompt, task.tokenizer.decode(tokens[mask])))
    else:
      chain.parse(prompt, LOGIC, 16)
  assert seen == pairs


def test_each_prompt_of_a_mixture_has_the_verifier_of_its_part(questions):
  task = load(questions)
  logic = task.heldout["chain_logic"][0]
  question = task.heldout["jsonl"][0]
  # Spaces and a missing marker pass in a file's tasks only.
  texts = [f"{p.answer} " for p in (logic, question)]
  ended = np.array([True, True])
  correct = task.verify_batch([logic, question], texts, ended)
  assert correct.tolist() == [False, True]
  assert task.verify(logic, f"={logic.answer}", ended=True)
  assert not task.verify(question, f"={logic.answer}+", ended=True)


def test_more_prompts_than_uids_of_a_part_are_refused_at_once():
  # No chain is drawn, no file is looked for.
  many = TaskConfig(
    name="mixture",
    mixture="jsonl:1,chain_logic:1",
    path="none.jsonl",
    train_prompts=2**24 - 19,
    heldout_prompts=20,
  )
  with pytest.raises(
    ValueError, match=r"at most 16777216 .* got 16777217; lower"
  ):
    load(many)


def test_parts_share_no_random_numbers():
  asked = []

  def part(number):
    def batch(index):
      asked.append((number, index))
      row = [np.zeros(1, np.int32)] * 5
      return pad_texts(row, row, width=2, pad_id=0)

    return batch

  supervised = SupervisedConfig(batch_size=5)
  texts = MixedTexts(
    [part(0), part(1), part(2)], [0.2, 0.3, 0.5], supervised, pad_id=0
  )
  for index in (0, 1, 2**32 - 1):
    texts.batch(index)
  assert [index for number, index in asked if number == 0] == [0, 1, 2**32 - 1]
  assert len({index for _, index in asked}) == len(asked) == 9


def test_a_part_that_another_one_holds_out_is_refused(tmp_path, mixture):
  leaked = mixture.train[0]  # of chain_arithmetic
  path = tmp_path / "leak.jsonl"
  rows = [{"prompt": f"{i}?", "answer": "0"} for i in range(50)]
  rows += [{"prompt": leaked.text, "answer": leaked.answer}]
  rows += [{"prompt": f"{i}?", "answer": "0"} for i in range(50, 69)]
  path.write_text("\n".join(map(json.dumps, rows)))
  config = dataclasses.replace(
    MIXTURE, mixture="chain_arithmetic:1,jsonl:1", path=str(path)
  )
  with pytest.raises(ValueError, match="must not be trained on"):
    load(config)


def test_mixed_rows_are_those_of_the_chosen_batches():
  def batch(first, width):
    rows = [np.full(r + 1, first + r, np.int32) for r in range(3)]
    ends = [np.array([first, 1], np.int32)] * 3
    return pad_texts(rows, ends, width=width, pad_id=0)

  batches = [batch(10, 5), batch(20, 7), batch(30, 6)]
  mixed = mix_rows(batches, np.array([1, 2, 0]), pad_id=0)
  assert mixed.tokens.tolist() == [
    [20, 20, 1, 0, 0, 0, 0],
    [31, 31, 30, 1, 0, 0, 0],
    [12, 12, 12, 10, 1, 0, 0],
  ]
  assert mixed.mask.astype(int).tolist() == [
    [0, 1, 1, 0, 0, 0, 0],
    [0, 0, 1, 1, 0, 0, 0],
    [0, 0, 0, 1, 1, 0, 0],
  ]
  assert mixed.lengths.tolist() == [3, 4, 5]
  for one, other in zip(mixed, batches[0], strict=True):
    assert one.dtype == other.dtype
  # As wide as the widest, whichever is chosen.
  narrow = mix_rows(batches, np.array([0, 0, 0]), pad_id=9)
  assert narrow.tokens.shape == (3, 7)
  assert (narrow.tokens[:, 5:] == 9).all()
  assert not narrow.mask[:, 5:].any()
