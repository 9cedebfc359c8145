"""Questions that reasoning-gym makes: one of its datasets, by name.

Its generators run here; its scorers execute what they are given in nine
datasets, so they are never called in this process.
"""

import ast
import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scalerl_jax.config import TaskConfig
from scalerl_jax.data.prompts import Line
from scalerl_jax.data.questions import Fits, Source, make_pool
from scalerl_jax.data.streams import Purpose, stream
from scalerl_jax.rewards.judges import Judge, PoolJudge, TextJudge, gym_question
from scalerl_jax.rewards.verifiers import stated_match

_SEED = 2**16  # address of the datasets' seeds; chains have the small ones
_TRIES = 20  # questions made for each that is wanted, before it is given up


def gym_source(task: TaskConfig, judge: Judge | None = None) -> Source:
  """The dataset `task.dataset` with the parameters `task.parameters`.

  Questions are addressed by (`task.seed`, index) and none occurs twice. The
  first ones are held out: they stay when more are trained on.

  Without another judge, an answer is right that is equal to the dataset's; in
  datasets with a scorer of their own, also one that it scores 1, in a pool.

  Raises:
    ValueError: a dataset, a parameter or a value that reasoning-gym does not
      have or want.
  """
  name, parameters = task.dataset, read_parameters(task.parameters)
  count = task.heldout_prompts + task.train_prompts
  tries = _TRIES * count + 1000
  dataset = make_dataset(name, parameters, seed=gym_seed(task), size=tries)
  # Without a checkpoint a tokenizer is trained on these.
  lines = _take(_questions(dataset, tries), count)
  return Source(
    name="reasoning_gym",
    lines=lines,
    split=functools.partial(_split, dataset, tries, task),
    judge=functools.partial(_judge, dataset, task, judge),
  )


def _judge(
  dataset: Any,
  task: TaskConfig,
  judge: Judge | None,
  origins: Mapping[str, int],
) -> Judge:
  from reasoning_gym.dataset import ProceduralDataset

  if judge is not None:
    return judge
  if type(dataset).score_answer is ProceduralDataset.score_answer:
    return TextJudge(stated_match, task.thinking_end)
  options = read_parameters(task.parameters)
  options |= {"seed": dataset.seed, "size": dataset.size}
  return PoolJudge(
    make_pool(task, "gym"),
    task.thinking_end,
    gym_question(task.dataset, json.dumps(options), origins),
  )


def gym_seed(task: TaskConfig) -> int:
  """The dataset's seed; item i of a dataset has the seed + i."""
  rng = stream(task.seed, Purpose.PROMPTS, _SEED)
  return int(rng.integers(2**31))


def read_parameters(text: str) -> dict[str, Any]:
  """Values by name, as a call in Python would have them; literals only.

  Raises:
    ValueError: `text` is something else.

  >>> read_parameters("max_terms=3, operators=['+', '-']")
  {'max_terms': 3, 'operators': ['+', '-']}
  """
  rule = ValueError(
    'task.parameters must be values by name, as in "max_terms=3, operators='
    f"['+', '-']\", got {text!r}"
  )
  try:
    call = ast.parse(f"dict({text})", mode="eval").body
  except (SyntaxError, ValueError) as error:
    raise rule from error
  if not isinstance(call, ast.Call) or call.args:
    raise rule
  if not isinstance(call.func, ast.Name):  # "a=1)(b=2"
    raise rule
  values: dict[str, Any] = {}
  for keyword in call.keywords:
    if keyword.arg is None:
      raise rule
    try:
      values[keyword.arg] = ast.literal_eval(keyword.value)
    except ValueError as error:
      raise rule from error
  return values


def make_dataset(
  name: str, parameters: dict[str, Any], *, seed: int, size: int
) -> Any:
  """A dataset of reasoning-gym.

  Raises:
    ValueError: no such dataset, parameter or value.
  """
  from reasoning_gym import factory

  if name not in factory.DATASETS:
    raise ValueError(
      f"task.dataset must be one of reasoning-gym's {len(factory.DATASETS)}"
      f" datasets, got {name!r}; they are "
      + ", ".join(sorted(factory.DATASETS))
    )
  known = [
    field.name for field in dataclasses.fields(factory.DATASETS[name][1])
  ]
  for parameter in parameters:
    if parameter not in known or parameter in ("seed", "size"):
      raise ValueError(
        f"task.parameters must name parameters of {name}, got {parameter!r};"
        " they are " + ", ".join(n for n in known if n not in ("seed", "size"))
      )
  try:
    return factory.create_dataset(name, seed=seed, size=size, **parameters)
  except (AssertionError, TypeError, ValueError) as error:
    raise ValueError(
      f"task.parameters must be values that reasoning-gym's {name} takes, got"
      f" {parameters} ({error})"
    ) from error


def _questions(dataset: Any, tries: int) -> Iterator[Line]:
  """Different questions; `Line.index` says which item each is."""
  seen: set[str] = set()
  for index in range(tries):
    item = dataset[index]
    question = item["question"]
    if question not in seen and str(item["answer"]).strip():
      seen.add(question)
      yield Line(question, str(item["answer"]), index=index)


def _take(lines: Iterator[Line], count: int) -> list[Line]:
  return list(itertools.islice(lines, count))


def _split(
  dataset: Any, tries: int, task: TaskConfig, fits: Fits
) -> tuple[Sequence[Line], Sequence[Line]]:
  count = task.heldout_prompts + task.train_prompts
  found = _take(
    (line for line in _questions(dataset, tries) if fits(line)), count
  )
  if len(found) < count:
    raise ValueError(
      "task.train_prompts + task.heldout_prompts must be at most the"
      f" different questions of reasoning-gym's {task.dataset} that fit the"
      f" budget, got {count} and {len(found)} questions among {tries}; lower"
      " them, change task.parameters or raise sampler.max_prompt_tokens"
    )
  return found[task.heldout_prompts :], found[: task.heldout_prompts]
