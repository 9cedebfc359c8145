"""Figures and HTML of a fitted curve, for the fit's door and the run's report.

matplotlib is imported where it draws, so that fitting does not need it.
"""

import base64
import hashlib
import html
import importlib.resources
import io
import itertools
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scalerl_jax.scaling import fit as fit_lib
from scalerl_jax.scaling import forecast as forecast_lib
from scalerl_jax.scaling import verdict

_BLUE, _ORANGE, _GREY = "#1f5fa8", "#d1651f", "#5b6470"
_MEANING = {
  "initial": "R₀, pass rate at compute 0",
  "asymptote": "A, pass rate at unlimited compute",
  "exponent": "B, steepness in log-compute",
  "midpoint": "C_mid, compute at half the gain",
}

_PALETTE = (
  *(_BLUE, _ORANGE, "#1b7a3d", "#8a3ea8", "#b3261e", "#0f7a85", "#7a5c00"),
  _GREY,
)
# Nothing is loaded, and no script runs but the one whose hash stands there.
_POLICY = (
  "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
  "base-uri 'none'; form-action 'none'"
)


class ShownCurve(NamedTuple):
  """A curve as a report shows it, with what was fitted to it.

  `compute` and `pass_rate` hold all evaluations, also those that `fit` has not
  seen; `backtest` is the forecast from the first part, `forecasts` are marked.
  Curves in one figure have one `unit` of compute.
  """

  name: str
  compute: npt.ArrayLike
  pass_rate: npt.ArrayLike
  fit: fit_lib.CurveFit
  backtest: forecast_lib.Backtest | None = None
  forecasts: tuple[forecast_lib.Forecast, ...] = ()
  unit: str = ""


def shared_unit(shown: Sequence[ShownCurve]) -> str:
  """The unit of compute of curves that are drawn together.

  Raises:
    ValueError: for no curve, or curves of different units.
  """
  units = sorted({curve.unit for curve in shown})
  if len(units) != 1:
    raise ValueError(
      "a figure needs at least one curve, and all of one unit of compute, got "
      f"units {units}."
    )
  return units[0]


def _figure(shown: Sequence[ShownCurve], title, level):
  from matplotlib import pyplot

  unit = shared_unit(shown)
  figure, axes = pyplot.subplots(figsize=(8.0, 4.6), layout="constrained")
  for curve, color in zip(shown, itertools.cycle(_PALETTE), strict=False):
    _draw(axes, curve, color, level, alone=len(shown) == 1)
  axes.set_xscale("log")
  axes.set_xlabel(f"compute ({unit})" if unit else "compute")
  axes.set_ylabel("pass rate")
  axes.set_title(title, loc="left", fontsize=12)
  axes.spines[["top", "right"]].set_visible(False)
  axes.grid(alpha=0.25, lw=0.6)
  axes.legend(frameon=False, fontsize=9, loc="best")
  return figure


def _draw(axes, curve: ShownCurve, color: str, level: float, alone: bool):
  """One curve; alone, the legend explains its parts, else it names the run."""
  fit = curve.fit
  x, y = np.asarray(curve.compute, float), np.asarray(curve.pass_rate, float)
  started = x > 0
  fitted = started & (x <= fit.compute[-1]) & (x >= fit.compute[0])
  rest = started & ~fitted
  first = x[started].min()
  ends = [told.compute for told in curve.forecasts]
  grid = np.geomspace(first, max([*x, fit.compute[-1], *ends]) * 1.15, 160)
  mean, low, high = fit.predict(grid, level)

  def label(words: str) -> str | None:
    return words if alone else None

  def dots(chosen, at, words, **style):
    style = {"ms": 5, "mec": "white", "mew": 0.6, "ls": "", **style}
    axes.plot(at, y[chosen], label=label(words), **style)

  band = label(f"{level:.0%} band of an evaluation".replace("%", " %"))
  axes.fill_between(grid, low, high, color=color, alpha=0.15, lw=0, label=band)
  words = "fitted law and its misfit" if alone else curve.name
  axes.plot(grid, mean, color=color, lw=2, label=words)
  dots(fitted, x[fitted], "evaluations fitted", marker="o", color=color)
  if rest.any():
    style = {"color": _ORANGE} if alone else {"color": color, "mfc": "white"}
    style |= {} if alone else {"mec": color}
    words = "evaluations not shown to the fit"
    dots(rest, x[rest], words, marker="o", **style)
    axes.axvline(fit.compute[-1], color=_GREY, lw=1, ls=":")
  if not started.all():
    # Compute 0 has no place on a logarithmic axis: it is drawn at its edge.
    edge = np.full((~started).sum(), first / 1.6)
    style = {"marker": "D", "color": _GREY if alone else color}
    dots(~started, edge, "at compute 0", **style)
  if fit.identified:
    words = label(f"asymptote {fit.params.asymptote:.3f}")
    style = {"color": _GREY if alone else color, "lw": 1, "ls": "--"}
    axes.axhline(fit.params.asymptote, label=words, **style)
  if curve.forecasts:
    told = max(curve.forecasts, key=lambda f: f.compute)
    reach = [[max(told.mean - told.low, 0)], [max(told.high - told.mean, 0)]]
    words = label(f"forecast of the end {told.mean:.3f}")
    style = {"color": "#1d232b" if alone else color, "capsize": 4, "lw": 1.5}
    style |= {"fmt": "s", "ms": 6, "label": words}
    axes.errorbar([told.compute], [told.mean], yerr=reach, **style)


def plot_curves(
  path: str | os.PathLike[str] | io.BytesIO,
  shown: Sequence[ShownCurve],
  *,
  title: str = "",
  level: float = 0.9,
) -> None:
  """Draws curves, the fits to some of their points, and the fits' bands.

  Args:
    path: a `.png` or `.svg` file, or a buffer for PNG.
    shown: a curve each, at least one, of one unit of compute; points that a
      fit has not seen are drawn over its band in another way.
    title: of the figure.
    level: probability inside the bands, in (0, 1).

  Raises:
    ImportError: in one sentence, without matplotlib.
    ValueError: for no curve, or curves of different units.
  """
  try:
    import matplotlib
    from matplotlib import pyplot
  except ImportError as error:
    raise ImportError(
      "a figure needs matplotlib, which is not installed; install it: pip "
      "install 'scalerl-jax[plot]'."
    ) from error
  figure = _figure(shown, title, level)
  try:
    if isinstance(path, io.BytesIO) or not os.fspath(path).endswith(".svg"):
      figure.savefig(path, dpi=150, format="png")
    else:  # the same bytes for the same fit: no date, no random names
      with matplotlib.rc_context({"svg.hashsalt": "curve"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
  finally:
    pyplot.close(figure)


def plot_curve(
  path: str | os.PathLike[str] | io.BytesIO,
  compute: npt.ArrayLike,
  pass_rate: npt.ArrayLike,
  fit: fit_lib.CurveFit,
  *,
  end: float | None = None,
  unit: str = "",
  title: str = "",
  level: float = 0.9,
) -> None:
  """Draws one curve: `plot_curves` with a legend of its parts.

  Args:
    path: a `.png` or `.svg` file, or a buffer for PNG.
    compute: of all evaluations; those beyond the fit's own points are drawn
      over its band in another colour.
    pass_rate: of all evaluations, in [0, 1].
    fit: the fit.
    end: compute whose forecast is marked, or None.
    unit: of compute, for the axis.
    title: of the figure.
    level: probability inside the band.

  Raises:
    ImportError: in one sentence, without matplotlib.
  """
  told = () if not end else (forecast_lib.forecast_from(fit, end, level),)
  shown = ShownCurve(title, compute, pass_rate, fit, None, told, unit)
  plot_curves(path, [shown], title=title, level=level)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """An HTML table that scrolls by itself on a narrow screen.

  Args:
    head: the names of the columns, escaped here.
    rows: a text a column each, escaped here.
  """

  def cells(tag, row):
    return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)

  body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
  inner = f"<table><tr>{cells('th', head)}</tr>{body}</table>"
  return f'<div class="scroll">{inner}</div>'


def image(png: bytes, caption: str) -> str:
  """An HTML figure with the picture inside it: no file beside it.

  Args:
    png: the picture.
    caption: the text under it and in its place, escaped here.
  """
  data, text = base64.b64encode(png).decode("ascii"), html.escape(caption)
  return (
    f'<figure><img alt="{text}" src="data:image/png;base64,{data}">'
    f"<figcaption>{text}</figcaption></figure>"
  )


def curve_fragment(
  compute: npt.ArrayLike,
  pass_rate: npt.ArrayLike,
  fit: fit_lib.CurveFit,
  *,
  end: float | None = None,
  unit: str = "",
  title: str = "",
  caption: str = "",
  level: float = 0.9,
) -> str:
  """An HTML figure with the curve as an inline PNG: no file beside it.

  Args:
    compute, pass_rate, fit, end, unit, title, level: as for `plot_curve`.
    caption: the text under the figure; `title` where empty.
  """
  buffer = io.BytesIO()
  plot_curve(
    buffer,
    compute,
    pass_rate,
    fit,
    end=end,
    unit=unit,
    title=title,
    level=level,
  )
  text = caption or title or "Pass rate against compute."
  return image(buffer.getvalue(), text)


def parameters_fragment(
  fit: fit_lib.CurveFit, *, unit: str = "", level: float = 0.9
) -> str:
  """The verdict on the asymptote and the table of parameters, in HTML.

  Args:
    fit: the fit.
    unit: of compute.
    level: probability inside the intervals.
  """
  rows = [
    (name, _MEANING[name], f"{value:.4g}", f"{low:.4g} to {high:.4g}")
    for name, value, low, high in verdict.parameter_rows(fit, level)
  ]
  of_unit = f" Compute in {unit}." if unit else ""
  note = (
    f"{fit.law}, {len(fit.compute)} points, noise and misfit together "
    f"{fit.residual:.4f}; values are posterior medians.{of_unit}"
  )
  return (
    f'<p class="verdict">{html.escape(verdict.asymptote_line(fit, level))}</p>'
    + table(("parameter", "meaning", "value", f"{level:.0%} interval"), rows)
    + f'<p class="note">{html.escape(note)}</p>'
  )


def forecasts_fragment(
  forecasts: Sequence[forecast_lib.Forecast],
  *,
  unit: str = "",
  level: float = 0.9,
) -> str:
  """The table of forecasts in HTML.

  Args:
    forecasts: a row each, made at `level`.
    unit: of compute.
    level: probability inside the bands.
  """
  rows = [
    (f"{f.compute:.6g}", f"{f.mean:.3f}", f"{f.low:.3f} to {f.high:.3f}")
    for f in forecasts
  ]
  head = f"compute ({unit})" if unit else "compute"
  return table((head, "forecast", f"{level:.0%} band"), rows)


def page(title: str, fragments: Sequence[str]) -> str:
  """A self-contained HTML page around the fragments, which loads nothing.

  The page's policy lets no request out and no script run but ours, which is
  there when a fragment is one of `interactive`'s.

  Args:
    title: text, escaped here.
    fragments: HTML, not escaped.
  """
  name, body = html.escape(title), "".join(fragments)
  script, policy = "", _POLICY
  if '<section class="curves">' in body:
    code = _asset("report.js")
    script = f"<script>{code}</script>"
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    policy += f"; script-src 'sha256-{digest}'"
  return (
    '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width,initial-scale=1">'
    f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    f"<title>{name}</title><style>{_asset('report.css')}</style></head><body>"
    f"<h1>{name}</h1>{body}{script}</body></html>"
  )


def _asset(name: str) -> str:
  """The text of a file that comes with the package."""
  folder = importlib.resources.files("scalerl_jax.scaling")
  return folder.joinpath("assets", name).read_text(encoding="utf-8")
