"""Tasks: prompts, held-out prompts, a verifier, and texts for the warm start.

A task names its verifier; the verifiers themselves are in `rewards/`. A
mixture is a task of several parts, each of which is a task by itself.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from scalerl_jax.config import SupervisedConfig, TaskConfig
from scalerl_jax.data import chain, mixture, prompts
from scalerl_jax.data.chain import Operations
from scalerl_jax.data.mixture import MixedTexts
from scalerl_jax.data.prompts import Line, SupervisedBatch
from scalerl_jax.data.streams import Purpose, stream
from scalerl_jax.data.teacher import Scribe
from scalerl_jax.data.tokenizers import Tokenizer
from scalerl_jax.rewards import verifiers
from scalerl_jax.rewards.verifiers import Verifier
from scalerl_jax.types import Prompt, Rollout

_DRAWN_AT_ONCE = 1024  # chains; fixed, so that prompts do not depend on counts
_VERIFIERS: dict[str, Verifier] = {
  "chain_arithmetic": verifiers.chain_answer,
  "chain_logic": verifiers.chain_answer,
  "jsonl": verifiers.exact_match,
}


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
  verifier: Verifier | Mapping[str, Verifier]  # one, or by `Prompt.task`
  supervised_batch: Callable[[int], SupervisedBatch]  # addressed by number
  weights: Mapping[str, float]  # share of the prompts, by `Prompt.task`
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
    verifier = self.verifier
    if isinstance(verifier, Mapping):
      verifier = verifier[prompt.task]
    return verifier(prompt.answer, completion, ended=ended)

  def verify_batch(
    self,
    prompts: Sequence[Prompt],
    completions: Sequence[str],
    ended: Bool[np.ndarray, " B"],
  ) -> Bool[np.ndarray, " B"]:
    """`verify` of each row; `prompts` has one entry a completion."""
    rows = zip(prompts, completions, ended.tolist(), strict=True)
    return np.array(
      [self.verify(prompt, text, ended=end) for prompt, text, end in rows],
      bool,
    )

  def respond(self, rollout: Rollout) -> Int32[np.ndarray, " T"] | None:
    """What the environment says next, or None when the rollout is done.

    With one turn, a completion that has ended is done.
    """
    del rollout
    return None

  def supervised(self, start: int = 0) -> Iterator[SupervisedBatch]:
    """Endless batches for the warm start, from batch number `start` on."""
    return map(self.supervised_batch, itertools.count(start))


def load_task(
  task: TaskConfig,
  supervised: SupervisedConfig,
  tokenizer_path: str | os.PathLike | None = None,
  *,
  max_prompt_tokens: int,
) -> Task:
  """Makes the task that `task.name` says.

  A mixture has `task.train_prompts` and `task.heldout_prompts` of *each* part.
  The order in which `task.mixture` names its parts decides token ids, uids and
  the order of held-out sets; the weights decide none of them, only how many
  prompts and supervised texts each part gives. So the first part has the uids,
  and each chain part the prompts and the teacher, that it has alone. All share
  one tokenizer, so a file's text is cut at the symbols of chains, too.

  Args:
    task: which one, its seed and sizes.
    supervised: the texts of its warm start.
    tokenizer_path: where the tokenizer is stored, or was by an earlier call;
      None: nowhere.
    max_prompt_tokens: budget of a prompt.

  Raises:
    ValueError: too few prompts for the split, a prompt longer than the budget,
      a bad file, a modulus that does not suit the operations, more prompts of
      a part than it has uids, or a stored tokenizer that is not this task's.

  >>> task = load_task(
  ...   TaskConfig(train_prompts=3, heldout_prompts=2),
  ...   SupervisedConfig(),
  ...   max_prompt_tokens=14,
  ... )
  >>> len(task.train), {name: len(p) for name, p in task.heldout.items()}
  (3, {'chain_arithmetic': 2})
  """
  if task.name == "mixture":
    mixture.check_counts(task)
  parts = [
    _jsonl_part(task, supervised)
    if name == "jsonl"
    else _chain_part(task, supervised, chain.OPERATIONS[name])
    for name in task.weights
  ]
  tokenizer = _workdir_tokenizer(
    [text for part in parts for text in part.texts],
    tokenizer_path,
    symbols=[symbol for part in parts for symbol in part.symbols],
  )
  tasks = [part.make(tokenizer) for part in parts]
  made = _mix(task, supervised, tasks) if task.name == "mixture" else tasks[0]
  everything = [*made.train, *itertools.chain(*made.heldout.values())]
  prompts.check_lengths(everything, max_prompt_tokens)
  return made


class _Part(NamedTuple):
  """A task before its tokenizer is known, which other parts may share."""

  texts: Sequence[str]  # what the tokenizer must cover
  symbols: Sequence[str]  # what becomes one token each
  make: Callable[[Tokenizer], Task]


def _chain_part(
  task: TaskConfig, supervised: SupervisedConfig, operations: Operations
) -> _Part:
  modulus = task.modulus
  if operations.bitwise and modulus & (modulus - 1):
    raise ValueError(
      f"task.modulus must be a power of two for {operations.name}, whose"
      f" operations are bitwise, got {modulus}; choose 2, 4, 8 or 16"
    )
  count = task.heldout_prompts + task.train_prompts
  possible = chain.count_chains(operations, task)
  if 2 * count > possible:  # drawing the last few would take for ever
    raise ValueError(
      "task.train_prompts + task.heldout_prompts must be at most half of the"
      f" {possible} different chains with task.modulus {modulus} and"
      f" {task.min_operations} to {task.max_operations} operations, got"
      f" {count}; lower them or raise task.max_operations"
    )
  return _Part(
    # Every digit alike, so ids follow from the modulus and from no seed.
    texts=[chain.DIGITS[:modulus]],
    symbols=[*chain.symbols(operations, modulus), *chain.MARKS],
    make=functools.partial(_chain_task, task, supervised, operations),
  )


def _chain_task(
  task: TaskConfig,
  supervised: SupervisedConfig,
  operations: Operations,
  tokenizer: Tokenizer,
) -> Task:
  count, modulus = task.heldout_prompts + task.train_prompts, task.modulus
  # Held-out prompts come first: they stay when more are trained on.
  found: dict[bytes, Prompt] = {}
  rng = stream(task.seed, Purpose.PROMPTS, operations.number)
  while len(found) < count:
    chains = chain.draw_chains(rng, _DRAWN_AT_ONCE, operations, task)
    answers = chain.running_values(chains, operations, modulus)[:, -1]
    for key, text, answer, length in zip(
      chain.chain_keys(chains, modulus),
      chain.prompt_texts(chains, operations, modulus),
      answers.tolist(),
      chains.lengths.tolist(),
      strict=True,
    ):
      if key not in found and len(found) < count:
        found[key] = Prompt(
          uid=len(found),
          text=text,
          tokens=tokenizer.encode(text),
          answer=chain.DIGITS[answer],
          task=operations.name,
          difficulty=float(length),
        )
  everything = list(found.values())
  heldout = everything[: task.heldout_prompts]
  forbidden = frozenset(list(found)[: task.heldout_prompts])
  return Task(
    name=operations.name,
    train=everything[task.heldout_prompts :],
    heldout={operations.name: heldout},
    tokenizer=tokenizer,
    verifier=_VERIFIERS[operations.name],
    supervised_batch=Scribe(
      task, supervised, operations, tokenizer, forbidden
    ).batch,
    weights={operations.name: 1.0},
  )


def _jsonl_part(task: TaskConfig, supervised: SupervisedConfig) -> _Part:
  lines = prompts.read_jsonl(task.path)
  train, heldout = prompts.split_lines(
    lines, train=task.train_prompts, heldout=task.heldout_prompts
  )
  return _Part(
    texts=[text for line in lines for text in (line.prompt, line.answer)],
    symbols=[],
    make=functools.partial(_jsonl_task, train, heldout, supervised),
  )


def _jsonl_task(
  train: Sequence[Line],
  heldout: Sequence[Line],
  supervised: SupervisedConfig,
  tokenizer: Tokenizer,
) -> Task:
  made = [
    Prompt(
      uid=uid,
      text=line.prompt,
      tokens=tokenizer.encode(line.prompt),
      answer=line.answer,
      task="jsonl",
      difficulty=line.difficulty,
    )
    for uid, line in enumerate([*heldout, *train])
  ]
  training = made[len(heldout) :]
  end = np.array(tokenizer.eos_ids[:1], np.int32)
  completions = [
    np.concatenate([tokenizer.encode(prompt.answer), end])
    for prompt in training
  ]
  return Task(
    name="jsonl",
    train=training,
    heldout={"jsonl": made[: len(heldout)]},
    tokenizer=tokenizer,
    verifier=_VERIFIERS["jsonl"],
    supervised_batch=functools.partial(
      _jsonl_batch, training, completions, supervised, tokenizer.pad_id
    ),
    weights={"jsonl": 1.0},
  )


def _jsonl_batch(
  train: Sequence[Prompt],
  completions: Sequence[np.ndarray],
  supervised: SupervisedConfig,
  pad_id: int,
  index: int,
) -> SupervisedBatch:
  """Pairs of prompt and answer, drawn with replacement."""
  rng = stream(supervised.seed, Purpose.SUPERVISED, index)
  rows = rng.integers(len(train), size=supervised.batch_size)
  longest = max(len(prompt.tokens) for prompt in train)
  return prompts.pad_texts(
    [train[row].tokens for row in rows],
    [completions[row] for row in rows],
    width=longest + max(len(completion) for completion in completions),
    pad_id=pad_id,
  )


def _mix(
  task: TaskConfig, supervised: SupervisedConfig, parts: Sequence[Task]
) -> Task:
  """One task of several, all with the same tokenizer."""
  tokenizer = parts[0].tokenizer
  return Task(
    name=task.name,
    train=[
      prompt
      for number, part in enumerate(parts)
      for prompt in mixture.renumbered(part.train, number)
    ],
    heldout={
      part.name: mixture.renumbered(part.heldout[part.name], number)
      for number, part in enumerate(parts)
    },
    tokenizer=tokenizer,
    verifier={part.name: _VERIFIERS[part.name] for part in parts},
    supervised_batch=MixedTexts(
      [part.supervised_batch for part in parts],
      list(task.weights.values()),
      supervised,
      pad_id=tokenizer.pad_id,
    ).batch,
    weights=task.weights,
  )


def _workdir_tokenizer(
  texts: Sequence[str],
  path: str | os.PathLike | None,
  *,
  symbols: Sequence[str],
) -> Tokenizer:
  """The tokenizer of `texts`, stored at `path` the first time.

  A stored one is read back and compared: the policy in the same workdir was
  trained on its ids.
  """
  trained = Tokenizer.train(texts, symbols=symbols)
  if path is None:
    return trained
  if not os.path.exists(path):
    trained.save(path)
    return trained
  stored = Tokenizer.load(path)
  if stored.pieces != trained.pieces:
    raise ValueError(
      f"the tokenizer stored at {os.fspath(path)!r} must have the"
      f" {trained.vocab_size} pieces of this task, got {stored.vocab_size}"
      " pieces of another one; choose another workdir"
    )
  return stored
