"""Tables as people save them: CSV and its relatives, JSON and JSON lines.

Text in, rows with their line numbers out. What a column means is decided in
`columns.py`; logs that are not tables by themselves are read in `logs.py`.
"""

import csv
import functools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

_MISSING = {"", "-", "nan", "na", "n/a", "none", "null", "nil"}
# Keys under which a log keeps its records, and those that only wrap them.
_RECORDS = ("log_history", "history", "records", "rows", "data", "metrics")
_WRAPPERS = ("data", "metrics")
_GROUP = r"[,'’ \u00a0\u2009\u202f]"
_ENGLISH = re.compile(rf"[+-]?[1-9]\d{{0,2}}(?:{_GROUP}\d{{3}})+(?:\.\d+)?")
_COMMA = re.compile(r"[+-]?(?:\d+|[1-9]\d{0,2}(?:[. ]\d{3})+)?,\d+(?:[eE].*)?")


class CurveError(ValueError):
  """A curve file that cannot be fitted: one sentence for the user."""


class Row(NamedTuple):
  """One line of a table; cells that it does not have are not in `cells`."""

  line: int
  cells: Mapping[str, object]
  trials: float = math.nan
  # Correct completions and samples of each prompt, where they are known.
  counts: tuple[np.ndarray, np.ndarray] | None = None


class Table(NamedTuple):
  """The rows of one file, and what was done to read them."""

  name: str  # Path, for sentences.
  columns: tuple[str, ...]
  rows: tuple[Row, ...]
  notes: tuple[str, ...] = ()
  unit: str = "line"  # What `Row.line` counts.


def plain(text: object, most: int = 60) -> str:
  """Text on one line, cut where it is long.

  Args:
    text: anything.
    most: characters kept.
  """
  line = " ".join(str(text).split())
  return line if len(line) <= most else line[: most - 1] + "…"


def listed(names: Iterable[str], most: int = 40) -> str:
  """Names for a sentence, each on one line.

  Args:
    names: of columns or curves.
    most: names told; the rest is counted.
  """
  names = [plain(name) for name in names]
  more = f" and {len(names) - most} more" if len(names) > most else ""
  return ", ".join(names[:most]) + more


def number(cell: object, comma: bool = False) -> float | None:
  """A cell as a number: NaN where it says "none", None where it is text.

  Thousands may be grouped by comma, space or apostrophe; a percent sign is
  dropped, and whoever asks for the number asks for the sign as well.

  Args:
    cell: of a CSV or JSON file.
    comma: whether a comma is the decimal sign.

  Example:
    >>> number("1,234,567"), number("45 %"), number("0,45", comma=True)
    (1234567.0, 45.0, 0.45)
    >>> number("n/a"), number("high")
    (nan, None)
  """
  if cell is None:
    return math.nan
  if isinstance(cell, str):
    cell = cell.strip()
    if cell.endswith("%"):
      cell = cell[:-1].rstrip()
    if cell.lower() in _MISSING:
      return math.nan
    if comma and _COMMA.fullmatch(cell):
      cell = re.sub(r"[. ]", "", cell).replace(",", ".")
    elif comma and re.fullmatch(r"[+-]?[1-9]\d{0,2}(?:\.\d{3})+", cell):
      cell = cell.replace(".", "")
    elif _ENGLISH.fullmatch(cell):
      cell = re.sub(_GROUP, "", cell)
  elif isinstance(cell, bool) or not isinstance(cell, int | float):
    return None
  try:
    return float(cell)
  except (ValueError, OverflowError):
    return None


def decimal_comma(table: Table, columns: Sequence[str]) -> bool:
  """Whether a comma is the decimal sign in these columns of a file.

  `1,234` can be read both ways; it follows the cells that cannot, and is a
  thousand where all can.

  Args:
    table: of one file.
    columns: those whose numbers are wanted.

  Raises:
    CurveError: where some cells say one thing and some the other.
  """
  decimal, grouped = None, None
  for row in table.rows:
    for column in columns:
      cell = row.cells.get(column)
      if not isinstance(cell, str) or "," not in cell:
        continue
      cell = cell.strip().rstrip("%").rstrip()
      if _COMMA.fullmatch(cell) and not _ENGLISH.fullmatch(cell):
        decimal = decimal or (row.line, cell)
      elif cell.count(",") > 1 or "." in cell:
        grouped = grouped or (row.line, cell)
  if decimal and grouped:
    raise CurveError(
      f"{table.name}: a comma must mean one thing in a file, and it is the "
      f"decimal sign in {plain(decimal[1])!r} ({table.unit} {decimal[0]}) and "
      f"groups thousands in {plain(grouped[1])!r} ({table.unit} {grouped[0]}); "
      "write a decimal point."
    )
  return decimal is not None


def parse(name: str, text: str) -> Table:
  """The table that a text holds: JSON, JSON lines, or cells and a delimiter.

  Args:
    name: of the file, for sentences.
    text: all of it.

  Raises:
    CurveError: for an empty text, a line that is not JSON, or a row with more
      cells than the header.
  """
  text = text.replace("\r\n", "\n").replace("\r", "\n")
  if not text.strip():
    raise CurveError(f"{name}: the file is empty; a curve needs rows.")
  if text.lstrip()[0] in "{[":
    return _json(name, text)
  return _delimited(name, text.rstrip().split("\n"))


def from_records(
  name: str,
  records: Iterable[tuple[int, Mapping[str, object]]],
  *,
  notes: tuple[str, ...] = (),
  unit: str = "line",
) -> Table:
  """A table of numbered records, each with the columns that it has.

  Args:
    name: of the file, for sentences.
    records: number and cells of each.
    notes: what was done to read them.
    unit: what the numbers count.
  """
  columns: dict[str, None] = {}
  rows = []
  for line, cells in records:
    columns.update(dict.fromkeys(cells))
    rows.append(Row(line, cells))
  return Table(name, tuple(columns), tuple(rows), notes, unit)


@functools.lru_cache(maxsize=4096)  # A log has the same keys at each row.
def _one_line(name: str) -> str:
  return " ".join(name.split())


def _flat(record: Mapping) -> dict[str, object]:
  """A record whose inner objects are joined by a slash, as loggers do."""
  flat: dict[str, object] = {}
  waiting = [("", record)]
  while waiting:
    prefix, inner = waiting.pop()
    for key, value in inner.items():
      key = _one_line(key)
      if isinstance(value, dict):
        inside = "" if not prefix and key in _WRAPPERS else f"{prefix}{key}/"
        waiting.append((inside, value))
      else:
        flat.setdefault(f"{prefix}{key}", value)
  return flat


def _json_value(text: str):
  """The value of a text, or an exception's class where it has none."""
  try:
    return json.loads(text)
  except (ValueError, RecursionError):  # Too many digits is a ValueError.
    return ValueError


def _json(name: str, text: str) -> Table:
  whole = _json_value(text)
  if whole is ValueError:
    return _json_lines(name, text.split("\n"))
  records = _records(whole)
  if records is None:
    raise CurveError(
      f"{name}: a JSON file must hold a list of objects, lists of one length, "
      f"or an object with one of {', '.join(_RECORDS)}, and this one does not."
    )
  return from_records(
    name, ((i, _flat(r)) for i, r in enumerate(records, 1)), unit="record"
  )


def _records(whole) -> Sequence[Mapping] | None:
  """The records of a JSON value, in the shapes in which logs keep them."""
  if isinstance(whole, list):
    return whole if whole and all(isinstance(r, dict) for r in whole) else None
  if not isinstance(whole, dict):
    return None
  for key in _RECORDS:
    inner = whole.get(key)
    if isinstance(inner, list) and any(isinstance(r, dict) for r in inner):
      return _records(inner)
    if isinstance(inner, dict) and _by_column(inner):
      return _by_column(inner)
  return _by_column(whole) or [whole]


def _by_column(whole: Mapping) -> list[dict] | None:
  """Records of {"step": [...], "pass_rate": [...]}."""
  lists = {k: v for k, v in whole.items() if isinstance(v, list)}
  if len(lists) < 2 or len({len(v) for v in lists.values()}) > 1:
    return None
  return [
    dict(zip(lists, cells, strict=True))
    for cells in zip(*lists.values(), strict=True)
  ]


def _json_lines(name: str, lines: Sequence[str]) -> Table:
  records, notes = [], ()
  written = [i for i, line in enumerate(lines, 1) if line.strip()]
  for i in written:
    record = _json_value(lines[i - 1])
    if isinstance(record, dict):
      records.append((i, _flat(record)))
    elif i == written[-1] and records and lines[i - 1].lstrip()[0] == "{":
      # A run that is still writing.
      notes = (f"line {i} is cut off and left out",)
    else:
      raise CurveError(
        f"{name}, line {i}: each line must be one JSON object, got "
        f"{plain(lines[i - 1], 40)!r}."
      )
  return from_records(name, records, notes=notes)


def _cells(line: str, delimiter: str | None) -> list[str]:
  """The cells of one line, as a guess: a broken line is one cell."""
  if delimiter is None:
    return line.split()
  try:
    found = next(csv.reader([line], delimiter=delimiter), [])
  except csv.Error:
    return [line]
  return [cell.strip() for cell in found]


def _delimiter(lines: Sequence[str]) -> str | None:
  """What parts the cells, by the first lines; None for white space."""
  first = [line for line in lines if line.strip()][:20]
  for delimiter in ("\t", ";", ",", "|", None):
    counts = [len(_cells(line, delimiter)) for line in first]
    if counts[0] > 1 and 2 * counts.count(counts[0]) >= len(counts):
      return delimiter
  return next((d for d in "\t;," if d in first[0]), ",")


def _start(lines: Sequence[str]) -> tuple[int, str | None, str | None]:
  """Index of the first line of the table, and its delimiter where told."""
  comment, i = None, 0
  while i < len(lines) and not lines[i].strip().lstrip("#"):
    i += 1
  told = re.fullmatch(r"\s*sep=(.)\s*", lines[i]) if i < len(lines) else None
  if told:
    return i + 1, told[1], None
  while i < len(lines) and (
    not lines[i].strip() or lines[i].lstrip().startswith("#")
  ):
    comment = lines[i].lstrip().lstrip("#") if lines[i].strip() else comment
    i += 1
  return i, None, comment


def _delimited(name: str, lines: list[str]) -> Table:
  start, delimiter, comment = _start(lines)
  if start >= len(lines):
    raise CurveError(f"{name}: the file holds no rows; a curve needs rows.")
  if delimiter is None:
    delimiter = _delimiter(lines[start:])
  columns: list[str] = []
  rows = []
  for line, cells in _split(name, lines, start, delimiter):
    if not any(cells):
      continue
    if not columns:
      columns, is_header = _header(name, line, cells, comment, delimiter)
      if is_header:
        continue
    if any(cells[len(columns) :]):
      raise CurveError(
        f"{name}, line {line}: a row must have the header's {len(columns)} "
        f"cells, got {len(cells)}; put a cell that holds a "
        f"{delimiter or 'space'!r} in quotes."
      )
    rows.append(Row(line, dict(zip(columns, cells, strict=False))))
  return Table(name, tuple(columns), tuple(rows))


def _header(name, line, cells, comment, delimiter):
  """The columns, and whether this line named them."""
  if any(number(cell) is None for cell in cells):
    named = enumerate(cells, 1)
    return [_one_line(c) or f"column {i}" for i, c in named], True
  # numpy.savetxt writes the header as a comment.
  above = [c for c in _cells(comment or "", delimiter) if c]
  if len(above) == len(cells) and len(cells) > 1:
    return above, False
  if len(cells) != 2:
    raise CurveError(
      f"{name}, line {line}: without a header a file must have two columns, "
      f"compute and pass rate, and this one has {len(cells)}; add a header "
      "line."
    )
  return ["compute", "pass_rate"], False


def _split(name, lines, start, delimiter) -> Iterator[tuple[int, list[str]]]:
  """Number and cells of each row; a row may span lines inside quotes."""
  if delimiter is None:
    for i, line in enumerate(lines[start:], start + 1):
      yield i, line.split()
    return
  reader = csv.reader(
    lines[start:], delimiter=delimiter, strict=True, skipinitialspace=True
  )
  while True:
    line = start + reader.line_num + 1
    try:
      cells = next(reader)
    except StopIteration:
      return
    except csv.Error as error:
      raise CurveError(f"{name}, line {line}: not a CSV row ({error}).") from (
        None
      )
    yield line, [cell.strip() for cell in cells]
