"""Questions of files, the held-out split, and padded supervised texts.

JSONL is read here, other files in `tables.py` and `array_records.py`.
What a task says about right and wrong stands in `tasks.py`.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from scalerl_jax.types import Prompt


class Line(NamedTuple):
  """One question with its answer."""

  prompt: str
  answer: str
  difficulty: float = 0.0  # the origin's own measure; greater is harder
  index: int = 0  # which item of a generator it is


class SupervisedBatch(NamedTuple):
  """Texts to imitate, a row each: prompt, completion, padding.

  Position t of `mask` speaks of `tokens[:, t]` given those before.
  """

  tokens: Int32[np.ndarray, "N T"]  # right-padded
  mask: Bool[np.ndarray, "N T"]  # True on completion tokens, end token included
  lengths: Int32[np.ndarray, " N"]  # tokens of prompt and completion together


class Columns(NamedTuple):
  """Where a record has what a line needs."""

  prompt: str = "prompt"
  answer: str = "answer"


COLUMNS = Columns()


def read_jsonl(
  path: str | os.PathLike, columns: Columns = COLUMNS
) -> list[Line]:
  """Reads one `{"prompt": text, "answer": text}` a line; blank lines pass.

  A line may hold a finite number as "difficulty"; 0 where it does not. Other
  keys are not looked at.

  Args:
    path: the file, in UTF-8.
    columns: the keys of prompt and answer.

  Raises:
    ValueError: no such file, no line in it, a line that breaks the rule, or a
      prompt that occurs twice; file, line number and rule are named.
  """
  name = os.fspath(path)
  try:
    with open(path, "rb") as file:
      rows = file.read().split(b"\n")
  except OSError as error:
    raise ValueError(
      f"task.path must name a JSONL file that can be read, got {name!r}"
      f" ({error.strerror})"
    ) from error
  return make_lines(
    name,
    (
      (f"line {number}", _read_object(f"{name}, line {number}", row, columns))
      for number, row in enumerate(rows, start=1)
      if row.strip()
    ),
    columns,
  )


def make_lines(
  name: str,
  records: Iterable[tuple[str, Mapping[str, Any]]],
  columns: Columns,
) -> list[Line]:
  """Checked lines of a file's records.

  Args:
    name: of the file.
    records: each with its place in the file, as in "line 3".
    columns: the keys of prompt and answer.

  Raises:
    ValueError: no record, one that breaks the rule, or a prompt that occurs
      twice.
  """
  lines: dict[str, Line] = {}
  places: dict[str, str] = {}
  for place, fields in records:
    line = _make_line(f"{name}, {place}", fields, columns)
    if line.prompt in lines:
      raise ValueError(
        f"{name}, {place}: a prompt must occur once, got"
        f" {line.prompt!r} again (first on {places[line.prompt]});"
        " remove one of the two lines"
      )
    lines[line.prompt] = line
    places[line.prompt] = place
  if not lines:
    raise ValueError(
      f"{name} must hold at least one line {_shape(columns)}, got an empty file"
    )
  return list(lines.values())


def _shape(columns: Columns) -> str:
  return f'{{"{columns.prompt}": text, "{columns.answer}": text}}'


def _read_object(where: str, row: bytes, columns: Columns) -> Mapping[str, Any]:
  rule = f"{where}: must be a JSON object {_shape(columns)}"
  try:
    fields: Any = json.loads(row.decode("utf-8"))
  except UnicodeDecodeError as error:
    raise ValueError(f"{rule} in UTF-8, got {row[:80]!r}") from error
  except (ValueError, RecursionError) as error:  # huge integers too
    raise ValueError(f"{rule}, got {row.decode()[:80]!r} ({error})") from error
  if not isinstance(fields, dict):
    raise ValueError(f"{rule}, got {type(fields).__name__} {str(fields)[:80]}")
  return fields


def _make_line(where: str, fields: Mapping[str, Any], columns: Columns) -> Line:
  rule = f"{where}: must be a JSON object {_shape(columns)}"
  for key in columns:
    if key not in fields:
      raise ValueError(f"{rule}, got no {key!r} among {sorted(fields)}")
    if not isinstance(fields[key], str) or not fields[key].strip():
      raise ValueError(
        f"{rule}, neither of them empty, got {fields[key]!r} as {key!r}"
      )
  difficulty = fields.get("difficulty", 0.0)
  if not _is_finite(difficulty):
    raise ValueError(
      f'{where}: "difficulty" must be a finite number where a line has one, got'
      f" {difficulty!r:.80}; mend it or leave it out"
    )
  prompt, answer = (fields[key] for key in columns)
  return Line(prompt, answer, float(difficulty))


def _is_finite(value: Any) -> bool:
  if isinstance(value, bool) or not isinstance(value, int | float):
    return False
  try:
    return math.isfinite(value)
  except OverflowError:  # an integer that no float holds
    return False


def split_lines(
  lines: Sequence[Line], *, train: int, heldout: int
) -> tuple[list[Line], list[Line]]:
  """The first `train` lines, and the last `heldout`: they share no line.

  Raises:
    ValueError: there are fewer lines than both together.

  >>> lines = [Line(text, "0") for text in "abcde"]
  >>> [
  ...   [line.prompt for line in part]
  ...   for part in split_lines(lines, train=2, heldout=2)
  ... ]
  [['a', 'b'], ['d', 'e']]
  """
  if train + heldout > len(lines):
    raise ValueError(
      f"task.train_prompts + task.heldout_prompts ({train} + {heldout} ="
      f" {train + heldout}) must be at most the {len(lines)} prompts of the"
      " file; lower them or give more lines"
    )
  return list(lines[:train]), list(lines[len(lines) - heldout :])


def check_lengths(prompts: Sequence[Prompt], max_prompt_tokens: int) -> None:
  """Refuses prompts longer than the token budget, with count and longest.

  Raises:
    ValueError: at least one is longer.
  """
  long = [p for p in prompts if len(p.tokens) > max_prompt_tokens]
  if long:
    longest = max(long, key=lambda prompt: len(prompt.tokens))
    raise ValueError(
      f"prompts must be at most sampler.max_prompt_tokens ({max_prompt_tokens})"
      f" tokens long, got {len(long)} of {len(prompts)} that are longer, the"
      f" longest with {len(longest.tokens)} tokens ({longest.text[:60]!r});"
      " raise the budget or remove them"
    )


def check_split(
  train: Sequence[Prompt], heldout: Mapping[str, Sequence[Prompt]]
) -> None:
  """Refuses a held-out prompt that is trained on, and a uid used twice.

  Raises:
    ValueError: a text of `heldout` is one of `train`, or two prompts share a
      uid.
  """
  texts = {prompt.text: prompt.uid for prompt in train}
  uids: set[int] = set()
  for name, prompts in {"training": train, **heldout}.items():
    for prompt in prompts:
      if name != "training" and prompt.text in texts:
        raise ValueError(
          "held-out prompts must not be trained on, got"
          f" {prompt.text!r} in held-out set {name!r} (uid {prompt.uid}) and"
          f" in training (uid {texts[prompt.text]})"
        )
      if prompt.uid in uids:
        raise ValueError(
          "uids must be unique over training and held-out prompts, got"
          f" {prompt.uid} twice (again in {name!r}: {prompt.text!r})"
        )
      uids.add(prompt.uid)


def pad_texts(
  prompts: Sequence[Int32[np.ndarray, " _"]],
  completions: Sequence[Int32[np.ndarray, " _"]],
  *,
  width: int,
  pad_id: int,
) -> SupervisedBatch:
  """Prompt and completion of each row side by side, padded to `width`.

  Args:
    prompts: token ids of each row's prompt.
    completions: token ids of each row's completion, end token included.
    width: T, tokens; at least the longest row.
    pad_id: fills the rest of a row.
  """
  tokens = np.full((len(prompts), width), pad_id, np.int32)
  mask = np.zeros(tokens.shape, bool)
  lengths = np.zeros(len(prompts), np.int32)
  for row, (prompt, completion) in enumerate(
    zip(prompts, completions, strict=True)
  ):
    end = len(prompt) + len(completion)
    tokens[row, : len(prompt)] = prompt
    tokens[row, len(prompt) : end] = completion
    mask[row, len(prompt) : end] = True
    lengths[row] = end
  return SupervisedBatch(tokens, mask, lengths)
