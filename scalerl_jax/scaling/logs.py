"""Files and folders as training programs leave them, as tables.

Our workdirs, TensorBoard events, Weights & Biases exports, trainer states, verl
logs. None of those programs is needed to read what they wrote.
"""

import os
import pathlib
import re
from collections.abc import Iterator

import numpy as np

from scalerl_jax.scaling import columns as columns_lib
from scalerl_jax.scaling import events, tables

CURVE, EVALUATIONS, STATE = "curve.csv", "evaluations.npz", "trainer_state.json"
_BYTE_ORDER_MARKS = (
  (b"\xff\xfe", "utf-16"),
  (b"\xfe\xff", "utf-16"),
  (b"\xef\xbb\xbf", "utf-8-sig"),
)
# verl's console logger: `step:10 - actor/entropy:0.31 - val-core/...:0.52`.
_CONSOLE = re.compile(r"\bstep:(\d+)((?: - [^\s:]+:\S+)+)")
_CONSOLE_CELL = re.compile(r" - ([^\s:]+):(?:np\.\w+\()?([^\s)]+)")
_SHARED = {"epoch", *columns_lib.STEP_NAMES}
_SHARED |= {*columns_lib.RUN_NAMES, *columns_lib.TASK_NAMES}


def read_table(path: pathlib.Path) -> tables.Table:
  """The table of a file or folder, whichever program wrote it.

  A folder is one of ours (`curve.csv`, with the samples of `evaluations.npz`),
  one of TensorBoard's, at any depth, or a trainer's (`trainer_state.json`, of
  the last checkpoint where it has none itself).

  Args:
    path: of a file or folder.

  Raises:
    CurveError: for what is missing, empty, not text, or none of these.
  """
  if os.path.isdir(path):  # False, too, for what is no path.
    return _folder(path)
  name = str(path)
  data = _bytes(path)
  if events.is_event_file(data[:12]) or "tfevents" in path.name:
    return _event_table(name, [(path, data)], path.parent)
  marks = (code for mark, code in _BYTE_ORDER_MARKS if data.startswith(mark))
  try:
    text = data.decode(next(marks, "utf-8"))
  except UnicodeDecodeError:
    text = "\0"
  if "\0" in text:
    raise tables.CurveError(
      f"{name}: a curve file must be text (CSV or JSON in UTF-8) or events of "
      "TensorBoard, and this one is neither; export it as CSV."
    )
  if text.lstrip()[:1] in {"{", "["}:
    return _merged(tables.parse(name, text))
  console = list(_CONSOLE.finditer(text)) if "step:" in text else []
  if console:
    return _console_table(name, text, console)
  return _one_run_a_row(tables.parse(name, text))


def _bytes(path: pathlib.Path) -> bytes:
  try:
    return path.read_bytes()
  except FileNotFoundError:
    raise tables.CurveError(f"{path}: there is no such file.") from None
  except (OSError, ValueError) as error:
    reason = getattr(error, "strerror", None) or error
    raise tables.CurveError(f"{path}: cannot be read ({reason}).") from None


def _folder(path: pathlib.Path) -> tables.Table:
  if (path / CURVE).exists():
    return _with_samples(path, read_table(path / CURVE))
  files = sorted(path.rglob("*tfevents*"))
  files = [(f, _bytes(f)) for f in files if f.is_file()]
  if files:
    return _event_table(str(path), files, path)
  states = [
    (int(f.parent.name.rpartition("-")[2]), f)
    for f in path.glob(f"checkpoint-*/{STATE}")
    if f.parent.name.rpartition("-")[2].isdecimal()
  ]
  if (path / STATE).exists():
    return read_table(path / STATE)
  if states:
    return read_table(max(states)[1])
  raise tables.CurveError(
    f"{path}: a folder must hold {CURVE}, TensorBoard event files or {STATE} "
    "to be read as a curve, and this one does not; name a file."
  )


def _with_samples(folder: pathlib.Path, table: tables.Table) -> tables.Table:
  """Our curve with the samples that each evaluation really had."""
  file = folder / EVALUATIONS
  if not file.exists():
    return table
  found: dict[tuple[str, float], tuple[np.ndarray, np.ndarray]] = {}
  try:
    with np.load(file, allow_pickle=False) as arrays:
      for key in arrays:
        task, _, field = key.rpartition("/")
        if field == "step":
          correct, samples = (
            arrays[f"{task}/{name}"].reshape(len(arrays[key]), -1)
            for name in ("correct", "samples")
          )
          for row, step in enumerate(arrays[key]):
            found[task, float(step)] = correct[row], samples[row]
  except Exception as error:  # A file that is broken breaks in many ways.
    raise tables.CurveError(
      f"{file}: cannot be read ({type(error).__name__}); mend it, or move it "
      "away to fit without the numbers of samples."
    ) from None
  rows = []
  for row in table.rows:
    step = tables.number(row.cells.get("step"))
    task = str(row.cells.get("task"))
    counts = None if step is None else found.get((task, step))
    if counts is not None:
      total = float(counts[1].sum(dtype=np.float64))
      row = row._replace(trials=total, counts=counts)
    rows.append(row)
  return table._replace(rows=tuple(rows))


def _event_table(name, files, root: pathlib.Path) -> tables.Table:
  """One row a run and step, one column a tag; a folder of files is a run."""
  rows: dict[tuple, dict[str, object]] = {}
  starts: dict[str, float] = {}
  for file, data in files:
    run = str(file.parent.relative_to(root))
    try:
      scalars = events.read_scalars(data)
    except ValueError as error:
      raise tables.CurveError(
        f"{file}: not a whole TensorBoard event file ({error})."
      ) from None
    for scalar in scalars:
      start = starts.setdefault(run, scalar.wall_time)
      seconds = scalar.wall_time - start
      twice = 0
      # A tag logged again at its step is another row.
      while scalar.tag in rows.setdefault((run, scalar.step, twice), {}):
        twice += 1
      row = rows[run, scalar.step, twice]
      row.setdefault("run", run)
      row.setdefault("step", scalar.step)
      row.setdefault("wall_seconds", seconds)
      row[" ".join(scalar.tag.split()) or "value"] = scalar.value
  if not rows:
    raise tables.CurveError(
      f"{name}: the TensorBoard events hold no scalars; a curve needs them."
    )
  return tables.from_records(name, enumerate(rows.values(), 1), unit="row")


def _console_table(name, text: str, found) -> tables.Table:
  """The metrics among a console's other lines."""
  records, line, at = [], 1, 0
  for match in found:
    line, at = line + text.count("\n", at, match.start()), match.start()
    cells = dict(_CONSOLE_CELL.findall(match[2]))
    records.append((line, {"step": match[1], **cells}))
  note = f"{len(records)} lines of metrics found in a console's log"
  return tables.from_records(name, records, notes=(note,))


def _merged(table: tables.Table) -> tables.Table:
  """Neighbouring records of one step that complement each other as one row.

  Trainers log their evaluation and their token counts apart.
  """
  rows: list[tables.Row] = []
  for row in table.rows:
    if rows and (both := _complement(rows[-1].cells, row.cells)):
      rows[-1] = row._replace(cells=both)
    else:
      rows.append(row)
  return table._replace(rows=tuple(rows))


def _complement(a, b) -> dict[str, object] | None:
  common = a.keys() & b.keys()
  if any(a[c] != b[c] for c in common):
    return None
  stems = {columns_lib.stem(c) for c in common}
  if not (stems <= _SHARED and stems & set(columns_lib.STEP_NAMES)):
    return None
  return {**a, **b}


def _one_run_a_row(table: tables.Table) -> tables.Table:
  """A Weights & Biases export, `RUN - METRIC` across, as one row a run."""
  named = {}
  for column in table.columns:
    run, dash, metric = column.rpartition(" - ")
    if dash and not metric.endswith(("__MIN", "__MAX")):
      named[column] = run, metric
  edges = [c for c in table.columns if c.endswith(("__MIN", "__MAX"))]
  if not named or not (edges or len(named) + 1 == len(table.columns)):
    return table
  shared = [c for c in table.columns if c not in named and c not in edges]
  runs = list(dict.fromkeys(run for run, _ in named.values()))

  def melted() -> Iterator[tuple[int, dict[str, object]]]:
    for run in runs:
      of_run = {c: m for c, (r, m) in named.items() if r == run}
      for row in table.rows:
        cells = {m: row.cells.get(c) for c, m in of_run.items()}
        # A step at which only another run logged is no row of this one.
        if any(cell not in (None, "") for cell in cells.values()):
          yield (
            row.line,
            {**{c: row.cells.get(c) for c in shared}, **cells, "run": run},
          )

  note = f"{len(runs)} runs of a Weights & Biases export"
  return tables.from_records(
    table.name, melted(), notes=(*table.notes, note), unit=table.unit
  )
