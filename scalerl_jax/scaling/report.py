"""Figures and HTML of a fitted curve, for the fit's door and the run's report.

matplotlib is imported where it draws, so that fitting does not need it.
"""

import base64
import html
import io
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from scalerl_jax.scaling import fit as fit_lib
from scalerl_jax.scaling import forecast as forecast_lib

_BLUE, _ORANGE, _GREY = "#1f5fa8", "#d1651f", "#5b6470"
_MEANING = {
  "initial": "R₀, pass rate at compute 0",
  "asymptote": "A, pass rate at unlimited compute",
  "exponent": "B, steepness in log-compute",
  "midpoint": "C_mid, compute at half the gain",
}

STYLE = """
body{font:16px/1.5 system-ui,sans-serif;color:#1d232b;background:#fff;
max-width:56rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0 0 .5rem}h2{font-size:1.15rem;margin:2rem 0 .5rem}
figure{margin:1rem 0}img{max-width:100%;height:auto}
figcaption,.note{color:#5b6470;font-size:.9rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.3rem 1.2rem .3rem 0;
border-bottom:1px solid #dde1e6}
.verdict{font-size:1.1rem;font-weight:600}
"""


def asymptote_line(fit: fit_lib.CurveFit, level: float = 0.9) -> str:
  """The first line of every answer: A with its interval, or why not.

  Args:
    fit: the fit.
    level: probability inside the interval.
  """
  if not fit.identified:
    return f"asymptote: unidentified ({'; '.join(fit.reasons)})"
  low, high = fit.intervals(level)["asymptote"]
  return f"asymptote: {fit.params.asymptote:.3f} [{low:.3f}, {high:.3f}]"


def _figure(compute, pass_rate, fit, end, unit, title, level):
  from matplotlib import pyplot

  x, y = np.asarray(compute, float), np.asarray(pass_rate, float)
  started = x > 0
  fitted = started & (x <= fit.compute[-1]) & (x >= fit.compute[0])
  first = x[started].min()
  last = max(x.max(), fit.compute[-1], end or 0.0)
  grid = np.geomspace(first, last * 1.15, 160)
  mean, low, high = fit.predict(grid, level)
  figure, axes = pyplot.subplots(figsize=(8.0, 4.6), layout="constrained")
  band = f"{level:.0%} band of an evaluation".replace("%", " %")
  axes.fill_between(grid, low, high, color=_BLUE, alpha=0.15, lw=0, label=band)
  axes.plot(grid, mean, color=_BLUE, lw=2, label="fitted law and its misfit")
  axes.plot(
    x[fitted],
    y[fitted],
    "o",
    ms=5,
    color=_BLUE,
    mec="white",
    mew=0.6,
    label="evaluations fitted",
  )
  rest = started & ~fitted
  if rest.any():
    axes.plot(
      x[rest],
      y[rest],
      "o",
      ms=5,
      color=_ORANGE,
      mec="white",
      mew=0.6,
      label="evaluations not shown to the fit",
    )
  if fitted.any() and rest.any():
    axes.axvline(fit.compute[-1], color=_GREY, lw=1, ls=":")
  if not started.all():
    # Compute 0 has no place on a logarithmic axis: it is drawn at its edge.
    edge = first / 1.6
    axes.plot(
      np.full((~started).sum(), edge),
      y[~started],
      "D",
      ms=5,
      color=_GREY,
      label="at compute 0",
    )
  if fit.identified:
    axes.axhline(
      fit.params.asymptote,
      color=_GREY,
      lw=1,
      ls="--",
      label=f"asymptote {fit.params.asymptote:.3f}",
    )
  if end:
    shown = forecast_lib.forecast_from(fit, end, level)
    axes.errorbar(
      [end],
      [shown.mean],
      yerr=[
        [max(shown.mean - shown.low, 0)],
        [max(shown.high - shown.mean, 0)],
      ],
      fmt="s",
      ms=6,
      color="#1d232b",
      capsize=4,
      lw=1.5,
      label=f"forecast of the end {shown.mean:.3f}",
    )
  axes.set_xscale("log")
  axes.set_xlabel(f"compute ({unit})" if unit else "compute")
  axes.set_ylabel("pass rate")
  axes.set_title(title, loc="left", fontsize=12)
  axes.spines[["top", "right"]].set_visible(False)
  axes.grid(alpha=0.25, lw=0.6)
  axes.legend(frameon=False, fontsize=9, loc="best")
  return figure


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
  """Draws a curve, the fit to some of its points, and the fit's band.

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
  try:
    from matplotlib import pyplot
  except ImportError as error:
    raise ImportError(
      "a figure needs matplotlib, which is not installed; install it, or fit "
      "without --out."
    ) from error
  figure = _figure(compute, pass_rate, fit, end, unit, title, level)
  try:
    if isinstance(path, io.BytesIO):
      figure.savefig(path, dpi=150, format="png")
    else:
      figure.savefig(path, dpi=150)
  finally:
    pyplot.close(figure)


def parameter_rows(
  fit: fit_lib.CurveFit, level: float = 0.9
) -> list[tuple[str, float, float, float]]:
  """Name, value, low and high of each parameter of the law.

  Args:
    fit: the fit.
    level: probability inside the interval.
  """
  bounds = fit.intervals(level)
  return [
    (name, value, *bounds[name]) for name, value in fit.params._asdict().items()
  ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  def cells(tag, row):
    return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)

  body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
  return f"<table><tr>{cells('th', head)}</tr>{body}</table>"


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
  data = base64.b64encode(buffer.getvalue()).decode("ascii")
  text = html.escape(caption or title or "Pass rate against compute.")
  return (
    f'<figure><img alt="{text}" src="data:image/png;base64,{data}">'
    f"<figcaption>{text}</figcaption></figure>"
  )


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
    for name, value, low, high in parameter_rows(fit, level)
  ]
  of_unit = f" Compute in {unit}." if unit else ""
  note = (
    f"{fit.law}, {len(fit.compute)} points, noise and misfit together "
    f"{fit.residual:.4f}; values are posterior medians.{of_unit}"
  )
  return (
    f'<p class="verdict">{html.escape(asymptote_line(fit, level))}</p>'
    + _table(("parameter", "meaning", "value", f"{level:.0%} interval"), rows)
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
  return _table((head, "forecast", f"{level:.0%} band"), rows)


def page(title: str, fragments: Sequence[str]) -> str:
  """A self-contained HTML page around the fragments.

  Args:
    title: text, escaped here.
    fragments: HTML, not escaped.
  """
  name = html.escape(title)
  return (
    '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width,initial-scale=1">'
    f"<title>{name}</title><style>{STYLE}</style></head><body>"
    f"<h1>{name}</h1>{''.join(fragments)}</body></html>"
  )
