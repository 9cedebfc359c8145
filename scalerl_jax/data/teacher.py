"""The flawed teacher of chains: texts for a base policy with headroom.

The teacher decides how good reinforcement learning can get: what it never
shows right is hardly ever sampled. A heavy-tailed Beta over many independent
table entries gives a smooth curve.
"""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from scalerl_jax.config import SupervisedConfig, TaskConfig
from scalerl_jax.data import chain
from scalerl_jax.data.chain import Chains, Operations
from scalerl_jax.data.prompts import SupervisedBatch
from scalerl_jax.data.streams import Purpose, stream
from scalerl_jax.data.tokenizers import Tokenizer
from scalerl_jax.rewards.verifiers import MARKER


class Written(NamedTuple):
  """What the teacher wrote for N chains."""

  values: Int[np.ndarray, "N K"]  # running values, errors carried on
  steps: Int[np.ndarray, " N"]  # how many of them were written
  answers: Int[np.ndarray, " N"]  # the value after the marker


@dataclasses.dataclass(frozen=True, eq=False)
class FlawedTeacher:
  """Each table entry (operator, a, b) is wrong with a probability of its own.

  An error goes to the entry's favourite wrong value half the time, else
  uniformly to the other wrong ones, and the chain goes on from it.
  """

  table: Int[np.ndarray, "O m m"]  # right results
  error: Float[np.ndarray, "O m m"]  # probability of a wrong one
  favorite: Int[np.ndarray, "O m m"]  # the favourite wrong one
  guess_share: float  # of chains that are answered at once, at random
  stop_early_share: float  # of chains answered with an earlier value

  def step(
    self,
    rng: np.random.Generator,
    operators: Int[np.ndarray, " N"],
    values: Int[np.ndarray, " N"],
    operands: Int[np.ndarray, " N"],
  ) -> Int[np.ndarray, " N"]:
    """One operation on each of N values, with the teacher's errors."""
    entry = operators, values, operands
    right, favorite = self.table[entry], self.favorite[entry]
    modulus = self.table.shape[-1]
    wrong, liked, other = rng.random((3, len(values)))
    # Distances from the right value in 1..m-1; the favourite's is left out.
    far = (favorite - right) % modulus
    distance = 1 + (other * (modulus - 2)).astype(int)
    distance += distance >= far
    # With two values there is one wrong one: everybody's favourite.
    keep = (liked < 0.5) | (modulus == 2)
    mistaken = np.where(keep, favorite, (right + distance) % modulus)
    return np.where(wrong < self.error[entry], mistaken, right)

  def write(self, rng: np.random.Generator, chains: Chains) -> Written:
    """Works through the chains, guesses some, stops early in others.

    A guess is uniform over the values. Who stops early has done at least one
    step and at most all but one; a chain of one step is never cut.
    """
    values = chain.walk(chains, functools.partial(self.step, rng))
    count, modulus = len(values), self.table.shape[-1]
    fate, cut = rng.random((2, count))
    guesses = fate < self.guess_share
    stops = ~guesses & (fate < self.guess_share + self.stop_early_share)
    early = np.maximum(1, 1 + (cut * (chains.lengths - 1)).astype(int))
    steps = np.where(stops, early, chains.lengths)
    answers = values[np.arange(count), steps - 1]
    answers = np.where(guesses, rng.integers(modulus, size=count), answers)
    return Written(values, np.where(guesses, 0, steps), answers)


def make_teacher(
  task: TaskConfig, supervised: SupervisedConfig, operations: Operations
) -> FlawedTeacher:
  """The teacher of this task seed: Beta(α, β) errors, uniform favourites.

  Each set of operations has a table of its own, drawn from the same Beta.
  """
  rng = stream(task.seed, Purpose.TEACHER, operations.number)
  table = chain.operation_table(operations, task.modulus)
  away = rng.integers(1, task.modulus, size=table.shape)
  return FlawedTeacher(
    table=table,
    error=rng.beta(
      supervised.error_alpha, supervised.error_beta, size=table.shape
    ),
    favorite=(table + away) % task.modulus,
    guess_share=supervised.guess_share,
    stop_early_share=supervised.stop_early_share,
  )


class Scribe:
  """Batches of the teacher's texts as tokens, addressed by their number."""

  def __init__(
    self,
    task: TaskConfig,
    supervised: SupervisedConfig,
    operations: Operations,
    tokenizer: Tokenizer,
    forbidden: frozenset[bytes],
  ):
    """Prepares the teacher and the token ids of everything it writes.

    Args:
      task: draws teacher and chains.
      supervised: the teacher's flaws, batch size and seed.
      operations: what is taught.
      tokenizer: has a piece for each symbol and digit of the task.
      forbidden: `chain.chain_keys` of these operations' held-out prompts.
    """
    self._task = task
    self._supervised = supervised
    self._operations = operations
    self._forbidden = forbidden
    self._teacher = make_teacher(task, supervised, operations)
    self._pad = tokenizer.pad_id
    self._end = tokenizer.eos_ids[0]

    def ids(texts: list[str]) -> np.ndarray:
      return np.array([tokenizer.encode(text).item() for text in texts])

    self._digits = ids(list(chain.DIGITS[: task.modulus]))
    packed = chain.symbols(operations, task.modulus)
    self._slots = ids([chain.BLANK, *packed])
    self._colon, self._marker = ids([chain.COLON, MARKER])

  def batch(self, index: int) -> SupervisedBatch:
    """Batch number `index`: T = 2·max_operations + 5 tokens a row."""
    rng = stream(self._supervised.seed, Purpose.SUPERVISED, index)
    chains = self._draw(rng)
    written = self._teacher.write(rng, chains)
    count, slots = chains.operators.shape
    prompt = np.empty((count, slots + 2), np.int32)
    prompt[:, 0] = self._digits[chains.start]
    prompt[:, 1:-1] = self._slots[chain.slot_codes(chains, self._task.modulus)]
    prompt[:, -1] = self._colon
    completion = np.full((count, slots + 3), self._pad, np.int32)
    completion[:, :slots] = self._digits[written.values]
    rows, steps = np.arange(count), written.steps
    completion[rows, steps] = self._marker
    completion[rows, steps + 1] = self._digits[written.answers]
    completion[rows, steps + 2] = self._end
    inside = np.arange(slots + 3) < (steps + 3)[:, None]
    completion = np.where(inside, completion, np.int32(self._pad))
    return SupervisedBatch(
      tokens=np.concatenate([prompt, completion], 1),
      mask=np.concatenate([np.zeros(prompt.shape, bool), inside], 1),
      lengths=(slots + 5 + steps).astype(np.int32),
    )

  def _draw(self, rng: np.random.Generator) -> Chains:
    """Chains none of which is held out: those are drawn again."""
    operations, modulus = self._operations, self._task.modulus
    chains = chain.draw_chains(
      rng, self._supervised.batch_size, operations, self._task
    )
    while True:
      again = np.array(
        [key in self._forbidden for key in chain.chain_keys(chains, modulus)]
      )
      if not again.any():
        return chains
      fresh = chain.draw_chains(rng, int(again.sum()), operations, self._task)
      for field, other in zip(chains, fresh, strict=True):
        field[again] = other
