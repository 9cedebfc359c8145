"""Reads training curves from what any program has written.

Every awkward file gets the handling stated here, which `Curve.notes` repeats
to the reader, or one sentence with file, line and rule as `CurveError`. Which
column is what: `columns.py`; what a file may be: `tables.py` and `logs.py`.
"""

import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

from scalerl_jax.scaling import columns, logs, points, tables
from scalerl_jax.scaling import series as series_lib

CurveError = tables.CurveError


class Curve(NamedTuple):
  """A curve in order of compute, and what was done to the file's rows."""

  path: str
  compute: Float64[np.ndarray, "N"]
  pass_rate: Float64[np.ndarray, "N"]
  trials: Float64[np.ndarray, "N"] | None
  compute_column: str
  pass_rate_column: str
  notes: tuple[str, ...]
  name: str = ""  # Of the run (and held-out set), to tell curves apart.
  task: str = ""  # Held-out set, where the file tells: only equal ones compare.
  recipe: str | None = None  # `name` without its seed, where one is told.
  # Correct and samples of each evaluation and prompt, where both are known.
  counts: (
    tuple[Float64[np.ndarray, "N P"], Float64[np.ndarray, "N P"]] | None
  ) = None

  def behind(self) -> dict[str, Any]:
    """What is known of the noise, as keywords of `fit_curve`."""
    if self.counts is not None:
      return {"counts": self.counts}
    return {"trials": self.trials}


def read_curves(
  path_or_paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
  *,
  compute_column: str | None = None,
  pass_rate_column: str | None = None,
  series: str | None = None,
) -> list[Curve]:
  """Reads every curve of one file or several.

  A file may be CSV (comma, semicolon, tab, bar or spaces; long, with a column
  of runs or held-out sets, or wide, with a column for each), JSON or JSON
  lines, a Weights & Biases or TensorBoard export, TensorBoard events, a verl
  console log, a trainer's state, or a workdir of this program. What is done to
  its rows, and told in `notes`:

  - rows are put in order of compute; those of equal compute are all kept, each
    as an evaluation of its own; compute 0 is an evaluation of R_0;
  - rows without a number for compute or pass rate are left out and named;
  - a percent sign, or values above 2 (above 10 for a reward or score) where
    most are above 1, make the whole file percent. Anything else above 1 is
    refused: smoothing that overshoots is not percent.

  Args:
    path_or_paths: of files or folders.
    compute_column: the column of compute; None to recognise it.
    pass_rate_column: the column of pass rate, or several with commas; None to
      recognise it.
    series: which curves of the files that hold several, by their name; several
      with commas; None for all.

  Returns:
    The curves in the order of the files, each with a note for each choice. Of
    a file with several, those with fewer than 6 usable points are left out and
    named, unless none has more.

  Raises:
    CurveError: for a file that is missing, empty, not text, without
      recognisable columns, with values out of range, or with fewer than 6
      usable points.
  """
  if isinstance(path_or_paths, str | os.PathLike):
    path_or_paths = [path_or_paths]
  paths = [pathlib.Path(path) for path in path_or_paths]
  if not paths:
    raise CurveError("a curve must have a file, got none.")
  twice = [path for path in paths if paths.count(path) > 1]
  if twice:
    raise CurveError(f"{twice[0]}: a file must be named once, got it twice.")
  found = [
    curve
    for path in paths
    for curve in _read_file(path, compute_column, pass_rate_column, series)
  ]
  if len(paths) > 1:
    found = _told_apart(paths, found)
  return found


def read_curve(
  path: str | os.PathLike[str],
  *,
  compute_column: str | None = None,
  pass_rate_column: str | None = None,
  series: str | None = None,
) -> Curve:
  """Reads one curve: the first, with a note, where the file holds several.

  Args:
    path, compute_column, pass_rate_column, series: as for `read_curves`.

  Returns:
    The curve, with a note for each choice that was made.

  Raises:
    CurveError: as for `read_curves`.
  """
  found = read_curves(
    path,
    compute_column=compute_column,
    pass_rate_column=pass_rate_column,
    series=series,
  )
  if len(found) == 1:
    return found[0]
  note = f"this is {found[0].name}, --series names another"
  return found[0]._replace(notes=(*found[0].notes, note))


def _title(path: pathlib.Path) -> str:
  """A file's name without its ending, or a folder's."""
  return path.resolve().name if os.path.isdir(path) else path.stem


def _told_apart(paths, found: list[Curve]) -> list[Curve]:
  """Names that hold the file's, by as much of its path as tells it apart."""
  parts = {str(p): (*p.parts[:-1], _title(p)) for p in paths}
  if len(set(parts.values())) < len(parts):  # a.csv and a.jsonl
    parts = {str(p): p.parts for p in paths}
  depth = 1
  while len({p[-depth:] for p in parts.values()}) < len(parts):
    depth += 1
  named = []
  for curve in found:
    own = "/".join(parts[curve.path][-depth:])
    recipe = series_lib.without_seed(own)
    if sum(c.path == curve.path for c in found) == 1:
      named.append(curve._replace(name=own, recipe=recipe))
      continue
    if recipe is not None or curve.recipe is not None:
      first = own if recipe is None else recipe
      last = curve.name if curve.recipe is None else curve.recipe
      recipe = f"{first}: {last}"
    named.append(curve._replace(name=f"{own}: {curve.name}", recipe=recipe))
  return named


def _read_file(path, compute_column, pass_rate_column, asked) -> list[Curve]:
  table = logs.read_table(path)
  keys = series_lib.keys(table, (compute_column, pass_rate_column))
  choice = columns.choose(
    table, compute=compute_column, pass_rate=pass_rate_column, keys=keys
  )
  notes = [*choice.notes, *table.notes]
  found = series_lib.pick(table, series_lib.split(table, keys, choice), asked)
  if len(found) > 1:
    by = f", told apart by column {' and '.join(keys)}" if keys else ""
    named = tables.listed(one.label for one in found)
    notes.append(f"the file holds {len(found)} curves ({named}){by}")
  comma = tables.decimal_comma(table, [choice.compute, *choice.pass_rates])
  if comma:
    notes.append("a comma is read as the decimal sign")
  scale, why = series_lib.scale(table, found, comma)
  notes += why
  curves, refused = [], []
  for one in found:
    try:
      curve = _curve(table, one, choice.compute, comma, scale, notes)
    except _TooFewError as error:
      refused.append((one, error))
    else:
      curves.append(
        curve._replace(path=str(path), name=one.label or _title(path))
      )
  if not curves:
    raise refused[0][1]
  if refused:
    named = tables.listed(f"{one.label} ({e.counts})" for one, e in refused)
    note = f"left out for want of usable points: {named}"
    curves[0] = curves[0]._replace(notes=(*curves[0].notes, note))
  return curves


class _TooFewError(CurveError):
  """Fewer points than a fit needs."""

  def __init__(self, where: str, counts: str, needed: int, why: Sequence[str]):
    told = f" ({'; '.join(why)})" if why else ""
    super().__init__(f"{where}: {counts}; {needed} are needed{told}.")
    self.counts = counts


def _rows(count) -> str:
  return f"{int(count)} row{'s' if count != 1 else ''}"


def _lines(rows: Sequence[tables.Row], chosen) -> str:
  numbers = [str(r.line) for r, c in zip(rows, chosen, strict=True) if c]
  more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
  return ", ".join(numbers[:8]) + more


def _left_out(table, one, x_column, comma, usable) -> list[str]:
  """The rows of a curve that cannot be used, counted and named."""
  words = [
    [
      cell
      for column in (x_column, one.pass_rate)
      if tables.number(cell := row.cells.get(column), comma) is None
    ]
    for row in one.rows
  ]
  text = np.array([bool(w) for w in words], bool)
  empty = ~usable & ~text
  told = []
  if empty.any():
    told.append(
      f"{_rows(empty.sum())} left out without a number for compute or pass "
      f"rate: {table.unit}s {_lines(one.rows, empty)}"
    )
  if text.any():
    example = tables.plain(next(filter(None, words))[0], 30)
    told.append(
      f"{_rows(text.sum())} left out with text for a number (such as "
      f"{example!r}): {table.unit}s {_lines(one.rows, text)}"
    )
  return told


def _trials(table, rows) -> np.ndarray | None:
  """Samples behind each evaluation, where the file tells them."""
  ours = {"prompts", "samples_per_prompt"} <= set(table.columns)

  def told(row, column):
    value = tables.number(row.cells.get(column)) if ours else None
    return np.nan if value is None else value

  known = np.array(
    [
      told(row, "prompts") * told(row, "samples_per_prompt")
      if np.isnan(row.trials)
      else row.trials
      for row in rows
    ]
  )
  return known if (np.isfinite(known) & (known >= 1)).all() else None


def _counts(rows):
  """Of each evaluation and prompt: correct, and samples of 2 or more."""
  known = [row.counts for row in rows]
  if any(c is None for c in known) or len({c[0].shape for c in known}) != 1:
    return None
  correct, samples = (
    np.stack([c[k] for c in known]).astype(float) for k in (0, 1)
  )
  good = (samples >= 2) & (correct >= 0) & (correct <= samples)
  return (correct, samples) if good.all() else None


def _curve(table, one, x_column, comma, scale, notes) -> Curve:
  where = f"{table.name}, {one.label}" if one.label else table.name
  x = series_lib.numbers(table, one, x_column, comma)
  y = series_lib.numbers(table, one, one.pass_rate, comma)
  usable = np.isfinite(x) & np.isfinite(y)
  told = [*notes, *_left_out(table, one, x_column, comma, usable)]
  rows = [r for r, u in zip(one.rows, usable, strict=True) if u]
  x, y = x[usable], y[usable] / scale
  if (x < 0).any():
    first = int((x < 0).argmax())
    raise CurveError(
      f"{table.name}, {table.unit} {rows[first].line}: {x_column} must be at "
      f"least 0, got {x[first]:g}."
    )
  if len(x) < points.FEWEST_POINTS:
    counts = f"{len(x)} usable points of {len(one.rows)} rows"
    why = told[len(notes) :]
    raise _TooFewError(where, counts, points.FEWEST_POINTS, why)
  if not points.enough(x):
    different = len(np.unique(x[x > 0]))
    counts = f"{len(x)} points at {different} values of {x_column} above 0"
    raise _TooFewError(where, counts, points.FEWEST_COMPUTES, ())
  order = np.argsort(x, kind="stable")
  if (np.diff(x) < 0).any():
    told.append("rows put in order of compute")
  x, y = x[order], y[order]
  twice = int((np.diff(x) == 0).sum())
  if twice:
    told.append(
      f"{_rows(twice)} repeating a compute already there, kept as evaluations "
      "of their own"
    )
  if x[0] == 0:
    told.append(
      f"{_rows((x == 0).sum())} at compute 0, kept as a measurement of R_0"
    )
  trials, counts = _trials(table, rows), _counts(rows)
  if counts is not None:
    counts = counts[0][order], counts[1][order]
    told.append("noise from the counts of each prompt (evaluations.npz)")
  return Curve(
    table.name,
    x,
    y,
    None if trials is None else trials[order],
    x_column,
    one.pass_rate,
    tuple(told),
    one.label,
    one.task,
    one.recipe,
    counts,
  )
