"""The curves in a table: which rows are whose, and in which scale.

A file may hold several runs or held-out sets, and percent instead of rates;
each decision is for the whole file.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from scalerl_jax.scaling import columns, tables

# A pass rate above 1 that means percent exceeds this somewhere. What lies
# between is smoothing that overshoots, or a reward with a bonus.
PERCENT, PERCENT_OF_REWARD = 2.0, 10.0
_KEYS = columns.RUN_NAMES + columns.TASK_NAMES
_WHOLE = 10_000  # Characters of a name: long ones differ at their ends.


class Series(NamedTuple):
  """The rows of one curve of a file."""

  label: str  # "" where the file holds one curve.
  recipe: str | None  # The label without its seed; None where none is told.
  task: str  # Held-out set, where the file tells.
  pass_rate: str  # The column.
  rows: tuple[tables.Row, ...]


def keys(table: tables.Table, asked: Sequence[str | None] = ()) -> list[str]:
  """The columns that tell runs and held-out sets apart, where there are any.

  A column that differs in each row (the name of a checkpoint) is none.

  Args:
    table: of one file.
    asked: columns that hold compute or pass rate by the user's word.
  """
  found: list[str] = []
  count = 1
  for usual in _KEYS:
    for column in table.columns:
      if columns.stem(column) != usual or "/" in column or column in asked:
        continue
      values = {
        tuple(str(r.cells.get(k, "")) for k in (*found, column))
        for r in table.rows
      }
      if count < len(values) < max(len(table.rows), 2):
        found.append(column)
        count = len(values)
  return found


def without_seed(name: str) -> str | None:
  """The name of a recipe in that of one of its runs, None without a seed.

  Args:
    name: of a run or file.

  Example:
    >>> without_seed("cispo_s0"), without_seed("runs/gspo-seed12")
    ('cispo', 'runs/gspo')
    >>> without_seed("steps2"), without_seed("seed 3")
    (None, '')
  """
  found = re.fullmatch(r"(|.*[^a-zA-Z0-9])(?:seed|s)[^a-zA-Z0-9]?\d+", name)
  return re.sub(r"[\W_]+$", "", found[1]) if found else None


def split(
  table: tables.Table, by: Sequence[str], choice: columns.Choice
) -> list[Series]:
  """The rows of each curve: of a run or held-out set, times a column.

  Args:
    table: of one file.
    by: the columns of `keys`.
    choice: of compute and pass rates.
  """
  groups: dict[tuple[str, ...], list[tables.Row]] = {} if by else {(): []}
  for row in table.rows:
    values = tuple(tables.plain(row.cells.get(k, ""), _WHOLE) for k in by)
    groups.setdefault(values, []).append(row)
  found = []
  for values, rows in groups.items():
    tasks = [
      value
      for key, value in zip(by, values, strict=True)
      if columns.stem(key) in columns.TASK_NAMES
    ]
    for column, label in zip(choice.pass_rates, choice.labels, strict=True):
      task = [*tasks, label] if choice.are_tasks else tasks
      shared = [
        value
        for key, value in zip(by, values, strict=True)
        if columns.stem(key) != "seed"
      ]
      recipe = "/".join(filter(None, (*shared, label)))
      text = "/".join(filter(None, (*values, label)))
      found.append(
        Series(
          text,
          recipe if len(shared) < len(values) else without_seed(text),
          "/".join(filter(None, task)),
          column,
          tuple(rows),
        )
      )
  return found


def pick(
  table: tables.Table, found: list[Series], series: str | None
) -> list[Series]:
  """The curves of a name: the whole label, or one of its parts.

  Args:
    table: of one file.
    found: its curves.
    series: names with commas; None for all.

  Raises:
    CurveError: with the names that there are, for another.
  """
  if series is None or not found:
    return found
  names = [s.label for s in found]
  if len(found) == 1:
    # The only run of a file may still be asked for by its name.
    names = sorted(
      {
        tables.plain(r.cells[c], _WHOLE)
        for r in table.rows
        for c in r.cells
        if columns.stem(c) in _KEYS
      }
    )
    if series in names:
      return found
    if not names:
      raise tables.CurveError(
        f"{table.name}: --series needs a column task or run, or several "
        "columns of pass rates, and the columns are "
        f"{tables.listed(table.columns)}."
      )
  picked: list[Series] = []
  for want in [series] if series in names else series.split(","):
    want = want.strip()
    exact = [s for s in found if s.label == want]
    part = [s for s in found if want in s.label.split("/")]
    if not want or not (exact or part):
      raise tables.CurveError(
        f"{table.name}: the file has no {want!r} for --series; it holds "
        f"{tables.listed(names)}."
      )
    picked += [s for s in exact or part if s not in picked]
  return picked


def numbers(
  table: tables.Table, one: Series, column: str, comma: bool
) -> np.ndarray:
  """A column of one curve, NaN where there is no number.

  Args:
    table: of one file.
    one: of its curves.
    column: of its columns.
    comma: whether a comma is the decimal sign.
  """
  return columns.numbers(table._replace(rows=one.rows), column, comma)


def scale(
  table: tables.Table, found: Sequence[Series], comma: bool
) -> tuple[float, tuple[str, ...]]:
  """What the file's pass rates are divided by, 1 or 100, and why.

  Percent are: cells with a percent sign; a column whose name says so; and
  values of which most are above 1 and some above 2 (above 10 for a reward or a
  score). A file in which some values are above 1 otherwise is refused, so that
  neither an overshoot to 1.02 nor a mixture of both is divided.

  Args:
    table: of one file.
    found: its curves.
    comma: whether a comma is the decimal sign.

  Raises:
    CurveError: naming the row, for a value below 0 or above 100, and for
      values that are neither rates nor clearly percent.
  """
  cells = [
    (row, one.pass_rate, value)
    for one in found
    for row, value in zip(
      one.rows, numbers(table, one, one.pass_rate, comma), strict=True
    )
    if np.isfinite(value)
  ]
  values = np.array([value for *_, value in cells])

  def refuse(chosen, rule: str):
    if np.any(chosen):
      row, column, value = cells[int(np.argmax(chosen))]
      raise tables.CurveError(
        f"{table.name}, {table.unit} {row.line}: {column} must be {rule}, got "
        f"{value:g}."
      )

  if not cells:
    return 1.0, ()
  named = columns.says_percent(cells[0][1])
  signed = np.array(
    [str(r.cells.get(column)).strip().endswith("%") for r, column, _ in cells]
  )
  refuse(
    values < 0, "a pass rate, at least 0 (of a reward r in [-1, 1], (r + 1)/2)"
  )
  refuse(values > 100, "a pass rate of at most 1, or 100 percent")
  if signed.any():
    refuse(~signed, "in percent like the other rows, which have a % sign")
    return 100.0, ("pass rates have a % sign and are read as percent",)
  most = float(values.max())
  if most <= 1:
    refuse(
      (values == most) & named & (most > 0),
      "above 1 somewhere when its name says percent; rename it, or write % "
      "signs",
    )
    return 1.0, ()
  if named:
    return 100.0, (f"pass rates are read as percent, as {cells[0][1]} says",)
  reward = columns.is_reward(cells[0][1])
  refuse(
    (values == most) & (most <= (PERCENT_OF_REWARD if reward else PERCENT)),
    "at most 1, or clearly percent; clip what smoothing added, bring a reward "
    "to [0, 1], or write % signs",
  )
  refuse(
    (values > 1) & (np.median(values) <= 1),
    "at most 1 when most values are; write % signs for percent",
  )
  return 100.0, (f"pass rates reach {most:g}, so the file is read as percent",)
