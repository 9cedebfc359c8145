"""A task as a run sees it: prompts, verdicts, texts for the warm start.

Which tasks there are stands in `tasks.py`.
"""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from scalerl_jax.data import prompts
from scalerl_jax.data.prompts import SupervisedBatch
from scalerl_jax.data.tokenizers import Tokenizer
from scalerl_jax.rewards.judges import Judge
from scalerl_jax.rewards.verifiers import Verifier
from scalerl_jax.types import Prompt, Rollout


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
  """What a run trains on. No held-out prompt is in `train` or `supervised`.

  In a mixture the same holds of each part, `train` has the parts one after
  another, and `heldout` has a set for each, under its name.
  """

  name: str
  train: Sequence[Prompt]
  heldout: dict[str, Sequence[Prompt]]  # by the name of the held-out set
  tokenizer: Tokenizer
  # One, or by `Prompt.task`.
  verifier: Verifier | Judge | Mapping[str, Verifier | Judge]
  supervised_batch: Callable[[int], SupervisedBatch]  # addressed by number
  weights: Mapping[str, float]  # share of the prompts, by `Prompt.task`
  dropped: int = 0  # prompts left out, because they are too long
  max_turns: int = 1

  def __post_init__(self):
    prompts.check_split(self.train, self.heldout)

  def fingerprint(self) -> str:
    """12 hex digits that name all prompts, answers and the vocabulary."""
    digest = hashlib.sha256()
    for prompt in [*self.train, *itertools.chain(*self.heldout.values())]:
      line = json.dumps([prompt.uid, prompt.text, prompt.answer])
      digest.update(line.encode())
    digest.update(json.dumps(self.tokenizer.pieces).encode())
    return digest.hexdigest()[:12]

  def verify(self, prompt: Prompt, completion: str, *, ended: bool) -> bool:
    """Whether `completion` is right; `ended`: the policy drew an end token."""
    return bool(self.verify_batch([prompt], [completion], np.array([ended]))[0])

  def verify_batch(
    self,
    prompts: Sequence[Prompt],
    completions: Sequence[str],
    ended: Bool[np.ndarray, " B"],
  ) -> Bool[np.ndarray, " B"]:
    """`verify` of each row; `prompts` has one entry a completion."""
    rows: dict[str, list[int]] = {}
    for row, prompt in enumerate(prompts):
      several = isinstance(self.verifier, Mapping)
      rows.setdefault(prompt.task if several else "", []).append(row)
    correct = np.zeros(len(prompts), bool)
    for task, members in rows.items():
      correct[members] = _judge(
        self.verifier[task]
        if isinstance(self.verifier, Mapping)
        else self.verifier,
        [prompts[row] for row in members],
        [completions[row] for row in members],
        ended[members],
      )
    return correct

  @property
  def timeouts(self) -> int:
    """Judgements of this sitting that were given up, and so count as wrong."""
    verifiers = (
      self.verifier.values()
      if isinstance(self.verifier, Mapping)
      else [self.verifier]
    )
    return sum(v.timeouts for v in verifiers if isinstance(v, Judge))

  def respond(self, rollout: Rollout) -> Int32[np.ndarray, " T"] | None:
    """What the environment says next, or None when the rollout is done.

    With one turn, a completion that has ended is done.
    """
    del rollout
    return None

  def supervised(self, start: int = 0) -> Iterator[SupervisedBatch]:
    """Endless batches for the warm start, from batch number `start` on."""
    return map(self.supervised_batch, itertools.count(start))


class Part(NamedTuple):
  """A task before its tokenizer is known, which other parts may share."""

  texts: Sequence[str]  # what the tokenizer must cover
  symbols: Sequence[str]  # what becomes one token each
  make: Callable[[Tokenizer], Task]


def _judge(
  verifier: Verifier | Judge,
  prompts: Sequence[Prompt],
  completions: Sequence[str],
  ended: Bool[np.ndarray, " B"],
) -> Bool[np.ndarray, " B"]:
  if isinstance(verifier, Judge):
    return verifier.judge(prompts, completions, ended)
  rows = zip(prompts, completions, ended.tolist(), strict=True)
  return np.array(
    [verifier(prompt.answer, text, ended=end) for prompt, text, end in rows],
    bool,
  )
