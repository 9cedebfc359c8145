"""Forecasts of the ends of real runs: `python -m benchmarks.forecasts`.

    python -m benchmarks.forecasts --runs=DIR --siblings --out=forecasts.json

scores the fit from the first parts of every workdir below DIR (and of curve
files given with --curves) beside simple forecasts, and prints means and ratios
with bootstrap intervals over families.
"""

import argparse
import json
import math
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import scalerl_jax
from scalerl_jax.scaling import backtest, scoreboard
from scalerl_jax.scaling.curves import CurveError, read_curves

HALF, THIRD = 0.5, 1.0 / 3.0


class Aim(NamedTuple):
  """A number that forecasts of real runs are to reach."""

  share: float
  method: str
  quantity: str
  least: float
  most: float


AIMS = (
  *(Aim(s, backtest.OURS, "error", 0.0, 1.05) for s in (HALF, THIRD)),
  Aim(HALF, backtest.OURS, "crps", 0.0, 0.92),
  Aim(THIRD, backtest.OURS, "crps", 0.0, 0.85),
  *(Aim(s, backtest.OURS, "coverage", 0.78, 1.0) for s in (HALF, THIRD)),
  *(
    Aim(s, backtest.OURS, "scaled_coverage", 0.85, 0.95) for s in (HALF, THIRD)
  ),
  Aim(HALF, backtest.OURS, "scaled_width", 0.0, 0.75),
  Aim(THIRD, backtest.OURS, "scaled_width", 0.0, 0.5),
  Aim(THIRD, backtest.WITH_SIBLINGS, "error", 0.0, 0.80),
  Aim(THIRD, backtest.WITH_SIBLINGS, "crps", 0.0, 0.75),
)


def _family(folder: pathlib.Path, keys: Sequence[str]) -> str:
  """Label of a workdir's family: the values of fields of its config."""
  record = json.loads((folder / "config.json").read_text(encoding="utf-8"))
  values = []
  for key in keys:
    value: Any = record.get("config", record)
    for part in key.split("."):
      if not isinstance(value, dict) or part not in value:
        raise ValueError(f"--family must name fields of {folder}, got {key!r}.")
      value = value[part]
    values.append(f"{key}={value}")
  return ", ".join(values)


def cases_of_runs(
  root: pathlib.Path, keys: Sequence[str], column: str | None
) -> Iterator[backtest.Case]:
  """Every held-out curve of every workdir below a folder.

  Args:
    root: the folder.
    keys: fields of the config that make a family, such as "task.seed".
    column: of compute; None for the reader's choice.
  """
  for path in sorted(root.rglob("curve.csv")):
    if not (path.parent / "config.json").exists():
      continue
    name = path.parent.relative_to(root).as_posix()
    try:
      curves = read_curves(path, compute_column=column)
    except CurveError as error:
      print(f"left out: {name}: {error}")
      continue
    family = _family(path.parent, keys)
    for curve in curves:
      label = f"{root.name}/{name}"
      if len(curves) > 1:
        label += f": {curve.name}"
      group = f"{family}, {curve.task}, {curve.compute_column}"
      yield backtest.Case(
        label, family, curve.compute, curve.pass_rate, curve.trials, group
      )


def cases_of_files(
  paths: Sequence[str], column: str | None
) -> Iterator[backtest.Case]:
  """Curves of files; the name up to the first "_" is their family.

  Args:
    paths: of the files.
    column: of compute; None for the reader's choice.
  """
  for path in paths:
    stem = pathlib.Path(path).stem
    family = stem.split("_")[0]
    curves = read_curves(path, compute_column=column)
    for curve in curves:
      label = stem if len(curves) == 1 else f"{stem}: {curve.name}"
      yield backtest.Case(
        label, family, curve.compute, curve.pass_rate, curve.trials, family
      )


def _told(estimate: scoreboard.Estimate, digits: int = 3) -> str:
  if math.isnan(estimate.low):
    return f"{estimate.value:.{digits}f}"
  low, high = estimate.low, estimate.high
  return f"{estimate.value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def print_summary(rows: Sequence[scoreboard.Row]) -> None:
  """Means of every method, a block a share."""
  columns = ("|error|", "CRPS", "coverage", "width", "conformal", "and width")
  for share in dict.fromkeys(row.share for row in rows):
    chosen = [row for row in rows if row.share == share]
    most = max(row.curves for row in chosen)
    families = max(row.families for row in chosen)
    print(f"\nfrom {share:.0%}: {most} curves, {families} families")
    print(f"{'':<22}" + "".join(f"{c:>22}" for c in columns))
    for row in sorted(chosen, key=lambda row: row.crps.value):
      found = (
        row.error,
        row.crps,
        row.coverage,
        row.width,
        row.scaled_coverage,
        row.scaled_width,
      )
      few = f" ({row.curves})" if row.curves < most else ""
      print(
        f"{row.method + few:<22}" + "".join(f"{_told(e):>22}" for e in found)
      )


def reached(
  rows: Sequence[scoreboard.Row], ratios: Sequence[scoreboard.Ratio]
) -> list[tuple[Aim, scoreboard.Estimate, bool]]:
  """Each aim with what was measured; those not measured are left out.

  Args:
    rows: of `scoreboard.summary`.
    ratios: of `scoreboard.ratios`, against the plain sigmoid.
  """
  found: dict[tuple[float, str, str], scoreboard.Estimate] = {
    (row.share, row.method, quantity): getattr(row, quantity)
    for row in rows
    for quantity in ("coverage", "scaled_coverage")
  }
  found |= {(r.share, r.method, r.quantity): r.estimate for r in ratios}
  told = []
  for aim in AIMS:
    measured = found.get((aim.share, aim.method, aim.quantity))
    if measured is not None:
      told.append((aim, measured, aim.least <= measured.value <= aim.most))
  return told


def print_aims(told: Sequence[tuple[Aim, scoreboard.Estimate, bool]]) -> None:
  """A line an aim: what was measured, what was aimed at, hit or miss."""
  print("\nagainst the plain sigmoid (coverage: of itself); 90 % over families")
  for aim, measured, hit in told:
    rule = f"<= {aim.most:g}"
    if "coverage" in aim.quantity:
      rule = f"{aim.least:g} to {aim.most:g}"
    print(
      f"{aim.share:>5.0%} {aim.method:<15} {aim.quantity:<16}"
      f"{_told(measured):<24} {rule:<14} {'hit' if hit else 'miss'}"
    )


def _plain(value: Any) -> Any:
  """Records as dictionaries, and NaN as null, for JSON."""
  if hasattr(value, "_asdict"):
    return _plain(value._asdict())
  if isinstance(value, dict):
    return {key: _plain(v) for key, v in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(v) for v in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


def _commit() -> str:
  done = subprocess.run(
    ["git", "describe", "--always", "--dirty"],
    capture_output=True,
    text=True,
    check=False,
  )
  return done.stdout.strip() or "unknown"


def parse(words: Sequence[str]) -> argparse.Namespace:
  """The flags."""
  parser = argparse.ArgumentParser(prog="benchmarks.forecasts")
  parser.add_argument(
    "--runs", action="append", default=[], help="folder of workdirs"
  )
  parser.add_argument("--curves", default="", help="curve files, with commas")
  parser.add_argument("--compute_column", default=None)
  parser.add_argument(
    "--family",
    default="task.name,task.seed",
    help="config fields that make a family",
  )
  parser.add_argument(
    "--shares", default="", help="such as 1/3,1/2; default: five shares"
  )
  parser.add_argument(
    "--siblings", action="store_true", help="also lend from finished runs"
  )
  parser.add_argument("--out", default="", help="JSON file to write")
  return parser.parse_args(words)


def main(words: Sequence[str]) -> None:
  """Reads, forecasts, prints, and writes the scores."""
  flags = parse(words)
  shares = backtest.SHARES
  if flags.shares:
    shares = tuple(float(Fraction(s)) for s in flags.shares.split(","))
  cases = []
  for root in flags.runs:
    cases += cases_of_runs(
      pathlib.Path(root), flags.family.split(","), flags.compute_column
    )
  files = [path for path in flags.curves.split(",") if path]
  cases += cases_of_files(files, flags.compute_column)
  if not cases:
    raise ValueError("--runs or --curves must name finished runs, got none.")
  found = backtest.backtest(cases, shares, siblings=flags.siblings)
  rows, ratios = scoreboard.summary(found), scoreboard.ratios(found)
  told = reached(rows, ratios)
  print_summary(rows)
  print_aims(told)
  if found.skipped:
    print(f"\n{len(found.skipped)} forecasts could not be made (see --out)")
  record: dict[str, Any] = {
    "commit": _commit(),
    "version": scalerl_jax.__version__,
    "curves": [f"{case.name} ({case.family})" for case in cases],
    "summary": rows,
    "ratios": ratios,
    "aims": [
      {**aim._asdict(), "measured": measured, "hit": hit}
      for aim, measured, hit in told
    ],
    "scores": found.scores,
    "skipped": found.skipped,
  }
  if flags.out:
    text = json.dumps(_plain(record), indent=1, allow_nan=False) + "\n"
    pathlib.Path(flags.out).write_text(text, encoding="utf-8")


if __name__ == "__main__":
  main(sys.argv[1:])
