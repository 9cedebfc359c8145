"""Tasks: prompts, held-out prompts, a verifier, and texts for the warm start.

A task names its verifier; the verifiers themselves are in `rewards/`.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Int32

from scalerl_jax.config import SupervisedConfig, TaskConfig
from scalerl_jax.data import chain, prompts
from scalerl_jax.data.prompts import SupervisedBatch
from scalerl_jax.data.streams import Purpose, stream
from scalerl_jax.data.teacher import Scribe
from scalerl_jax.data.tokenizers import Tokenizer
from scalerl_jax.rewards import verifiers
from scalerl_jax.rewards.verifiers import Verifier
from scalerl_jax.types import Prompt, Rollout

_DRAWN_AT_ONCE = 1024  # chains; fixed, so that prompts do not depend on counts


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
  """What a run trains on. No held-out prompt is in `train` or `supervised`."""

  name: str
  train: Sequence[Prompt]
  heldout: dict[str, Sequence[Prompt]]  # by the name of the held-out set
  tokenizer: Tokenizer
  verifier: Verifier
  supervised_batch: Callable[[int], SupervisedBatch]  # addressed by number
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
    return self.verifier(prompt.answer, completion, ended=ended)

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

  Args:
    task: which one, its seed and sizes.
    supervised: the texts of its warm start.
    tokenizer_path: where the tokenizer is stored, or was by an earlier call;
      None: nowhere.
    max_prompt_tokens: budget of a prompt.

  Raises:
    ValueError: too few prompts for the split, a prompt longer than the budget,
      a bad file, or a stored tokenizer that is not this task's.

  >>> task = load_task(
  ...   TaskConfig(train_prompts=3, heldout_prompts=2),
  ...   SupervisedConfig(),
  ...   max_prompt_tokens=14,
  ... )
  >>> len(task.train), {name: len(p) for name, p in task.heldout.items()}
  (3, {'chain_arithmetic': 2})
  """
  make = {"chain_arithmetic": _chain_task, "jsonl": _jsonl_task}[task.name]
  made = make(task, supervised, tokenizer_path)
  everything = [*made.train, *itertools.chain(*made.heldout.values())]
  prompts.check_lengths(everything, max_prompt_tokens)
  return made


def _chain_task(
  task: TaskConfig,
  supervised: SupervisedConfig,
  tokenizer_path: str | os.PathLike | None,
) -> Task:
  count = task.heldout_prompts + task.train_prompts
  possible = chain.count_chains(task)
  if 2 * count > possible:  # drawing the last few would take for ever
    raise ValueError(
      "task.train_prompts + task.heldout_prompts must be at most half of the"
      f" {possible} different chains with task.modulus {task.modulus} and"
      f" {task.min_operations} to {task.max_operations} operations, got"
      f" {count}; lower them or raise task.max_operations"
    )
  # Every digit alike, so ids follow from the modulus and from no seed.
  tokenizer = _workdir_tokenizer(
    [chain.DIGITS[: task.modulus]],
    tokenizer_path,
    symbols=[*chain.symbols(task.modulus), *chain.MARKS],
  )
  # Held-out prompts come first: they stay when more are trained on.
  found: dict[bytes, Prompt] = {}
  rng = stream(task.seed, Purpose.PROMPTS)
  while len(found) < count:
    chains = chain.draw_chains(rng, _DRAWN_AT_ONCE, task)
    answers = chain.running_values(chains, task.modulus)[:, -1].tolist()
    keys = chain.chain_keys(chains, task.modulus)
    texts = chain.prompt_texts(chains, task.modulus)
    for key, text, answer in zip(keys, texts, answers, strict=True):
      if key not in found and len(found) < count:
        tokens = tokenizer.encode(text)
        digit = chain.DIGITS[answer]
        found[key] = Prompt(len(found), text, tokens, digit)
  everything = list(found.values())
  heldout = everything[: task.heldout_prompts]
  forbidden = frozenset(list(found)[: task.heldout_prompts])
  return Task(
    name=task.name,
    train=everything[task.heldout_prompts :],
    heldout={task.name: heldout},
    tokenizer=tokenizer,
    verifier=verifiers.chain_answer,
    supervised_batch=Scribe(task, supervised, tokenizer, forbidden).batch,
  )


def _jsonl_task(
  task: TaskConfig,
  supervised: SupervisedConfig,
  tokenizer_path: str | os.PathLike | None,
) -> Task:
  lines = prompts.read_jsonl(task.path)
  train, heldout = prompts.split_lines(
    lines, train=task.train_prompts, heldout=task.heldout_prompts
  )
  tokenizer = _workdir_tokenizer(
    [text for line in lines for text in line], tokenizer_path, symbols=[]
  )
  made = [
    Prompt(uid, line.prompt, tokenizer.encode(line.prompt), line.answer)
    for uid, line in enumerate(heldout + train)
  ]
  training = made[len(heldout) :]
  end = np.array(tokenizer.eos_ids[:1], np.int32)
  completions = [
    np.concatenate([tokenizer.encode(prompt.answer), end])
    for prompt in training
  ]
  return Task(
    name=task.name,
    train=training,
    heldout={task.name: made[: len(heldout)]},
    tokenizer=tokenizer,
    verifier=verifiers.exact_match,
    supervised_batch=functools.partial(
      _jsonl_batch, training, completions, supervised, tokenizer.pad_id
    ),
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
