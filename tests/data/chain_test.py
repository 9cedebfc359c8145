"""Chains against values worked by hand and plain Python."""

import dataclasses

import numpy as np
import pytest

from scalerl_jax.config import TaskConfig
from scalerl_jax.data import chain
from scalerl_jax.data.chain import ARITHMETIC, LOGIC

BOTH = pytest.mark.parametrize(
  "operations", [ARITHMETIC, LOGIC], ids=["arithmetic", "logic"]
)
# Worked by hand: (prompt, operations, modulus, running values).
WORKED = [
  ("7+3*5-2.........:", ARITHMETIC, 16, [10, 2, 0]),  # 10; 50 = 48 + 2; 0
  ("0-1*f+f-8:", ARITHMETIC, 16, [15, 1, 0, 8]),  # -1; 225 = 224 + 1; 16; -8
  ("c*c...:", ARITHMETIC, 16, [0]),  # 144 = 9 · 16
  ("9-9-1*3+4:", ARITHMETIC, 10, [0, 9, 7, 1]),  # 0; -1; 27; 11
  ("1+1*0-1..:", ARITHMETIC, 2, [0, 0, 1]),
  ("c&a|3^6.........:", LOGIC, 16, [8, 11, 13]),  # 1000; 1011; 1101
  ("5^f&3|4^0:", LOGIC, 16, [10, 2, 6, 6]),  # 1010; 0010; 0110; 0110
  ("6|1&5...:", LOGIC, 8, [7, 5]),  # 111; 101
  ("1&0|1^1..:", LOGIC, 2, [0, 1, 0]),
]
CONFIG = TaskConfig(modulus=11, min_operations=2, max_operations=5)


LOGIC_CONFIG = dataclasses.replace(CONFIG, name="chain_logic", modulus=8)


def config_of(operations):
  return {ARITHMETIC: CONFIG, LOGIC: LOGIC_CONFIG}[operations]


def evaluate_in_python(text, modulus):
  """Value after each step, by `eval` of one step's characters at a time."""
  body = text[1:-1].rstrip(".")
  value, values = int(text[0], 16), []
  for i in range(0, len(body), 2):
    operand = int(body[i + 1], 16)
    value = eval(f"({value}) {body[i]} {operand}") % modulus
    values.append(value)
  return values


@pytest.mark.parametrize(("text", "operations", "modulus", "values"), WORKED)
def test_running_values_are_those_worked_by_hand(
  text, operations, modulus, values
):
  assert evaluate_in_python(text, modulus) == values
  chains = chain.parse(text, operations, modulus)
  held = values + [values[-1]] * (chains.operators.shape[1] - len(values))
  found = chain.running_values(chains, operations, modulus)
  assert found.tolist() == [held]


@BOTH
def test_running_values_equal_python_on_random_chains(operations):
  config = config_of(operations)
  rng = np.random.default_rng(0)
  chains = chain.draw_chains(rng, 300, operations, config)
  texts = chain.prompt_texts(chains, operations, config.modulus)
  found = chain.running_values(chains, operations, config.modulus).tolist()
  for text, values, length in zip(texts, found, chains.lengths, strict=True):
    expected = evaluate_in_python(text, config.modulus)
    assert len(expected) == length
    assert values[:length] == expected


@BOTH
def test_text_and_chain_are_one_to_one(operations):
  config = config_of(operations)
  rng = np.random.default_rng(1)
  chains = chain.draw_chains(rng, 200, operations, config)
  texts = chain.prompt_texts(chains, operations, config.modulus)
  for row, text in enumerate(texts):
    parsed = chain.parse(text, operations, config.modulus)
    count = chains.lengths[row]
    assert parsed.start[0] == chains.start[row]
    assert parsed.lengths[0] == count
    for field in ("operators", "operands"):
      one, other = getattr(parsed, field), getattr(chains, field)
      assert one.shape == (1, 5)
      np.testing.assert_array_equal(one[0, :count], other[row, :count])


@BOTH
def test_keys_are_equal_where_texts_are(operations):
  config = TaskConfig(modulus=2, min_operations=1, max_operations=2)
  rng = np.random.default_rng(2)
  chains = chain.draw_chains(rng, 5000, operations, config)
  texts = chain.prompt_texts(chains, operations, 2)
  keys = chain.chain_keys(chains, 2)
  assert len(set(texts)) == len(set(keys)) == 84
  assert chain.count_chains(operations, config) == 84
  assert len(set(zip(texts, keys, strict=True))) == 84


def test_draws_cover_all_choices_evenly():
  rng = np.random.default_rng(3)
  chains = chain.draw_chains(rng, 20_000, ARITHMETIC, CONFIG)
  for values, low, high in (
    (chains.start, 0, 11),
    (chains.operands, 0, 11),
    (chains.operators, 0, 3),
    (chains.lengths, 2, 6),
  ):
    counts = np.bincount(values.ravel(), minlength=high)
    assert counts[:low].sum() == 0
    assert len(counts) == high
    expected = values.size / (high - low)
    # Six standard deviations of a count.
    assert np.abs(counts[low:] - expected).max() < 6 * np.sqrt(expected)


@pytest.mark.parametrize(
  "text",
  ["", ":", "7+3", "7+3.", "7+:", "g+3:", "7/3:", "7+3.+4:", "7+g:", "+3:"],
)
def test_other_texts_are_refused(text):
  with pytest.raises(ValueError, match="a chain's prompt must be"):
    chain.parse(text, ARITHMETIC, 16)


def test_digits_beyond_the_modulus_are_refused():
  with pytest.raises(ValueError, match="all digits below 10"):
    chain.parse("7+a:", ARITHMETIC, 10)


@BOTH
def test_a_chain_of_other_operations_is_refused(operations):
  text = {ARITHMETIC: "7&3:", LOGIC: "7+3:"}[operations]
  with pytest.raises(ValueError, match="a chain's prompt must be"):
    chain.parse(text, operations, 16)


def test_tasks_share_no_symbol():
  assert not set(ARITHMETIC.symbols) & set(LOGIC.symbols)
  assert ARITHMETIC.number != LOGIC.number
