"""The door for curves: `python -m scalerl_jax.fit --curve=FILE[,FILE]`.

Fits the compute-performance law to curves of any framework and prints for each,
first, its asymptote or why it is unknown; of several runs, how they stand at
one budget. Offline; nothing of the training program.
"""

import argparse
import importlib.metadata
import json
import math
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import scalerl_jax
from scalerl_jax.scaling import (
  arguments,
  compare,
  contest,
  curves,
  fit,
  forecast,
  interactive,
  report,
  verdict,
)


class _Fit(NamedTuple):
  """A curve, its fit and the forecasts asked for."""

  curve: curves.Curve
  fitted: fit.CurveFit
  forecasts: tuple[forecast.Forecast, ...]


def _paths(value: str | None) -> list[str]:
  """The files of --curve; a name that holds a comma may be one of them."""
  if not value:
    raise ValueError("--curve must name a file, got none.")
  if os.path.exists(value):
    return [value]
  paths = [part.strip() for part in value.split(",")]
  if not all(paths):
    raise ValueError(
      f"--curve must name files between its commas, got {value!r}."
    )
  return paths


def _forecast_computes(values: Sequence[str]) -> list[float]:
  """The computes of --forecast_at, or one sentence."""
  computes = []
  for value in ",".join(values).split(","):
    if not value.strip():
      continue
    try:
      compute = float(value)
    except ValueError:
      compute = -1.0
    if not 0.0 <= compute < math.inf:
      raise ValueError(
        f"--forecast_at must be a finite compute of at least 0, got {value!r}."
      )
    computes.append(compute)
  return computes


def _writable(out: str) -> pathlib.Path:
  """The folder of --out, made and tried before anything is fitted."""
  folder = pathlib.Path(out)
  try:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
      pass
  except (OSError, ValueError) as error:
    reason = getattr(error, "strerror", None) or error
    raise ValueError(
      f"--out must be a folder that can be written, got {out!r} ({reason}); "
      "name another."
    ) from None
  return folder


def _record(one: _Fit, level: float) -> dict:
  """What fit.json holds of one curve."""
  curve, fitted, forecasts = one
  return {
    "curve": {
      "name": curve.name,
      "task": curve.task,
      "path": curve.path,
      "compute_column": curve.compute_column,
      "pass_rate_column": curve.pass_rate_column,
      "points": len(curve.compute),
      "points_fitted": len(fitted.compute),
      "notes": curve.notes,
    },
    "law": fitted.law,
    "weights": fitted.weights,
    "identified": fitted.identified,
    "reasons": fitted.reasons,
    "params": fitted.params._asdict(),
    "intervals": {str(p): fitted.intervals(p) for p in (0.5, level)},
    "asymptote_profile_90": fitted.asymptote_profile,
    "decided_at": fitted.decided_at,
    "outliers": fitted.outliers,
    "least_squares": fitted.least_squares._asdict(),
    "residual": fitted.residual,
    "level": level,
    "forecasts": [
      {"compute": f.compute, "mean": f.mean, "low": f.low, "high": f.high}
      for f in forecasts
    ],
    "versions": {
      "scalerl_jax": scalerl_jax.__version__,
      "jax": importlib.metadata.version("jax"),
    },
  }


def _write(
  folder: pathlib.Path, fits: Sequence[_Fit], lead: Sequence[str], level: float
) -> tuple[str, ...]:
  """fit.json (a list for several curves), the report and its figures."""
  records = [_record(one, level) for one in fits]
  record = records[0] if len(records) == 1 else records
  text = json.dumps(record, indent=2) + "\n"
  (folder / "fit.json").write_text(text, encoding="utf-8")
  shown = [
    report.ShownCurve(
      curve.name,
      curve.compute,
      curve.pass_rate,
      fitted,
      forecast.first_part(
        curve.compute, curve.pass_rate, level=level, trials=curve.trials
      ),
      forecasts,
      curve.compute_column,
    )
    for curve, fitted, forecasts in fits
  ]
  files = ", ".join(dict.fromkeys(one.curve.path for one in fits))
  title = f"Fit of {files}"
  return interactive.write_report(
    folder, shown, title=title, level=level, lead=lead
  )


def _compare(
  runs: Mapping[str, Sequence[fit.CurveFit]],
  budget: float,
  level: float,
  unit: str,
) -> list[str]:
  """How runs, or recipes of several seeds, stand at one compute."""
  if len(runs) > 1:
    found = contest.compare_runs(runs, budget, level=level)
    return contest.in_words(found, unit)
  ((name, seeds),) = runs.items()
  rates = [float(f.predict(budget, level, kind="mean")[0]) for f in seeds]
  asymptotes = [f.params.asymptote for f in seeds]
  lines = [f"{len(seeds)} seeds{f' of {name}' if name else ''}:"]
  for what, values in (
    (f"pass rate at {unit} {budget:g}", rates),
    ("asymptote", asymptotes),
  ):
    mean, low, high, _ = compare.seed_interval(values, level)
    lines.append(f"  mean {what}: {mean:.3f} [{low:.3f}, {high:.3f}]")
  if not all(f.identified for f in seeds):
    lines.append("  the asymptote of some seeds is unidentified")
  return lines


def _comparison(
  fits: Sequence[_Fit], budget: float | None, level: float
) -> Iterator[str]:
  """What is told of several curves: those of one held-out set, compared."""
  for task in dict.fromkeys(one.curve.task for one in fits):
    of_task = [one for one in fits if one.curve.task == task]
    if len(of_task) < 2:
      continue
    if task:
      yield f"on {task}:"
    units = {one.curve.compute_column: one.curve.name for one in of_task}
    if len(units) > 1:
      told = ", ".join(f"{unit} in {name}" for unit, name in units.items())
      yield (
        f"not compared: compute must be one column, and it is {told}; name one "
        "with --compute_column"
      )
      continue
    recipes: dict[str, list[_Fit]] = {}
    for one in of_task:
      recipe = one.curve.recipe
      name = one.curve.name if recipe is None else recipe
      recipes.setdefault(name, []).append(one)
    runs = {}
    for recipe, seeds in recipes.items():
      names = [one.curve.name for one in seeds]
      name = names[0] if len(seeds) == 1 else recipe
      runs[name] = [one.fitted for one in seeds]
      if len(seeds) > 1 and len(recipes) > 1:
        yield f"{name}: {len(seeds)} seeds, {', '.join(names)}"
    end = max(float(one.curve.compute[-1]) for one in of_task)
    unit = of_task[0].curve.compute_column
    yield from _compare(runs, end if budget is None else budget, level, unit)


def _print(one: _Fit, several: bool, level: float) -> None:
  """One curve's answer."""
  curve, fitted, forecasts = one
  print(verdict.asymptote_line(fitted, level))
  if several:
    print(f"  curve {curve.name}")
  for note in curve.notes:
    print(f"  {note}")
  head = f"{100 * level:g} % interval"
  print(f"{'parameter':<12}{'value':>12}{head:>28}")
  for name, value, low, high in verdict.parameter_rows(fitted, level):
    print(f"{name:<12}{value:>12.5g}{low:>14.5g} to {high:<10.5g}")
  last = max([float(fitted.compute[-1]), *(f.compute for f in forecasts)])
  for remark in verdict.remarks(fitted, last, level):
    print(f"  {remark}")
  for f in forecasts:
    print(
      f"forecast at {f.compute:g}: {f.mean:.3f} [{f.low:.3f}, {f.high:.3f}]"
      + ("" if fitted.identified else " (asymptote unidentified)")
    )


def run(flags: argparse.Namespace) -> None:
  """Reads, fits, prints and writes.

  Args:
    flags: of `arguments.parse`.

  Raises:
    ValueError: in one sentence, for what cannot be done.
  """
  paths = _paths(flags.curve)
  computes = _forecast_computes(flags.forecast_at)
  level, budget = flags.level, flags.budget
  if flags.initial_sd is not None and not 0.0 < flags.initial_sd <= 1.0:
    raise ValueError(
      f"--initial_sd must be in (0, 1], got {flags.initial_sd!r}."
    )
  if not 0.0 < level < 1.0:
    raise ValueError(f"--level must be in (0, 1), got {level!r}.")
  if budget is not None and not 0.0 < budget < math.inf:
    raise ValueError(f"--budget must be a compute above 0, got {budget!r}.")
  found = curves.read_curves(
    paths,
    compute_column=flags.compute_column,
    pass_rate_column=flags.pass_rate_column,
    series=flags.series,
  )
  folder = _writable(flags.out) if flags.out else None
  fits: list[_Fit] = []
  for curve in found:
    try:
      fitted = fit.fit_curve(
        curve.compute,
        curve.pass_rate,
        initial=flags.initial,
        min_compute=flags.min_compute,
        max_compute=flags.max_compute,
        initial_sd=flags.initial_sd,
        **curve.behind(),
      )
    except ValueError as error:
      raise ValueError(f"{curve.name}: {error}") from None
    forecasts = (forecast.forecast_from(fitted, c, level) for c in computes)
    fits.append(_Fit(curve, fitted, tuple(forecasts)))
    if len(fits) > 1:
      print()
    _print(fits[-1], len(found) > 1, level)
  compared = list(_comparison(fits, budget, level))
  if compared:
    print("\n" + "\n".join(compared))
  if folder:
    for note in _write(folder, fits, compared, level):
      print(note)
    print(f"written: {folder}")


def main(words: Sequence[str]) -> None:
  """One sentence on stderr and exit code 2 for anything that cannot be done.

  Args:
    words: of the command line, without the program's name.
  """
  try:
    run(arguments.parse(words))
  except (ValueError, ImportError, OSError) as error:
    print(error, file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
  main(sys.argv[1:])
