"""Where the random numbers of data come from: addressed, never consumed.

A stream is named by (seed, purpose, index); drawing from one moves no other.
"""

import enum

import numpy as np


class Purpose(enum.IntEnum):
  """What a stream of random numbers is for; the numbers never change."""

  PROMPTS = 1
  TEACHER = 2
  SUPERVISED = 3
  ORDER = 4


def stream(seed: int, purpose: Purpose, index: int = 0) -> np.random.Generator:
  """Counter-based random numbers (Philox) at the address of the arguments.

  Args:
    seed: in 0 .. 2⁶⁴-1.
    purpose: what they are for.
    index: which of them, in 0 .. 2⁶⁴-1: a batch number, an epoch.

  Returns:
    A fresh generator; the same address gives the same numbers.

  >>> a, b = (stream(3, Purpose.ORDER, 7).integers(100, size=4) for _ in "ab")
  >>> bool((a == b).all())
  True

  Reference: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as
  1, 2, 3", 2011.
  """
  # The index fills a high word of the 256-bit counter: streams of one key lie
  # 2¹²⁸ blocks apart. int64 arrays would lose seeds above 2⁶³.
  key = np.array([seed, int(purpose)], dtype=np.uint64)
  counter = np.array([0, 0, index, 0], dtype=np.uint64)
  return np.random.Generator(np.random.Philox(key=key, counter=counter))
