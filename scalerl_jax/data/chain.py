"""Chain arithmetic: a start value and operations + - * modulo m, as text.

A prompt is a start digit, one packed symbol an operation (`+3`), blanks up to
`max_operations` slots, and a colon: always `max_operations + 2` tokens. The
right completion is one running value a step, `=`, the last value. So step k
stands at a constant offset from its operand; without that a tiny model that is
trained on such texts stays at chance.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from scalerl_jax.config import TaskConfig
from scalerl_jax.rewards.verifiers import MARKER

DIGITS = "0123456789abcdef"
OPERATORS = "+-*"
BLANK = "."
COLON = ":"
MARKS = (MARKER, BLANK, COLON)


class Chains(NamedTuple):
  """N chains of at most K operations, a row each."""

  start: Int[np.ndarray, " N"]  # in 0..m-1
  operators: Int[np.ndarray, "N K"]  # index into OPERATORS
  operands: Int[np.ndarray, "N K"]  # in 0..m-1
  lengths: Int[np.ndarray, " N"]  # operations that count; blanks follow


def symbols(modulus: int) -> list[str]:
  """The packed symbols, operator by operator, in the order of slot codes.

  >>> symbols(2)
  ['+0', '+1', '-0', '-1', '*0', '*1']
  """
  return [f"{o}{d}" for o in OPERATORS for d in DIGITS[:modulus]]


def operation_table(modulus: int) -> Int[np.ndarray, "3 m m"]:
  """Right results: `table[operator, a, b]` is (a operator b) mod m."""
  a = np.arange(modulus)[:, None]
  b = np.arange(modulus)[None, :]
  return np.stack([a + b, a - b, a * b]) % modulus


def count_chains(config: TaskConfig) -> int:
  """How many different prompts there are: Σ_L m·(3m)^L."""
  return sum(
    config.modulus * (len(OPERATORS) * config.modulus) ** length
    for length in range(config.min_operations, config.max_operations + 1)
  )


def draw_chains(
  rng: np.random.Generator, count: int, config: TaskConfig
) -> Chains:
  """`count` chains, all choices uniform and independent, lengths too."""
  slots = (count, config.max_operations)
  return Chains(
    start=rng.integers(config.modulus, size=count),
    operators=rng.integers(len(OPERATORS), size=slots),
    operands=rng.integers(config.modulus, size=slots),
    lengths=rng.integers(
      config.min_operations, config.max_operations + 1, size=count
    ),
  )


def slot_codes(chains: Chains, modulus: int) -> Int[np.ndarray, "N K"]:
  """What stands in each slot: 0 a blank, else 1 + its index in `symbols`."""
  slots = np.arange(chains.operators.shape[1])
  codes = 1 + chains.operators * modulus + chains.operands
  return np.where(slots < chains.lengths[:, None], codes, 0)


def chain_keys(chains: Chains, modulus: int) -> list[bytes]:
  """One value a chain that is equal where, and only where, texts are equal."""
  codes = slot_codes(chains, modulus)
  rows = np.concatenate([chains.start[:, None], codes], 1).astype(np.uint8)
  return [row.tobytes() for row in rows]


def prompt_texts(chains: Chains, modulus: int) -> list[str]:
  """The prompts: start digit, slots, colon."""
  pieces = np.array([BLANK, *symbols(modulus)], object)
  rows = pieces[slot_codes(chains, modulus)].tolist()
  return [
    DIGITS[start] + "".join(row) + COLON
    for start, row in zip(chains.start.tolist(), rows, strict=True)
  ]


def running_values(chains: Chains, modulus: int) -> Int[np.ndarray, "N K"]:
  """The right value after each step; the last one is held over blanks.

  >>> running_values(parse("7+3*5-2.:", 16), 16).tolist()  # 10, 50, 0
  [[10, 2, 0, 0]]
  """
  table = operation_table(modulus)
  return walk(chains, lambda *entry: table[entry])


def walk(
  chains: Chains, step: Callable[..., np.ndarray]
) -> Int[np.ndarray, "N K"]:
  """The values after each step; the last one is held over blanks.

  Args:
    chains: what is computed.
    step: (operators, values, operands), each `[N]`, to the next values `[N]`.
  """
  value = chains.start
  values = []
  for k in range(chains.operators.shape[1]):
    result = step(chains.operators[:, k], value, chains.operands[:, k])
    value = np.where(k < chains.lengths, result, value)
    values.append(value)
  return np.stack(values, 1)


def parse(text: str, modulus: int) -> Chains:
  """The one chain that `text` is the prompt of.

  Raises:
    ValueError: `text` is no such prompt.
  """
  body = text[1:-1].rstrip(BLANK)
  pairs = [body[i : i + 2] for i in range(0, len(body), 2)]
  packed = symbols(modulus)
  if (
    text[:1] not in tuple(DIGITS[:modulus])
    or text[-1:] != COLON
    or not set(pairs) <= set(packed)
  ):
    raise ValueError(
      "a chain's prompt must be a start digit, packed symbols like '+3',"
      f" blanks {BLANK!r} and {COLON!r}, all digits below {modulus}, got"
      f" {text!r}"
    )
  codes = [packed.index(pair) for pair in pairs]
  blanks = len(text) - 2 - len(body)
  operators, operands = np.divmod(
    np.array([codes + [0] * blanks], int).reshape(1, -1), modulus
  )
  return Chains(
    start=np.array([DIGITS.index(text[0])]),
    operators=operators,
    operands=operands,
    lengths=np.array([len(codes)]),
  )
