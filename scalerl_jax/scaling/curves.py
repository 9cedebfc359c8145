"""Reads one training curve from a CSV or JSONL file, or from a workdir.

Every awkward file gets the handling stated here, which `Curve.notes` repeats
to the reader, or one sentence with file, line and rule as `CurveError`.
"""

import csv
import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from scalerl_jax.scaling import points

# Usual names, the first that a file has is taken. Full FLOPs come first: the
# cost of the work asked for, whatever was left out of it.
COMPUTE_NAMES = (
  *("compute", "flops_full", "compute_flops", "flops", "total_flops"),
  *("compute_gpu_hours", "gpu_hours", "device_hours", "device_seconds"),
  *("generated_tokens", "trained_tokens", "tokens", "num_tokens"),
  *("total_tokens", "step", "global_step", "_step", "steps", "iteration"),
  *("wall_seconds", "wall_s"),
)
PASS_RATE_NAMES = (
  *("pass_rate", "mean_at_16", "mean@16", "mean_at_n", "pass_at_1"),
  *("pass@1", "accuracy", "acc", "success_rate", "reward_mean"),
  *("mean_reward", "reward", "score"),
)
SERIES_NAMES = ("task", "run", "run_id", "run_name")
_MISSING = {"", "nan", "na", "n/a", "none", "null", "inf", "-inf", "infinity"}


class CurveError(ValueError):
  """A curve file that cannot be fitted: one sentence for the user."""


class Curve(NamedTuple):
  """A curve in order of compute, and what was done to the file's rows."""

  path: str
  compute: Float64[np.ndarray, "N"]
  pass_rate: Float64[np.ndarray, "N"]
  trials: Float64[np.ndarray, "N"] | None
  compute_column: str
  pass_rate_column: str
  notes: tuple[str, ...]


class _Row(NamedTuple):
  line: int
  cells: Mapping[str, object]


def read_curve(
  path: str | os.PathLike[str],
  *,
  compute_column: str | None = None,
  pass_rate_column: str | None = None,
  series: str | None = None,
) -> Curve:
  """Reads the points of one curve.

  Columns are recognised by their usual names (the last part after a slash
  counts, in any case); a CSV without a header and with two numeric columns is
  (compute, pass rate). Rows are put in order of compute; rows of equal compute
  are all kept, as separate evaluations; rows without a number are left out,
  counted and named; values in (1, 100] are taken as percent.

  Args:
    path: a `.csv` or `.jsonl` file, or a folder that holds `curve.csv`.
    compute_column: the column of compute; None to recognise it.
    pass_rate_column: the column of pass rate; None to recognise it.
    series: which curve of a file that holds several (by `task` or `run`);
      None for the first.

  Returns:
    The curve, with a note for each choice that was made.

  Raises:
    CurveError: for a file that is missing, empty, not text, without
      recognisable columns, with words where numbers belong, with values out of
      range, or with fewer than 6 usable points.
  """
  file = pathlib.Path(path)
  if file.is_dir():
    file = file / "curve.csv"
    if not file.exists():
      raise CurveError(
        f"{path}: a folder must hold curve.csv to be read as a curve, and this "
        "one does not; name a file."
      )
  name = str(file)
  try:
    text = file.read_text(encoding="utf-8-sig")
  except FileNotFoundError:
    raise CurveError(f"{name}: there is no such file.") from None
  except UnicodeDecodeError:
    raise CurveError(
      f"{name}: a curve file must be text (CSV or JSONL in UTF-8), and this "
      "one is not."
    ) from None
  except OSError as error:
    raise CurveError(f"{name}: cannot be read ({error.strerror}).") from None
  lines = text.splitlines()
  if not any(line.strip() for line in lines):
    raise CurveError(f"{name}: the file is empty; a curve needs rows.")
  if next(line for line in lines if line.strip()).lstrip().startswith("{"):
    columns, rows = _jsonl_rows(name, lines)
  else:
    columns, rows = _csv_rows(name, lines)
  x_column = _choose(name, columns, compute_column, COMPUTE_NAMES, "compute")
  y_column = _choose(
    name,
    [c for c in columns if c != x_column],
    pass_rate_column,
    PASS_RATE_NAMES,
    "pass_rate",
  )
  notes = [f"compute is column {x_column}, pass rate is column {y_column}"]
  rows = _one_series(name, columns, rows, series, notes)
  return _curve(name, columns, rows, x_column, y_column, notes)


def _jsonl_rows(name: str, lines: Sequence[str]):
  columns: dict[str, None] = {}
  rows = []
  for number, line in enumerate(lines, 1):
    if not line.strip():
      continue
    try:
      record = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
      record = None
    if not isinstance(record, dict):
      raise CurveError(
        f"{name}, line {number}: each line must be one JSON object, got "
        f"{line.strip()[:40]!r}."
      )
    columns.update(dict.fromkeys(record))
    rows.append(_Row(number, record))
  return list(columns), rows


def _csv_rows(name: str, lines: Sequence[str]):
  head = next(line for line in lines if line.strip())
  delimiter = next((d for d in ",\t;" if d in head), ",")
  columns: list[str] = []
  rows = []
  reader = csv.reader(lines, delimiter=delimiter, strict=True)
  try:
    for cells in reader:
      cells = [cell.strip() for cell in cells]
      if not any(cells):
        continue
      if not columns:
        if all(_number(cell) is not None for cell in cells):
          if len(cells) != 2:
            raise CurveError(
              f"{name}, line {reader.line_num}: without a header a file must "
              "have two columns, compute and pass rate, and this one has "
              f"{len(cells)}; add a header line."
            )
          columns = ["compute", "pass_rate"]
        else:
          columns = cells
          twice = sorted({c for c in cells if cells.count(c) > 1})
          if twice:
            raise CurveError(
              f"{name}, line {reader.line_num}: column names must differ, and "
              f"{', '.join(map(repr, twice))} stands more than once."
            )
          continue
      if len(cells) != len(columns):
        raise CurveError(
          f"{name}, line {reader.line_num}: a row must have the header's "
          f"{len(columns)} cells, got {len(cells)}."
        )
      cells = dict(zip(columns, cells, strict=True))
      rows.append(_Row(reader.line_num, cells))
  except csv.Error as error:
    raise CurveError(
      f"{name}, line {reader.line_num}: not a CSV row ({error})."
    ) from None
  return columns, rows


def _plain(column: str) -> str:
  """A column's name as it is compared with the usual ones."""
  last = column.strip().lower().rsplit("/", 1)[-1]
  return last.strip().replace(" ", "_").replace("-", "_")


def _choose(
  name: str,
  columns: Sequence[str],
  asked: str | None,
  usual: Iterable[str],
  what: str,
) -> str:
  listed = ", ".join(columns)
  if asked is not None:
    if asked not in columns:
      raise CurveError(
        f"{name}: there is no column {asked!r} for --{what}_column; the "
        f"columns are {listed}."
      )
    return asked
  for candidate in usual:
    for column in columns:
      if _plain(column) == candidate:
        return column
  raise CurveError(
    f"{name}: no column has a usual name of {what}; the columns are {listed}; "
    f"name one with --{what}_column."
  )


def _one_series(name, columns, rows, series, notes):
  """The rows of one curve of a file that may hold several."""
  column = next(
    (c for u in SERIES_NAMES for c in columns if _plain(c) == u), None
  )
  values = list(dict.fromkeys(str(r.cells.get(column, "")) for r in rows))
  if column is None or (series is None and len(values) < 2):
    if series is not None:
      raise CurveError(
        f"{name}: --series needs a column {' or '.join(SERIES_NAMES[:2])}, "
        f"and the columns are {', '.join(columns)}."
      )
    return rows
  if series is None:
    series = values[0]
    notes.append(
      f"column {column} holds {len(values)} curves ({', '.join(values)}); "
      f"this is {series}, --series names another"
    )
  elif series not in values:
    raise CurveError(
      f"{name}: column {column} has no {series!r} for --series; it holds "
      f"{', '.join(values)}."
    )
  return [r for r in rows if str(r.cells.get(column, "")) == series]


def _number(cell: object) -> float | None:
  """The cell as a number (NaN where it says "none"), or None for a word."""
  if cell is None:
    return math.nan
  if isinstance(cell, str):
    cell = cell.strip()
    if cell.lower() in _MISSING:
      return math.nan
  elif isinstance(cell, bool) or not isinstance(cell, int | float):
    return None
  try:
    return float(cell)
  except (ValueError, OverflowError):
    return None


def _numbers(name: str, rows: Sequence[_Row], column: str):
  values = []
  for row in rows:
    value = _number(row.cells.get(column))
    if value is None:
      raise CurveError(
        f"{name}, line {row.line}: {column} must be a number, got "
        f"{str(row.cells[column])[:40]!r}."
      )
    values.append(value)
  return np.array(values, np.float64)


def _refuse(name, rows, values, bad, column, rule):
  """One sentence for the first of the bad rows, if there are any."""
  for row, value, is_bad in zip(rows, values, bad, strict=True):
    if is_bad:
      raise CurveError(
        f"{name}, line {row.line}: {column} must be {rule}, got {value:g}."
      )


def _lines(rows: Sequence[_Row], chosen) -> str:
  numbers = [str(r.line) for r, c in zip(rows, chosen, strict=True) if c]
  more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
  return ", ".join(numbers[:8]) + more


def _trials(columns, rows, usable):
  """Samples behind each evaluation, where our own columns tell them."""
  if not {"prompts", "samples_per_prompt"} <= set(columns):
    return None
  cells = [
    (
      _number(r.cells.get("prompts")),
      _number(r.cells.get("samples_per_prompt")),
    )
    for r, u in zip(rows, usable, strict=True)
    if u
  ]
  trials = np.array([(p or math.nan) * (s or math.nan) for p, s in cells])
  return trials if (trials >= 1).all() else None


def _curve(name, columns, rows, x_column, y_column, notes) -> Curve:
  x, y = _numbers(name, rows, x_column), _numbers(name, rows, y_column)
  usable = np.isfinite(x) & np.isfinite(y)
  if not usable.all():
    notes.append(
      f"{int((~usable).sum())} rows left out that hold no number for compute "
      f"or pass rate: lines {_lines(rows, ~usable)}"
    )
  trials = _trials(columns, rows, usable)
  rows = [r for r, u in zip(rows, usable, strict=True) if u]
  x, y = x[usable], y[usable]
  if len(x) < points.FEWEST_POINTS:
    raise CurveError(
      f"{name}: a fit needs at least {points.FEWEST_POINTS} usable points, and "
      f"this file has {len(x)}."
    )
  _refuse(name, rows, x, x < 0, x_column, "at least 0")
  _refuse(name, rows, y, y < 0, y_column, "a pass rate, at least 0")
  _refuse(
    name, rows, y, y > 100, y_column, "a pass rate of at most 1, or 100 percent"
  )
  if (y > 1).any():
    if np.median(y) <= 1:
      _refuse(name, rows, y, y > 1, y_column, "at most 1 when most values are")
    notes.append(
      f"values of {y_column} reach {y.max():g}, so they are read as percent"
    )
    y = y / 100.0
  order = np.argsort(x, kind="stable")
  if (np.diff(x) < 0).any():
    notes.append("rows put in order of compute")
  x, y = x[order], y[order]
  twice = int((np.diff(x) == 0).sum())
  if twice:
    notes.append(
      f"{twice} rows repeat a compute already there; all are kept, each as an "
      "evaluation of its own"
    )
  if not points.enough(x):
    raise CurveError(
      f"{name}: a fit needs at least {points.FEWEST_COMPUTES} different values "
      f"of {x_column} above 0, and this file has {len(np.unique(x[x > 0]))}."
    )
  return Curve(
    name,
    x,
    y,
    None if trials is None else trials[order],
    x_column,
    y_column,
    tuple(notes),
  )
