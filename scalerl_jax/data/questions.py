"""Questions with their answers as a task: asked as text or as a chat message.

Where the questions come from (a file, a generator) is the caller's.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from scalerl_jax.config import SupervisedConfig, TaskConfig
from scalerl_jax.data import prompts
from scalerl_jax.data.prompts import Line, SupervisedBatch
from scalerl_jax.data.streams import Purpose, stream
from scalerl_jax.data.task import Part, Task
from scalerl_jax.data.tokenizers import Tokenizer
from scalerl_jax.rewards.judges import Judge
from scalerl_jax.rewards.pool import Pool
from scalerl_jax.types import Prompt

Fits = Callable[[Line], bool]
# From what fits the budget to training lines and held-out lines.
Split = Callable[[Fits], tuple[Sequence[Line], Sequence[Line]]]


@dataclasses.dataclass(frozen=True)
class Source:
  """Questions of one origin."""

  name: str  # of the task
  lines: Iterable[Line]  # whose characters a tokenizer of our own must have
  split: Split
  # The judge, given `Line.index` by the text of its prompt.
  judge: Callable[[Mapping[str, int]], Judge]


def question_part(
  source: Source,
  task: TaskConfig,
  supervised: SupervisedConfig,
  *,
  max_prompt_tokens: int,
) -> Part:
  """The task of these questions, before its tokenizer is known.

  Held-out prompts have the first uids. With `task.long_prompts = "drop"`,
  questions that are too long are passed over and counted; with "refuse" they
  are left in, for the caller to refuse.
  """
  texts = [task.instruction]
  for line in source.lines:
    texts += [line.prompt, line.answer]
  return Part(
    texts=texts,
    symbols=[],
    make=functools.partial(
      _question_task, source, task, supervised, max_prompt_tokens
    ),
  )


def _question_task(
  source: Source,
  task: TaskConfig,
  supervised: SupervisedConfig,
  max_prompt_tokens: int,
  tokenizer: Tokenizer,
) -> Task:
  def write(line: Line) -> str:
    return tokenizer.write_prompt(line.prompt + task.instruction)

  dropped: set[str] = set()

  def fits(line: Line) -> bool:
    if task.long_prompts == "refuse":
      return True
    if len(tokenizer.encode(write(line))) <= max_prompt_tokens:
      return True
    dropped.add(line.prompt)
    return False

  train, heldout = source.split(fits)
  made = [
    Prompt(
      uid=uid,
      text=(text := write(line)),
      tokens=tokenizer.encode(text),
      answer=line.answer,
      task=source.name,
      difficulty=line.difficulty,
    )
    for uid, line in enumerate(itertools.chain(heldout, train))
  ]
  training = made[len(heldout) :]
  lines = itertools.chain(heldout, train)
  origins = {p.text: line.index for p, line in zip(made, lines, strict=True)}
  return Task(
    name=source.name,
    train=training,
    heldout={source.name: made[: len(heldout)]},
    tokenizer=tokenizer,
    verifier=source.judge(origins),
    supervised_batch=AnswerTexts(training, supervised, tokenizer).batch,
    weights={source.name: 1.0},
    dropped=len(dropped),
  )


class AnswerTexts:
  """Supervised batches of prompts with their right answers."""

  def __init__(
    self,
    train: Sequence[Prompt],
    supervised: SupervisedConfig,
    tokenizer: Tokenizer,
  ):
    """Keeps what is needed; answers are encoded when they are first asked for.

    Args:
      train: what batches are drawn from.
      supervised: batch size and seed.
      tokenizer: its first end token ends each text.
    """
    self._train, self._supervised = train, supervised
    self._tokenizer = tokenizer

  @functools.cached_property
  def _completions(self) -> list[np.ndarray]:
    end = np.array(self._tokenizer.eos_ids[:1], np.int32)
    return [
      np.concatenate([self._tokenizer.encode(prompt.answer), end])
      for prompt in self._train
    ]

  def batch(self, index: int) -> SupervisedBatch:
    """Batch number `index`: pairs drawn with replacement."""
    rng = stream(self._supervised.seed, Purpose.SUPERVISED, index)
    rows = rng.integers(len(self._train), size=self._supervised.batch_size)
    completions = self._completions
    longest = max(len(prompt.tokens) for prompt in self._train)
    return prompts.pad_texts(
      [self._train[row].tokens for row in rows],
      [completions[row] for row in rows],
      width=longest + max(len(completion) for completion in completions),
      pad_id=self._tokenizer.pad_id,
    )


def split_file(
  lines: Sequence[Line], fits: Fits, *, train: int, heldout: int
) -> tuple[list[Line], list[Line]]:
  """`split_lines` of those that fit."""
  return prompts.split_lines(
    [line for line in lines if fits(line)], train=train, heldout=heldout
  )


def make_pool(task: TaskConfig, kind: str, *, fresh: bool = False) -> Pool:
  """Workers for the judgements of one task; none starts yet."""
  return Pool(
    kind,
    workers=task.verifier_workers,
    seconds=task.verifier_seconds,
    megabytes=task.verifier_megabytes,
    fresh=fresh,
  )
