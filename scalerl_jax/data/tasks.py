"""Tasks: prompts, held-out prompts, a verifier, and texts for the warm start.

A task names its verifier; the verifiers themselves are in `rewards/`. A
mixture is a task of several parts, each of which is a task by itself.
"""

import dataclasses
import functools
import itertools
import os
import pathlib
from collections.abc import Mapping, Sequence

from scalerl_jax.config import CHAINS, SupervisedConfig, TaskConfig
from scalerl_jax.data import chain, mixture, prompts
from scalerl_jax.data.array_records import read_array_records
from scalerl_jax.data.chain import Operations
from scalerl_jax.data.gym import gym_source
from scalerl_jax.data.mixture import MixedTexts
from scalerl_jax.data.pieces import PieceTokenizer
from scalerl_jax.data.prompts import Columns, Line
from scalerl_jax.data.questions import (
  Source,
  make_pool,
  question_part,
  split_file,
)
from scalerl_jax.data.streams import Purpose, stream
from scalerl_jax.data.tables import read_parquet
from scalerl_jax.data.task import Part, Task
from scalerl_jax.data.teacher import Scribe
from scalerl_jax.data.tokenizers import Tokenizer
from scalerl_jax.rewards import verifiers
from scalerl_jax.rewards.answers import final_answer
from scalerl_jax.rewards.judges import (
  Judge,
  PoolJudge,
  TextJudge,
  code_question,
  math_question,
)
from scalerl_jax.rewards.verifiers import Verifier
from scalerl_jax.types import Prompt

_DRAWN_AT_ONCE = 1024  # chains; fixed, so that prompts do not depend on counts
_TEXT_VERIFIERS: dict[str, Verifier] = {
  "exact": verifiers.exact_match,
  "stated": verifiers.stated_match,
}


def load_task(
  task: TaskConfig,
  supervised: SupervisedConfig,
  tokenizer_path: str | os.PathLike | None = None,
  *,
  max_prompt_tokens: int,
  checkpoint: str = "",
) -> Task:
  """Makes the task that `task.name` says.

  A mixture has `task.train_prompts` and `task.heldout_prompts` of *each* part.
  The order in which `task.mixture` names its parts decides token ids, uids and
  the order of held-out sets; the weights decide none of them, only how many
  prompts and supervised texts each part gives. So the first part has the uids,
  and each chain part the prompts and the teacher, that it has alone. All share
  one tokenizer, so a file's text is cut at the symbols of chains, too.

  Questions for a checkpoint are asked through its chat template, in tokens of
  its own tokenizer.

  Args:
    task: which one, its seed and sizes.
    supervised: the texts of its warm start.
    tokenizer_path: where the tokenizer is stored, or was by an earlier call;
      None: nowhere.
    max_prompt_tokens: budget of a prompt.
    checkpoint: folder or hub name of the model whose tokenizer is used; empty:
      one is trained on the task's text.

  Raises:
    ValueError: too few prompts for the split, a prompt longer than the budget
      (unless those are dropped), a checkpoint for a task with a vocabulary of
      its own, or one without a good tokenizer,
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
  own = [name for name in task.weights if name in CHAINS]
  if checkpoint and own:
    raise ValueError(
      f"model.checkpoint must be empty for {own[0]}, which has a vocabulary of"
      f" its own, got {checkpoint!r}"
    )
  parts = [
    _chain_part(task, supervised, chain.OPERATIONS[name])
    if name in CHAINS
    else question_part(
      _source(name, task), task, supervised, max_prompt_tokens=max_prompt_tokens
    )
    for name in task.weights
  ]
  tokenizer = (
    _checkpoint_tokenizer(checkpoint)
    if checkpoint
    else _workdir_tokenizer(
      [text for part in parts for text in part.texts],
      tokenizer_path,
      symbols=[symbol for part in parts for symbol in part.symbols],
    )
  )
  tasks = [part.make(tokenizer) for part in parts]
  made = _mix(task, supervised, tasks) if task.name == "mixture" else tasks[0]
  everything = [*made.train, *itertools.chain(*made.heldout.values())]
  prompts.check_lengths(everything, max_prompt_tokens)
  return made


def _source(name: str, task: TaskConfig) -> Source:
  """Where the questions of a task come from, and who judges them."""
  if name == "reasoning_gym":
    return gym_source(task, _judge(task))
  lines = read_file(name, task)
  if task.verifier in ("math", "stated"):
    lines = [line._replace(answer=final_answer(line.answer)) for line in lines]
  split = functools.partial(
    split_file, lines, train=task.train_prompts, heldout=task.heldout_prompts
  )
  judge = _judge(task) or TextJudge(verifiers.exact_match, task.thinking_end)
  return Source(name, lines, split, lambda origins: judge)


def question_set(
  task: TaskConfig,
  path: str | os.PathLike,
  tokenizer: Tokenizer,
  *,
  max_prompt_tokens: int,
) -> Task:
  """A JSONL file's questions, all held out, in a set named by the file.

  Columns, instruction and verifier are those of `task`.

  Args:
    task: how questions are asked and judged.
    path: the file, as `prompts.read_jsonl` reads it.
    tokenizer: of the policy.
    max_prompt_tokens: budget of a prompt.

  Raises:
    ValueError: a bad file, or a prompt over the budget unless
      `task.long_prompts` drops those.
  """
  asked = dataclasses.replace(
    task,
    name="jsonl",
    path=os.fspath(path),
    mixture="",
    dataset="",
    parameters="",
  )
  source = _source("jsonl", asked)
  lines = list(source.lines)
  source = dataclasses.replace(
    source,
    name=pathlib.Path(path).stem,
    lines=lines,
    split=lambda fits: ([], [line for line in lines if fits(line)]),
  )
  part = question_part(
    source, asked, SupervisedConfig(), max_prompt_tokens=max_prompt_tokens
  )
  made = part.make(tokenizer)
  prompts.check_lengths(made.heldout[source.name], max_prompt_tokens)
  return made


def read_file(name: str, task: TaskConfig) -> list[Line]:
  """The questions of `task.path`, which is a file of the kind `name`."""
  columns = Columns(task.prompt_column, task.answer_column)
  if name == "parquet":
    return read_parquet(task.path, columns)
  if name == "tfds":
    return read_array_records(task.path, columns, split=task.split)
  return prompts.read_jsonl(task.path, columns)


def _judge(task: TaskConfig) -> Judge | None:
  """The judge that `task.verifier` names; None for a task's own."""
  if task.verifier == "own":
    return None
  if text := _TEXT_VERIFIERS.get(task.verifier):
    return TextJudge(text, task.thinking_end)
  if task.verifier == "math":
    return PoolJudge(make_pool(task, "math"), task.thinking_end, math_question)
  pool = make_pool(task, "code", fresh=True)
  return PoolJudge(pool, task.thinking_end, code_question)


def _chain_part(
  task: TaskConfig, supervised: SupervisedConfig, operations: Operations
) -> Part:
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
  return Part(
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
    verifier=verifiers.chain_answer,
    supervised_batch=Scribe(
      task, supervised, operations, tokenizer, forbidden
    ).batch,
    weights={operations.name: 1.0},
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
    verifier={
      part.name: part.verifier
      for part in parts
      if not isinstance(part.verifier, Mapping)  # a part is no mixture
    },
    supervised_batch=MixedTexts(
      [part.supervised_batch for part in parts],
      list(task.weights.values()),
      supervised,
      pad_id=tokenizer.pad_id,
    ).batch,
    weights=task.weights,
    dropped=sum(part.dropped for part in parts),
  )


def _checkpoint_tokenizer(checkpoint: str) -> Tokenizer:
  # Imported where it is used: runs of their own vocabulary need no Jinja.
  from scalerl_jax.data.checkpoints import load_tokenizer

  return load_tokenizer(checkpoint)


def _workdir_tokenizer(
  texts: Sequence[str],
  path: str | os.PathLike | None,
  *,
  symbols: Sequence[str],
) -> PieceTokenizer:
  """The tokenizer of `texts`, stored at `path` the first time.

  A stored one is read back and compared: the policy in the same workdir was
  trained on its ids.
  """
  trained = PieceTokenizer.train(texts, symbols=symbols)
  if path is None:
    return trained
  if not os.path.exists(path):
    trained.save(path)
    return trained
  stored = PieceTokenizer.load(path)
  if stored.pieces != trained.pieces:
    raise ValueError(
      f"the tokenizer stored at {os.fspath(path)!r} must have the"
      f" {trained.vocab_size} pieces of this task, got {stored.vocab_size}"
      " pieces of another one; choose another workdir"
    )
  return stored
