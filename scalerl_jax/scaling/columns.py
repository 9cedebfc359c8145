"""Which columns of a table are compute and pass rate, by their usual names.

Names of this program, of verl, TRL, prime-rl, OpenRLHF and NeMo-RL logs, and
what people write by hand. A choice is never silent: `Choice.notes` tells it.
"""

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from scalerl_jax.scaling import tables

# The first that a file has is taken, if it grows and stands beside the pass
# rates. Full FLOPs come first: the cost of the work asked for.
COMPUTE_NAMES = (
  *("compute", "flops_full", "compute_flops", "flops", "total_flops"),
  *("train_flops", "training_flops", "total_flos", "pflops", "compute_pflops"),
  *("compute_gpu_hours", "gpu_hours", "total_gpu_hours", "accelerator_hours"),
  *("device_hours", "tpu_hours", "h100_hours", "a100_hours", "chip_hours"),
  *("device_seconds", "gpu_seconds", "generated_tokens", "trained_tokens"),
  *("total_tokens", "cumulative_tokens", "num_tokens", "eval_num_tokens"),
  *("tokens_seen", "num_input_tokens_seen", "tokens", "total_samples"),
  *("samples_seen", "total_episodes", "step", "global_step", "_step", "steps"),
  *("training_step", "train_step", "trainer_step", "training_steps"),
  *("optimizer_step", "update", "updates", "iteration", "iterations", "iter"),
  *("epoch", "epochs", "hours", "wall_hours", "wall_seconds", "wall_s"),
  *("wall_clock", "elapsed", "runtime", "_runtime", "relative_time"),
)
# Columns that count one step's work under a name that could be a total.
_PER_STEP = {"progress/tokens", "perf/total_num_tokens"}
STEP_NAMES = ("step", "global_step", "_step", "steps", "training_step")
_RATES = (
  *("pass_rate", "passrate", "mean_at_n", "pass_at_1", "accuracy", "acc"),
  *("success_rate", "solve_rate", "correctness", "correct", "exact_match"),
)
_REWARDS = (
  *("accuracy_reward", "correctness_reward", "reward", "rewards"),
  *("score", "scores", "test_score"),
)
PASS_RATE_NAMES = _RATES + _REWARDS
TASK_NAMES = (
  *("task", "dataset", "data_source", "benchmark", "env", "environment"),
  *("held_out_set", "eval_set"),
)
RUN_NAMES = (
  *("run", "run_name", "run_id", "experiment", "recipe", "method"),
  *("variant", "model", "group", "name", "seed"),
)
_HELD_OUT = {"eval", "evaluation", "val", "valid", "validation", "test"}
_HELD_OUT |= {"heldout", "held_out", "val_core"}
_TRAINING = {"train", "training", "critic", "actor", "rollout", "val_aux"}
_FILLERS = {"mean", "avg", "average", "all", "value", "overall"}
# Last pieces of a name that make something else of a rate.
_OTHER = re.compile(r"@|pass|best|maj|std|min|max|median|len|time|count|loss")
# A table with one of these is a log of metrics, not of one run a column.
_METRICS = {
  *("loss", "entropy", "kl", "learning_rate", "grad", "norm", "length", "len"),
  *("time", "seconds", "clip", "clipfrac", "std", "min", "max", "ratio"),
  *("temperature", "advantage", "advantages", "staleness", "fraction", "mfu"),
  *("throughput", "memory", "perplexity", "lr", "tokens", "reward", "rewards"),
}


class Choice(NamedTuple):
  """The columns of a file's curves, and what to tell of the choice."""

  compute: str
  pass_rates: tuple[str, ...]  # One a curve.
  labels: tuple[str, ...]  # What tells those apart; "" for a single one.
  are_tasks: bool  # Whether they are held-out sets of one run.
  notes: tuple[str, ...]


@functools.lru_cache(maxsize=4096)  # A log asks for its columns at each row.
def _parts(column: str) -> tuple[str, ...]:
  """The pieces of a name between slashes, without units and capitals."""
  text = re.sub(r"\([^)]*\)|\[[^]]*\]|%", "", column.lower())
  pieces = [re.sub(r"[\s\-]+", "_", p.strip()) for p in text.split("/")]
  return tuple(p for p in pieces if p) or (column.lower(),)


def stem(column: str) -> str:
  """A column's last piece, as it is compared with the usual names.

  Args:
    column: as the file names it.

  Example:
    >>> stem("GPU Hours"), stem("train/global_step"), stem("compute (FLOPs)")
    ('gpu_hours', 'global_step', 'compute')
  """
  return _parts(column)[-1]


def says_percent(column: str) -> bool:
  """Whether a column's name tells that it holds percent.

  Args:
    column: as the file names it.
  """
  return re.search(r"%|percent|(^|_)pct($|_)", column.lower()) is not None


def _name(parts: Sequence[str]) -> tuple[str, int, bool]:
  """A metric's usual name, its k, and whether it is of held-out prompts."""
  held_out = any(p in _HELD_OUT for p in parts)
  kept = [p for p in parts if p not in _HELD_OUT | _TRAINING]
  parts = kept or list(parts)
  if "test_score" in parts:  # verl before 0.3: val/test_score/<set>
    return "test_score", 0, held_out
  last = len(parts) - 1
  while last and parts[last] in _FILLERS:
    last -= 1
  name = parts[last]
  prefix = re.match(r"(eval|val|valid|validation|test|train)_(.+)", name)
  if prefix and name not in PASS_RATE_NAMES:
    held_out, name = held_out or prefix[1] != "train", prefix[2]
  name = re.sub(r"_(percent|pct)$", "", name)
  several = re.search(r"(?:^|_)(?:mean|avg)(?:@|_at_)(\d+|[nk])$", name)
  if several:
    of = parts[last - 1] if last else ""
    k = int(several[1]) if several[1].isdigit() else 1
    return ("reward" if of in _REWARDS else "mean_at_n"), k, held_out
  if re.search(r"(?:^|_)pass_?(?:@|_at_)?_?1$", name):
    return "pass_at_1", 1, held_out
  name = re.sub(r"^(mean|avg|average)_|_(mean|avg)$|_func$", "", name)
  if name not in PASS_RATE_NAMES and last and not _OTHER.search(parts[last]):
    # accuracy/<set> and avg@16/<set>; a reward's last piece says which it is.
    of = _name(parts[:last])
    if of[0] in _RATES:
      return of[0], of[1], held_out
  return name, 0, held_out


def _rank(column: str) -> tuple[int, ...] | None:
  """How good a column of pass rate this is, the smaller the better."""
  parts = _parts(column)
  name, _, held_out = _name(parts)
  if name not in PASS_RATE_NAMES:
    return None
  of_training = bool(_TRAINING.intersection(parts)) or any(
    p.startswith("train_") for p in parts
  )
  reward = name in _REWARDS
  tier = 2 if of_training else int(reward and not held_out)
  return tier, PASS_RATE_NAMES.index(name), int(not held_out)


def is_reward(column: str) -> bool:
  """Whether a column is a reward or score, which need not end at 1.

  Args:
    column: as the file names it.
  """
  return _name(_parts(column))[0] in _REWARDS


def _asked(name, columns, asked: str, flag: str) -> str:
  """The column that a flag names: exactly, or by the end of its path."""
  found = [c for c in columns if c == asked] or [
    c for c in columns if c.endswith(f"/{asked}")
  ]
  if len(found) != 1:
    raise tables.CurveError(
      f"{name}: there is no column {asked!r} for --{flag}; the columns are "
      f"{tables.listed(columns)}."
    )
  return found[0]


def _pass_rates(name, columns, asked: str | None) -> list[str] | None:
  """The best columns of pass rate by name, or those asked for."""
  if asked is not None:
    whole = asked in columns or "," not in asked
    wanted = [asked] if whole else [a.strip() for a in asked.split(",")]
    return [_asked(name, columns, a, "pass_rate_column") for a in wanted]
  if {stem(c) for c in columns} == {"wall_time", "step", "value"}:
    return [c for c in columns if stem(c) == "value"]  # TensorBoard's export.
  ranks = {c: rank for c in columns if (rank := _rank(c))}
  if not ranks:
    return None
  best = [c for c, rank in ranks.items() if rank == min(ranks.values())]
  # Of mean@4 and mean@16 of one set, the one with more samples.
  most: dict[tuple, str] = {}
  for column in best:
    parts = _parts(column)
    key = parts[:-1] if _name(parts)[1] else parts
    if key not in most or _name(parts)[1] > _name(_parts(most[key]))[1]:
      most[key] = column
  return list(most.values())


def _one_a_run(table: tables.Table, compute: str | None) -> list[str] | None:
  """Columns of unusual names that can only be runs: all of them in [0, 1]."""
  if compute is None:
    return None
  rest = [
    c
    for c in table.columns
    if c != compute and _order(c) is None and not c.startswith("column ")
  ]
  words = {
    w for c in rest for w in (c.lower(), *re.split(r"[\W_]+", c.lower()))
  }
  if len(rest) < 2 or not _METRICS.isdisjoint(words):
    return None
  comma = tables.decimal_comma(table, rest)
  for column in rest:
    cells = [tables.number(r.cells.get(column), comma) for r in table.rows]
    values = [v for v in cells if v is not None and np.isfinite(v)]
    if len(values) < 2 or None in cells or min(values) < 0 or max(values) > 1:
      return None
  return rest


def _order(column: str) -> int | None:
  """A column's place among the usual names of compute."""
  if "/".join(_parts(column)) in _PER_STEP or stem(column) not in COMPUTE_NAMES:
    return None
  return COMPUTE_NAMES.index(stem(column))


def numbers(table: tables.Table, column: str, comma: bool) -> np.ndarray:
  """A column as float64, NaN where there is no number.

  Args:
    table: of one file.
    column: one of its columns.
    comma: whether a comma is the decimal sign.
  """
  cells = [tables.number(r.cells.get(column), comma) for r in table.rows]
  return np.array([np.nan if c is None else c for c in cells], np.float64)


def _falls(table, column, keys, comma) -> bool:
  """Whether a column falls where the step rises: it counts no total."""
  steps = (c for u in STEP_NAMES for c in table.columns if stem(c) == u)
  step = next(steps, column)
  if step == column:
    return False
  x, s = numbers(table, column, comma), numbers(table, step, comma)
  for group in _groups(table, keys):
    both = group[np.isfinite(x[group]) & np.isfinite(s[group])]
    rising = both[np.argsort(s[both], kind="stable")]
    apart = np.diff(s[rising]) > 0
    if (np.diff(x[rising])[apart] < 0).any():
      return True
    if apart.any() and x[rising[0]] == x[rising[-1]]:
      return True
  return False


def _groups(table: tables.Table, keys: Sequence[str]) -> list[np.ndarray]:
  """Indices of the rows of each run."""
  found: dict[tuple, list[int]] = {}
  for i, row in enumerate(table.rows):
    found.setdefault(tuple(str(row.cells.get(k)) for k in keys), []).append(i)
  return [np.array(rows) for rows in found.values()]


def _compute(table, usual: list[str], pass_rates, keys, notes: list[str]):
  """The first usual column of compute that is a total where it is needed."""
  usual = [c for c in usual if c not in pass_rates]
  comma = tables.decimal_comma(table, usual)
  measured = np.zeros(len(table.rows), bool)
  for column in pass_rates:
    measured |= np.isfinite(numbers(table, column, comma))
  filled = {
    c: int(np.isfinite(numbers(table, c, comma))[measured].sum()) for c in usual
  }
  for column in usual:
    if 2 * filled[column] < measured.sum():
      notes.append(f"column {column} is empty at most pass rates, passed over")
    elif _falls(table, column, keys, comma):
      notes.append(
        f"column {column} does not grow with the step, so it is no total and "
        "was passed over"
      )
    else:
      return column
  notes.clear()
  return max(usual, key=filled.__getitem__, default=None)


def _labels(pass_rates: Sequence[str]) -> tuple[str, ...]:
  """What tells columns apart: the pieces that they do not share."""
  if len(pass_rates) == 1:
    return ("",)
  pieces = [[p for p in c.split("/") if p] for c in pass_rates]
  size = min(map(len, pieces)) - 1
  first = 0
  while first < size and len({p[first] for p in pieces}) == 1:
    first += 1
  last = 0
  while last < size - first and len({p[-1 - last] for p in pieces}) == 1:
    last += 1
  return tuple(
    "/".join(p[first : len(p) - last]).strip() or c
    for p, c in zip(pieces, pass_rates, strict=True)
  )


def choose(
  table: tables.Table,
  *,
  compute: str | None = None,
  pass_rate: str | None = None,
  keys: Sequence[str] = (),
) -> Choice:
  """The columns of compute and pass rate of a file.

  Names are compared by their last piece, in any case, without units. Held-out
  pass rates come before others, rates before rewards, and rewards of training
  last. Several that are equally good are a curve each.

  Args:
    table: of one file.
    compute: the column asked for; None to recognise it.
    pass_rate: the column asked for, or several with commas; None likewise.
    keys: columns that tell runs apart.

  Raises:
    CurveError: with the list of columns, where a name is unknown.
  """
  name, columns = table.name, list(dict.fromkeys(table.columns))
  if compute is not None:
    usual = [_asked(name, columns, compute, "compute_column")]
  else:
    usual = sorted(
      (c for c in columns if _order(c) is not None),
      key=lambda c: (_order(c), len(c)),
    )
  found = _pass_rates(name, columns, pass_rate)
  notes: list[str] = []
  unusual = found is None
  if unusual and pass_rate is None:
    found = _one_a_run(table, usual[0] if usual else None)
  missing = [
    what for what, ok in (("compute", usual), ("pass_rate", found)) if not ok
  ]
  if missing or not found:
    flags = " and ".join(f"--{what}_column" for what in missing)
    raise tables.CurveError(
      f"{name}: no column has a usual name of {' or '.join(missing)}; the "
      f"columns are {tables.listed(columns)}; name one with {flags}."
    )
  if compute is not None:
    chosen = usual[0]
    comma = tables.decimal_comma(table, [chosen])
    if _falls(table, chosen, keys, comma):
      notes.append(f"column {chosen} does not grow with the step")
  else:
    chosen = _compute(table, usual, found, keys, notes)
  if chosen is None or chosen in found:
    raise tables.CurveError(
      f"{name}: compute and pass rate must be two columns, got "
      f"{tables.plain(found[0])!r} for both; the columns are "
      f"{tables.listed(columns)}; name them with --compute_column and "
      "--pass_rate_column."
    )
  for column in (chosen, *found):
    if table.columns.count(column) > 1:
      raise tables.CurveError(
        f"{name}, {table.unit} 1: column names must differ, and "
        f"{tables.plain(column)!r} stands more than once."
      )
  told = f"compute is column {chosen}, pass rate is column {found[0]}"
  if len(found) > 1:
    told = f"compute is column {chosen}, pass rates are columns " + (
      tables.listed(found)
    )
  if unusual and len(found) > 1:
    told += ": no name is a usual one, so each is read as one run"
  tasks = len(found) > 1 and not unusual and _rank(found[0]) is not None
  tasks = tasks and bool(_HELD_OUT.intersection(_parts(found[0])))
  return Choice(chosen, tuple(found), _labels(found), tasks, (told, *notes))
