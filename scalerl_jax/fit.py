"""The door for curves: `python -m scalerl_jax.fit --curve=FILE`.

Fits the compute-performance law to a curve of any framework and prints, first,
its asymptote or why it is unknown. Offline; nothing of the training program.
"""

import importlib.metadata
import json
import pathlib
import sys

from absl import app, flags, logging

import scalerl_jax
from scalerl_jax.scaling import curves, fit, forecast, report

_CURVE = flags.DEFINE_string(
  "curve", None, "CSV or JSONL file, or a workdir that holds curve.csv."
)
_FORECAST_AT = flags.DEFINE_multi_string(
  "forecast_at", [], "Compute to forecast at; repeat it, or separate by commas."
)
_OUT = flags.DEFINE_string(
  "out", None, "Folder for fit.json, fit.png and report.html."
)
_COMPUTE_COLUMN = flags.DEFINE_string(
  "compute_column", None, "Column of compute, when its name is not a usual one."
)
_PASS_RATE_COLUMN = flags.DEFINE_string(
  "pass_rate_column", None, "Column of pass rate, likewise."
)
_SERIES = flags.DEFINE_string(
  "series", None, "Which curve of a file with several (column task or run)."
)
_INITIAL = flags.DEFINE_float(
  "initial", None, "R_0, the pass rate at compute 0, when known exactly."
)
_MIN_COMPUTE = flags.DEFINE_float(
  "min_compute", 0.0, "Points below it are left out, except at compute 0."
)
_MAX_COMPUTE = flags.DEFINE_float(
  "max_compute", None, "Points above it are left out."
)

LEVEL = 0.9


def _forecast_computes(values: list[str]) -> list[float]:
  """The computes of --forecast_at, or one sentence."""
  computes = []
  for value in ",".join(values).split(","):
    if not value.strip():
      continue
    try:
      compute = float(value)
    except ValueError:
      compute = -1.0
    if not 0.0 <= compute < float("inf"):
      raise ValueError(
        f"--forecast_at must be a finite compute of at least 0, got {value!r}."
      )
    computes.append(compute)
  return computes


def _record(curve: curves.Curve, fitted: fit.CurveFit, forecasts) -> dict:
  """What fit.json holds."""
  return {
    "curve": {
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
    "intervals": {str(p): fitted.intervals(p) for p in (0.5, LEVEL)},
    "asymptote_profile_90": fitted.asymptote_profile,
    "least_squares": fitted.least_squares._asdict(),
    "residual": fitted.residual,
    "level": LEVEL,
    "forecasts": [
      {"compute": f.compute, "mean": f.mean, "low": f.low, "high": f.high}
      for f in forecasts
    ],
    "versions": {
      "scalerl_jax": scalerl_jax.__version__,
      "jax": importlib.metadata.version("jax"),
    },
  }


def _write(out: str, curve, fitted, forecasts) -> pathlib.Path:
  folder = pathlib.Path(out)
  folder.mkdir(parents=True, exist_ok=True)
  record = json.dumps(_record(curve, fitted, forecasts), indent=2) + "\n"
  (folder / "fit.json").write_text(record, encoding="utf-8")
  unit, points = curve.compute_column, (curve.compute, curve.pass_rate)
  end = max((f.compute for f in forecasts), default=None)
  title = f"{pathlib.Path(curve.path).name}: pass rate against {unit}"
  report.plot_curve(
    folder / "fit.png", *points, fitted, end=end, unit=unit, title=title
  )
  fragments = [
    report.parameters_fragment(fitted, unit=unit),
    report.curve_fragment(*points, fitted, end=end, unit=unit, title=title),
  ]
  if forecasts:
    fragments += [
      "<h2>Forecasts</h2>",
      report.forecasts_fragment(forecasts, unit=unit),
    ]
  part = forecast.first_part(*points, trials=curve.trials)
  if part is not None:
    caption = (
      f"Fitted on the first half: the end is forecast as "
      f"{part.forecast.mean:.3f} [{part.forecast.low:.3f}, "
      f"{part.forecast.high:.3f}] and was measured as {part.measured:.3f}."
    )
    fragments += [
      "<h2>The first half forecasts the rest</h2>",
      report.curve_fragment(
        *points, part.fit, end=part.forecast.compute, unit=unit, caption=caption
      ),
    ]
  page = report.page(f"Fit of {curve.path}", fragments)
  (folder / "report.html").write_text(page, encoding="utf-8")
  return folder


def run() -> None:
  """Reads, fits and prints, by the flags."""
  if not _CURVE.value:
    raise ValueError("--curve must name a file, got none.")
  computes = _forecast_computes(_FORECAST_AT.value)
  curve = curves.read_curve(
    _CURVE.value,
    compute_column=_COMPUTE_COLUMN.value,
    pass_rate_column=_PASS_RATE_COLUMN.value,
    series=_SERIES.value,
  )
  fitted = fit.fit_curve(
    curve.compute,
    curve.pass_rate,
    initial=_INITIAL.value,
    min_compute=_MIN_COMPUTE.value,
    max_compute=_MAX_COMPUTE.value,
    trials=curve.trials,
  )
  print(report.asymptote_line(fitted, LEVEL))
  for note in curve.notes:
    print(f"  {note}")
  print(f"{'parameter':<12}{'value':>12}{'90 % interval':>28}")
  for name, value, low, high in report.parameter_rows(fitted, LEVEL):
    print(f"{name:<12}{value:>12.5g}{low:>14.5g} to {high:<10.5g}")
  forecasts = [forecast.forecast_from(fitted, c, LEVEL) for c in computes]
  for f in forecasts:
    print(
      f"forecast at {f.compute:g}: {f.mean:.3f} [{f.low:.3f}, {f.high:.3f}]"
      + ("" if fitted.identified else " (asymptote unidentified)")
    )
  if _OUT.value:
    print(f"written: {_write(_OUT.value, curve, fitted, forecasts)}")


def main(argv: list[str]) -> None:
  """One sentence on stderr and exit code 2 for anything that cannot be done."""
  # JAX and matplotlib tell at "info" what they looked for and did not find.
  logging.set_verbosity(logging.WARNING)
  try:
    if len(argv) > 1:
      raise ValueError(
        f"arguments must be flags, got {argv[1]!r}; write --curve={argv[1]}."
      )
    run()
  except (ValueError, ImportError, OSError) as error:
    print(error, file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
  app.run(main)
