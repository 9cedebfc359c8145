"""Chain arithmetic against values worked by hand and plain Python."""

import numpy as np
import pytest

from scalerl_jax.config import TaskConfig
from scalerl_jax.data import chain

# Worked by hand, modulo 16 unless said: (prompt, modulus, running values).
WORKED = [
  ("7+3*5-2.........:", 16, [10, 2, 0]),  # 10; 50 = 48 + 2; 0
  ("0-1*f+f-8:", 16, [15, 1, 0, 8]),  # -1; 225 = 224 + 1; 16; -8
  ("c*c...:", 16, [0]),  # 144 = 9 · 16
  ("9-9-1*3+4:", 10, [0, 9, 7, 1]),  # 0; -1; 27; 11
  ("1+1*0-1..:", 2, [0, 0, 1]),
]
CONFIG = TaskConfig(modulus=11, min_operations=2, max_operations=5)


def evaluate_in_python(text, modulus):
  """Value after each step, by `eval` of one step's characters at a time."""
  body = text[1:-1].rstrip(".")
  value, values = int(text[0], 16), []
  for i in range(0, len(body), 2):
    operand = int(body[i + 1], 16)
    value = eval(f"({value}) {body[i]} {operand}") % modulus
    values.append(value)
  return values


@pytest.mark.parametrize(("text", "modulus", "values"), WORKED)
def test_running_values_are_those_worked_by_hand(text, modulus, values):
  assert evaluate_in_python(text, modulus) == values
  chains = chain.parse(text, modulus)
  held = values + [values[-1]] * (chains.operators.shape[1] - len(values))
  assert chain.running_values(chains, modulus).tolist() == [held]


def test_running_values_equal_python_on_random_chains():
  chains = chain.draw_chains(np.random.default_rng(0), 300, CONFIG)
  texts = chain.prompt_texts(chains, CONFIG.modulus)
  found = chain.running_values(chains, CONFIG.modulus).tolist()
  for text, values, length in zip(texts, found, chains.lengths, strict=True):
    expected = evaluate_in_python(text, CONFIG.modulus)
    assert len(expected) == length
    assert values[:length] == expected


def test_text_and_chain_are_one_to_one():
  chains = chain.draw_chains(np.random.default_rng(1), 200, CONFIG)
  texts = chain.prompt_texts(chains, CONFIG.modulus)
  for row, text in enumerate(texts):
    parsed = chain.parse(text, CONFIG.modulus)
    count = chains.lengths[row]
    assert parsed.start[0] == chains.start[row]
    assert parsed.lengths[0] == count
    for field in ("operators", "operands"):
      one, other = getattr(parsed, field), getattr(chains, field)
      assert one.shape == (1, 5)
      np.testing.assert_array_equal(one[0, :count], other[row, :count])


def test_keys_are_equal_where_texts_are():
  config = TaskConfig(modulus=2, min_operations=1, max_operations=2)
  chains = chain.draw_chains(np.random.default_rng(2), 5000, config)
  texts = chain.prompt_texts(chains, 2)
  keys = chain.chain_keys(chains, 2)
  assert len(set(texts)) == len(set(keys)) == chain.count_chains(config) == 84
  assert len(set(zip(texts, keys, strict=True))) == 84


def test_draws_cover_all_choices_evenly():
  chains = chain.draw_chains(np.random.default_rng(3), 20_000, CONFIG)
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
    chain.parse(text, 16)


def test_digits_beyond_the_modulus_are_refused():
  with pytest.raises(ValueError, match="all digits below 10"):
    chain.parse("7+a:", 10)
