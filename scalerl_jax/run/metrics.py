"""What a run writes down: metrics, the curve, evaluations, TensorBoard events.

Everything is on disk once a method returns, so that a kill loses at most the
line being written; a resumed run first cuts off what lies beyond its state.
"""

import csv
import io
import json
import math
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from tensorboardX import SummaryWriter

from scalerl_jax.run.wandb_mirror import WandbMirror

AXES = (
  "trained_tokens",
  "generated_tokens",
  "flops_full",
  "flops_spent",
  "device_seconds",
  "wall_seconds",
)
CURVE_COLUMNS = (
  *("step", "task"),
  *AXES,
  *("pass_rate", "prompts", "samples_per_prompt"),
)
_COUNTS = ("step", "trained_tokens", "generated_tokens", "prompts")
# Of `evaluations.npz`: one array a field and held-out set, `set/field`.
EVALUATION_FIELDS = ("correct", "samples", "mean_length", "truncated")

METRICS, CURVE, EVALUATIONS, EVENTS = (
  "metrics.jsonl",
  "curve.csv",
  "evaluations.npz",
  "events",
)


class MetricsWriter:
  """Owns `metrics.jsonl`, `curve.csv`, `evaluations.npz` and `events/`.

  Keys under `time/` are the only ones that may differ between two runs of one
  config under the logical schedule; the caller names them so.

  Args:
    workdir: the run's folder; made if missing.
    resume_step: the step of the state that the run goes on from: lines, rows
      and evaluations beyond it are cut off. None for a run that starts: files
      of an earlier one are renamed to `*.old`, see `set_aside`.
    mirror: is told every number too.

  Raises:
    ValueError: a file to go on with is not one of ours.
  """

  def __init__(
    self,
    workdir: str | os.PathLike[str],
    *,
    resume_step: int | None,
    mirror: WandbMirror | None = None,
  ):
    self._mirror = mirror
    self.workdir = pathlib.Path(workdir)
    self.workdir.mkdir(parents=True, exist_ok=True)
    self.set_aside: tuple[str, ...] = ()  # names of files renamed to `*.old`
    self._rows: list[dict[str, Any]] = []
    self._evaluations: dict[str, dict[str, list[Any]]] = {}
    if resume_step is None:
      self._set_aside()
    else:
      self._cut_off(resume_step)
    self._metrics = (self.workdir / METRICS).open("a", encoding="utf-8")
    self._curve = (self.workdir / CURVE).open("a", encoding="utf-8")
    if self._curve.tell() == 0:
      self._append(self._curve, _csv_line(CURVE_COLUMNS))
    self._events = SummaryWriter(
      str(self.workdir / EVENTS),
      purge_step=None if resume_step is None else resume_step + 1,
      # Files are named by the second: a quick restart must not overwrite.
      filename_suffix="" if resume_step is None else f".from{resume_step}",
    )

  def step(self, step: int, values: Mapping[str, Any]) -> None:
    """Writes the line of an update.

    Args:
      step: updates done.
      values: numbers, texts, lists of them, or None; scalars of numpy and JAX
        too. Numbers that are not finite are written as null.
    """
    line = {"step": int(step)} | {n: _plain(v) for n, v in values.items()}
    self._append(self._metrics, json.dumps(line, allow_nan=False) + "\n")
    self._add_events(step, line)

  def evaluation(
    self,
    step: int,
    task: str,
    axes: Mapping[str, Any],
    correct: npt.ArrayLike,
    samples: npt.ArrayLike,
    mean_length: npt.ArrayLike,
    truncated: npt.ArrayLike,
  ) -> float:
    """Writes an evaluation of one held-out set.

    Args:
      step: updates done.
      task: name of the held-out set.
      axes: compute so far, by the names in `AXES`.
      correct, samples, truncated: completions of each prompt that were right,
        were drawn, ran out of budget.
      mean_length: tokens of a completion, for each prompt.

    Returns:
      The pass rate.

    Raises:
      ValueError: other axes than `AXES`, an evaluation that exists already, or
        arrays that do not match each other or the set's earlier ones.
    """
    if set(axes) != set(AXES):
      raise ValueError(
        f"axes must be exactly {', '.join(AXES)}, got {', '.join(axes)}"
      )
    values = (correct, samples, mean_length, truncated)
    arrays = dict(zip(EVALUATION_FIELDS, map(np.asarray, values), strict=True))
    before = self._evaluations.setdefault(
      task, {name: [] for name in ("step", *EVALUATION_FIELDS)}
    )
    self._check(step, task, arrays, before)
    before["step"].append(step)
    for name, array in arrays.items():
      before[name].append(array)
    prompts, drawn = arrays["samples"].size, int(arrays["samples"].sum())
    row = {
      "step": int(step),
      "task": task,
      **{name: _plain(axes[name]) for name in AXES},
      "pass_rate": int(arrays["correct"].sum()) / drawn,
      "prompts": prompts,
      "samples_per_prompt": (
        drawn / prompts if drawn % prompts else drawn // prompts
      ),
    }
    _replace(self.workdir / EVALUATIONS, self._packed())
    self._append(self._curve, _csv_line(row[name] for name in CURVE_COLUMNS))
    self._rows.append(row)
    self._add_events(step, {f"pass_rate/{task}": row["pass_rate"]})
    self._events.flush()
    return row["pass_rate"]

  def curve(self, task: str) -> dict[str, np.ndarray]:
    """The columns of one held-out set's evaluations so far; maybe empty."""
    return _columns([row for row in self._rows if row["task"] == task])

  def close(self) -> None:
    """Closes all files; a second call does nothing."""
    self._metrics.close()
    self._curve.close()
    self._events.close()
    if self._mirror is not None:
      self._mirror.close()
      self._mirror = None

  def _append(self, file: io.TextIOWrapper, text: str) -> None:
    file.write(text)
    file.flush()

  def _add_events(self, step: int, values: Mapping[str, Any]) -> None:
    numbers = {
      name: value
      for name, value in values.items()
      if name != "step" and isinstance(value, int | float)
    }
    for name, value in numbers.items():
      self._events.add_scalar(name, value, step)
    if self._mirror is not None:
      self._mirror.log(step, numbers)

  def _check(self, step, task, arrays, before) -> None:
    if step in before["step"]:
      raise ValueError(
        f"step {step} of {task!r} was evaluated already; evaluate a set once a"
        " step, before the state of that step is saved"
      )
    prompts = before["correct"][-1:] or [arrays["correct"]]
    shapes = {name: array.shape for name, array in arrays.items()}
    if set(shapes.values()) != {prompts[0].shape} or len(prompts[0].shape) != 1:
      raise ValueError(
        f"an evaluation of {task!r} needs one number for each of its"
        f" {prompts[0].size} prompts, got shapes {shapes}"
      )
    if not arrays["samples"].sum() > 0:
      raise ValueError(f"an evaluation of {task!r} must have samples, got none")

  def _packed(self) -> bytes:
    """`evaluations.npz` as bytes."""
    arrays = {
      f"{task}/{name}": np.stack(values)
      for task, fields in self._evaluations.items()
      for name, values in fields.items()
      if values
    }
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # pyright: ignore
    return buffer.getvalue()

  def _set_aside(self) -> None:
    found = [
      name
      for name in (METRICS, CURVE, EVALUATIONS, EVENTS)
      if (self.workdir / name).exists()
    ]
    for name in found:
      old = self.workdir / f"{name}.old"
      if old.is_dir():
        shutil.rmtree(old)
      (self.workdir / name).replace(old)
    self.set_aside = tuple(found)

  def _cut_off(self, step: int) -> None:
    """Leaves what the state of this step knows of."""
    lines = [
      json.dumps(line) + "\n"
      for line in read_metrics(self.workdir)
      if line["step"] <= step
    ]
    _replace(self.workdir / METRICS, "".join(lines).encode())
    self._rows = [
      row for row in _read_rows(self.workdir) if row["step"] <= step
    ]
    rows = [_csv_line(row[n] for n in CURVE_COLUMNS) for row in self._rows]
    text = _csv_line(CURVE_COLUMNS) + "".join(rows)
    _replace(self.workdir / CURVE, text.encode())
    for task, fields in read_evaluations(self.workdir).items():
      keep = fields["step"] <= step
      self._evaluations[task] = {
        name: list(values[keep]) for name, values in fields.items()
      }
    if self._evaluations:
      _replace(self.workdir / EVALUATIONS, self._packed())


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """The lines of `metrics.jsonl`; a half-written last one is left out.

  Args:
    workdir: the run's folder; a missing file is no lines.

  Raises:
    ValueError: a line that is not a JSON object with a step.
  """
  lines = []
  for number, text in _whole_lines(pathlib.Path(workdir) / METRICS):
    try:
      line = json.loads(text)
    except json.JSONDecodeError:
      line = None
    if not isinstance(line, dict) or not isinstance(line.get("step"), int):
      raise ValueError(
        f"{METRICS}, line {number}: a line must be a JSON object with a step,"
        f" got {text[:40]!r}; mend or remove it"
      )
    lines.append(line)
  return lines


def read_curves(
  workdir: str | os.PathLike[str],
) -> dict[str, dict[str, np.ndarray]]:
  """`curve.csv` by held-out set, then by column, in the order written.

  Args:
    workdir: the run's folder; a missing file is no sets.

  Raises:
    ValueError: other columns than ours, or a row that is not theirs.
  """
  rows = _read_rows(pathlib.Path(workdir))
  return {
    task: _columns([row for row in rows if row["task"] == task])
    for task in dict.fromkeys(row["task"] for row in rows)
  }


def read_evaluations(
  workdir: str | os.PathLike[str],
) -> dict[str, dict[str, np.ndarray]]:
  """`evaluations.npz` by held-out set, then by field.

  Args:
    workdir: the run's folder; a missing file is no sets.

  Returns:
    For each set `step` [E], and `correct`, `samples`, `mean_length`,
    `truncated` [E, P].
  """
  path = pathlib.Path(workdir) / EVALUATIONS
  sets: dict[str, dict[str, np.ndarray]] = {}
  if path.exists():
    with np.load(path, allow_pickle=False) as arrays:
      for key, array in arrays.items():
        task, _, name = key.rpartition("/")
        sets.setdefault(task, {})[name] = array
  return sets


def _plain(value: Any) -> Any:
  """A JSON value: short numbers that read back as they were, null for NaN."""
  if value is None or isinstance(value, str | bool | int):
    return value
  if isinstance(value, Mapping):
    return {str(name): _plain(item) for name, item in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(item) for item in value]
  if isinstance(value, float) and not isinstance(value, np.generic):
    return value if math.isfinite(value) else None
  array = np.asarray(value)
  if array.ndim:
    return [_plain(item) for item in array]
  if array.dtype.kind in "biuU":
    return array.item()
  # As short as its own precision needs: float32 0.1 is 0.1.
  number = float(str(array[()]))
  return number if math.isfinite(number) else None


def _csv_line(cells: Any) -> str:
  buffer = io.StringIO()
  csv.writer(buffer, lineterminator="\n").writerow(cells)
  return buffer.getvalue()


def _whole_lines(path: pathlib.Path) -> list[tuple[int, str]]:
  """Numbered lines that end as lines do: a kill may leave a last one short."""
  if not path.exists():
    return []
  text = path.read_text(encoding="utf-8", errors="replace")
  return list(enumerate(text.split("\n")[:-1], 1))


def _read_rows(workdir: pathlib.Path) -> list[dict[str, Any]]:
  lines = _whole_lines(workdir / CURVE)
  rows = []
  for number, text in lines:
    cells = next(csv.reader([text]), [])
    if number == 1 and tuple(cells) == CURVE_COLUMNS:
      continue
    try:
      row: dict[str, Any] = dict(zip(CURVE_COLUMNS, cells, strict=True))
      for name in CURVE_COLUMNS:
        if name != "task":
          row[name] = _number(row[name])
    except ValueError:
      raise ValueError(
        f"{CURVE}, line {number}: a row must have the columns"
        f" {', '.join(CURVE_COLUMNS)}, got {text[:60]!r}; mend or remove it"
      ) from None
    rows.append(row)
  return rows


def _number(cell: str) -> int | float | None:
  if not cell:
    return None
  return int(cell) if cell.lstrip("-").isdigit() else float(cell)


def _columns(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
  return {
    name: np.array(
      [np.nan if row[name] is None else row[name] for row in rows],
      np.int64 if name in _COUNTS else np.float64,
    )
    for name in CURVE_COLUMNS
    if name != "task"
  }


def _replace(path: pathlib.Path, data: bytes) -> None:
  """Writes a file whole or not at all."""
  partial = path.with_name(f"{path.name}.partial")
  partial.write_bytes(data)
  partial.replace(path)
