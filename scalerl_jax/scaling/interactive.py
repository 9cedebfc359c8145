"""Interactive HTML of fitted curves: works offline, from data in the page.

Here the data are made; `assets/report.js` draws them. Without JavaScript the
page shows the figure of `report.py` instead.
"""

import html
import io
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from scalerl_jax.scaling import fit as fit_lib
from scalerl_jax.scaling import report, verdict
from scalerl_jax.scaling.report import ShownCurve

_GRID = 160  # points of a drawn line
_MOST = 600  # marks of a run: a screen has no room for more
_ABOUT = {
  "curve": (
    "Full marks were fitted, open ones were not shown to the fit. Line: the "
    "fitted law with its misfit; shaded: the {level} band of an evaluation; "
    "dashed: the asymptote, where it is identified; bars: forecasts. {told}"
  ),
  "residuals": (
    "Measured minus fitted, over the {level} band. Neighbours on one side of "
    "zero are a misfit that the law does not have."
  ),
  "backtest": (
    "The first part of each run forecasts the rest. Bar: forecast of the end "
    "with its {level} band; ring: what was measured there. {told}"
  ),
}


def interactive_fragment(
  shown: Sequence[ShownCurve],
  *,
  level: float = 0.9,
  still: str | None = None,
) -> str:
  """Panels of the curves, their residuals and backtests, for `report.page`.

  Args:
    shown: a curve each, at least one, of one unit of compute; backtests of
      curves that have none are left out, and the panel where no curve has one.
    level: probability inside the bands, in (0, 1).
    still: HTML that stands there without JavaScript; None for the figure of
      `report.plot_curves`, or a sentence where matplotlib is missing.

  Returns:
    HTML whose script `report.page` adds. All text in it is escaped.

  Raises:
    ValueError: for no curve, curves of different units, or a level outside
      (0, 1).
  """
  unit = report.shared_unit(shown)
  if not 0.0 < level < 1.0:
    raise ValueError(f"level must be in (0, 1), got {level!r}.")
  last = max(_last(curve) for curve in shown)
  runs = [_run(curve, last, level) for curve in shown]
  data = json.dumps(
    {"unit": unit, "level": level, "runs": runs},
    ensure_ascii=True,  # no line separators that end a script's line
    allow_nan=False,
    separators=(",", ":"),
  )
  for sign in "<>&":  # no name of a run can end the script element
    data = data.replace(sign, f"\\u{ord(sign):04x}")
  tested = [curve for curve in shown if curve.backtest]
  titles = {"curve": "", "residuals": "<h2>Residuals</h2>"}
  if tested:
    titles["backtest"] = "<h2>The first part forecasts the rest</h2>"
  told = {
    "curve": " ".join(filter(None, map(_thinned_line, shown))),
    "residuals": "",
    "backtest": " ".join(map(backtest_line, tested)),
  }
  panels = [
    f"{title}<figure data-panel={kind} hidden><figcaption>"
    + html.escape(
      _ABOUT[kind].format(level=f"{100 * level:g} %", told=told[kind]).strip()
    )
    + "</figcaption></figure>"
    for kind, title in titles.items()
  ]
  return (
    '<section class="curves">'
    f'<script type="application/json">{data}</script>'
    f'<div class="still">{_still(shown, level, still)}</div>'
    f"{''.join(panels)}</section>"
  )


def backtest_line(curve: ShownCurve) -> str:
  """What the first part of a run forecast, and what came, in a sentence."""
  part = curve.backtest
  if part is None:
    return f"{curve.name}: too few evaluations for a forecast from a part."
  told = part.forecast
  inside = told.low <= part.measured <= told.high
  return (
    f"{curve.name}: fitted up to compute {part.fit.compute[-1]:.4g}, the end "
    f"is forecast as {told.mean:.3f} [{told.low:.3f}, {told.high:.3f}] and was "
    f"measured as {part.measured:.3f}, {'inside' if inside else 'outside'} the "
    "band."
  )


def _thinned_line(curve: ShownCurve) -> str:
  count = len(np.asarray(curve.compute))
  if count <= _MOST:
    return ""
  return f"{curve.name}: {_MOST} of {count} evaluations are drawn."


def verdicts_fragment(
  shown: Sequence[ShownCurve], *, level: float = 0.9
) -> str:
  """The asymptote line of each run in HTML, with its name if they are several.

  Args:
    shown: a curve each.
    level: probability inside the intervals.
  """
  lines = []
  for curve in shown:
    name = f"{curve.name}: " if len(shown) > 1 else ""
    line = html.escape(name + verdict.asymptote_line(curve.fit, level))
    lines.append(f'<p class="verdict">{line}</p>')
  return "".join(lines)


def parameters_fragment(
  shown: Sequence[ShownCurve], *, level: float = 0.9
) -> str:
  """A table of all parameters, a row a run, in HTML.

  Args:
    shown: a curve each, at least one, of one unit of compute.
    level: probability inside the intervals.
  """
  unit = report.shared_unit(shown)
  rows = [
    (
      curve.name,
      curve.fit.law,
      str(len(curve.fit.compute)),
      *(
        f"{value:.4g}\n{low:.4g} to {high:.4g}"
        for _, value, low, high in verdict.parameter_rows(curve.fit, level)
      ),
    )
    for curve in shown
  ]
  head = ("run", "law", "points", *shown[0].fit.params._fields)
  of_unit = f" Compute in {unit}." if unit else ""
  note = f"Posterior median and {100 * level:g} % interval.{of_unit}"
  return report.table(head, rows) + f'<p class="note">{html.escape(note)}</p>'


def write_report(
  folder: str | os.PathLike[str],
  shown: Sequence[ShownCurve],
  *,
  title: str,
  level: float = 0.9,
  lead: Sequence[str] = (),
  more: Sequence[str] = (),
) -> tuple[str, ...]:
  """Writes `report.html`, `fit.png` and `fit.svg` of one or several curves.

  Curves of different units of compute get figures of their own: `fit_2.png`
  and so on, and their own panels on the page.

  Args:
    folder: made where it does not exist.
    shown: a curve each, at least one.
    title: of the page and the figures.
    level: probability inside bands and intervals, in (0, 1).
    lead: sentences that follow the asymptotes, such as which of two runs wins.
    more: HTML fragments that stand last, not escaped.

  Returns:
    Notes for the reader: what could not be written, and why. Without
    matplotlib the figures are left out and the page is whole.

  Raises:
    ValueError: for no curve, or a level outside (0, 1).
  """
  if not shown:
    raise ValueError("a report needs at least one curve, got none.")
  out = pathlib.Path(folder)
  out.mkdir(parents=True, exist_ok=True)
  notes = []
  one = len(shown) == 1
  body = [] if one else [verdicts_fragment(shown, level=level)]
  body += [f"<p>{html.escape(line)}</p>" for line in lead]
  for number, unit in enumerate(dict.fromkeys(c.unit for c in shown), 1):
    group = [curve for curve in shown if curve.unit == unit]
    stem, still = "fit" if number == 1 else f"fit_{number}", None
    try:
      for end in ("png", "svg"):
        file = out / f"{stem}.{end}"
        report.plot_curves(file, group, title=title, level=level)
      png = (out / f"{stem}.png").read_bytes()
      still = report.image(png, f"{title}: pass rate against compute.")
    except ImportError as error:
      notes.append(f"{stem}.png and {stem}.svg are left out: {error}")
    body += [
      report.parameters_fragment(group[0].fit, unit=unit, level=level)
      if one
      else parameters_fragment(group, level=level),
      interactive_fragment(group, level=level, still=still),
    ]
    for curve in group:
      if curve.forecasts:
        name = "Forecasts" if one else f"Forecasts of {curve.name}"
        body += [
          f"<h2>{html.escape(name)}</h2>",
          report.forecasts_fragment(curve.forecasts, unit=unit, level=level),
        ]
  page = report.page(title, [*body, *more])
  (out / "report.html").write_text(page, encoding="utf-8")
  return tuple(notes)


def _last(curve: ShownCurve) -> float:
  """The largest compute that a curve, its fit and its forecasts reach."""
  ends = [told.compute for told in curve.forecasts]
  x = np.asarray(curve.compute, float)
  return max([float(x.max()), float(curve.fit.compute[-1]), *ends])


def _short(values) -> list[float]:
  """Six digits, which is more than a screen shows."""
  return [float(f"{value:.6g}") for value in np.asarray(values, float)]


def _fitted(
  fit: fit_lib.CurveFit, x: np.ndarray, last: float, level: float
) -> dict[str, Any]:
  """A fit at the points of a curve, and along a line as far as `last`."""
  grid = np.geomspace(x[x > 0].min(), last * 1.1, _GRID)
  grid = np.concatenate([[0.0], grid])
  predicted = fit.predict(np.concatenate([x, grid]), level)
  mean, low, high = (_short(values) for values in predicted)
  inside = (x == 0) | ((x >= fit.compute[0]) & (x <= fit.compute[-1]))
  return {
    "mean": mean[: len(x)],
    "low": low[: len(x)],
    "high": high[: len(x)],
    "fitted": inside.tolist(),
    "grid": {
      "x": _short(grid),
      "mean": mean[len(x) :],
      "low": low[len(x) :],
      "high": high[len(x) :],
    },
    "last": float(fit.compute[-1]),
    "asymptote": fit.params.asymptote if fit.identified else None,
  }


def _forecasts(forecasts) -> list[dict[str, float]]:
  return [
    {"x": f.compute, "mean": f.mean, "low": f.low, "high": f.high}
    for f in forecasts
  ]


def _run(curve: ShownCurve, last: float, level: float) -> dict[str, Any]:
  """What the page knows of a run: in order of compute, thinned if long."""
  x, y = np.asarray(curve.compute, float), np.asarray(curve.pass_rate, float)
  kept = np.linspace(0, len(x) - 1, min(len(x), _MOST)).round().astype(int)
  kept = np.argsort(x, kind="stable")[kept]
  x, y = x[kept], y[kept]
  run = {"name": curve.name, "x": _short(x), "y": _short(y)}
  run |= _fitted(curve.fit, x, last, level)
  run["forecasts"] = _forecasts(curve.forecasts)
  part = curve.backtest
  run["backtest"] = None
  if part is not None:
    run["backtest"] = _fitted(part.fit, x, x[-1], level) | {
      "forecasts": _forecasts([part.forecast]),
      "measured": part.measured,
    }
  return run


def _still(shown, level: float, still: str | None) -> str:
  """What stands there until, or unless, a script draws."""
  if still is not None:
    return still
  buffer = io.BytesIO()
  try:
    report.plot_curves(buffer, shown, level=level)
  except ImportError:
    return "<p>These figures are drawn by the page's own JavaScript.</p>"
  return report.image(buffer.getvalue(), "Pass rate against compute.")
