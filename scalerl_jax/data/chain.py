"""Chains: a start value and operations modulo m, as text.

A prompt is a start digit, one packed symbol an operation (`+3`), blanks up to
`max_operations` slots, and a colon: always `max_operations + 2` tokens. The
right completion is one running value a step, `=`, the last value. So step k
stands at a constant offset from its operand; without that a tiny model that is
trained on such texts stays at chance. Which operations: `ARITHMETIC`, `LOGIC`.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from scalerl_jax.config import TaskConfig
from scalerl_jax.rewards.verifiers import MARKER

DIGITS = "0123456789abcdef"
BLANK = "."
COLON = ":"
MARKS = (MARKER, BLANK, COLON)


@dataclasses.dataclass(frozen=True)
class Operations:
  """What a step of a chain may do; a set of operations makes a task."""

  name: str  # of the task
  symbols: str  # a character an operation
  # (a, b), which broadcast, to the results in that order, not yet modulo m
  apply: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, ...]]
  number: int  # addresses the random numbers of its prompts and its teacher
  bitwise: bool = False  # then m must be a power of two

  @property
  def count(self) -> int:
    """O, how many operations there are."""
    return len(self.symbols)


ARITHMETIC = Operations(
  "chain_arithmetic", "+-*", lambda a, b: (a + b, a - b, a * b), number=0
)
LOGIC = Operations(
  "chain_logic",
  "&|^",
  lambda a, b: (a & b, a | b, a ^ b),
  number=1,
  bitwise=True,
)
OPERATIONS = {operations.name: operations for operations in (ARITHMETIC, LOGIC)}


class Chains(NamedTuple):
  """N chains of at most K operations, a row each."""

  start: Int[np.ndarray, " N"]  # in 0..m-1
  operators: Int[np.ndarray, "N K"]  # index into Operations.symbols
  operands: Int[np.ndarray, "N K"]  # in 0..m-1
  lengths: Int[np.ndarray, " N"]  # operations that count; blanks follow


def symbols(operations: Operations, modulus: int) -> list[str]:
  """The packed symbols, operator by operator, in the order of slot codes.

  >>> symbols(ARITHMETIC, 2)
  ['+0', '+1', '-0', '-1', '*0', '*1']
  """
  return [f"{o}{d}" for o in operations.symbols for d in DIGITS[:modulus]]


def operation_table(
  operations: Operations, modulus: int
) -> Int[np.ndarray, "O m m"]:
  """Right results: `table[operator, a, b]` is (a operator b) mod m.

  >>> operation_table(LOGIC, 2).tolist()
  [[[0, 0], [0, 1]], [[0, 1], [1, 1]], [[0, 1], [1, 0]]]
  """
  a = np.arange(modulus)[:, None]
  b = np.arange(modulus)[None, :]
  return np.stack(operations.apply(a, b)) % modulus


def count_chains(operations: Operations, config: TaskConfig) -> int:
  """How many different prompts there are: Σ_L m·(O·m)^L."""
  return sum(
    config.modulus * (operations.count * config.modulus) ** length
    for length in range(config.min_operations, config.max_operations + 1)
  )


def draw_chains(
  rng: np.random.Generator,
  count: int,
  operations: Operations,
  config: TaskConfig,
) -> Chains:
  """`count` chains, all choices uniform and independent, lengths too."""
  slots = (count, config.max_operations)
  return Chains(
    start=rng.integers(config.modulus, size=count),
    operators=rng.integers(operations.count, size=slots),
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
  """One value a chain that is equal where, and only where, texts are equal.

  That is among chains of the same operations.
  """
  codes = slot_codes(chains, modulus)
  rows = np.concatenate([chains.start[:, None], codes], 1).astype(np.uint8)
  return [row.tobytes() for row in rows]


def prompt_texts(
  chains: Chains, operations: Operations, modulus: int
) -> list[str]:
  """The prompts: start digit, slots, colon."""
  pieces = np.array([BLANK, *symbols(operations, modulus)], object)
  rows = pieces[slot_codes(chains, modulus)].tolist()
  return [
    DIGITS[start] + "".join(row) + COLON
    for start, row in zip(chains.start.tolist(), rows, strict=True)
  ]


def running_values(
  chains: Chains, operations: Operations, modulus: int
) -> Int[np.ndarray, "N K"]:
  """The right value after each step; the last one is held over blanks.

  >>> chains = parse("7+3*5-2.:", ARITHMETIC, 16)
  >>> running_values(chains, ARITHMETIC, 16).tolist()  # 10, 50, 0
  [[10, 2, 0, 0]]
  """
  table = operation_table(operations, modulus)
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


def parse(text: str, operations: Operations, modulus: int) -> Chains:
  """The one chain that `text` is the prompt of.

  Raises:
    ValueError: `text` is no such prompt.
  """
  body = text[1:-1].rstrip(BLANK)
  pairs = [body[i : i + 2] for i in range(0, len(body), 2)]
  packed = symbols(operations, modulus)
  if (
    text[:1] not in tuple(DIGITS[:modulus])
    or text[-1:] != COLON
    or not set(pairs) <= set(packed)
  ):
    raise ValueError(
      "a chain's prompt must be a start digit, packed symbols like"
      f" {packed[-1]!r}, blanks {BLANK!r} and {COLON!r}, all digits below"
      f" {modulus}, got {text!r}"
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
