"""The figure of a study: a panel for each held-out set and compute axis."""

import os
from collections.abc import Sequence

import numpy as np

from experiments.studies.table import Fitted
from scalerl_jax.run.report import UNITS


def _law(fitted: Fitted, grid: np.ndarray) -> np.ndarray:
  assert fitted.fit is not None
  p = fitted.fit.params
  share = 1.0 / (1.0 + (p.midpoint / grid) ** p.exponent)
  return p.initial + (p.asymptote - p.initial) * share


def _draw(axes, name: str, fits: Sequence[Fitted], color) -> None:
  """A variant: its seeds thin, their mean, and the mean of their laws."""
  for f in fits:
    on = f.compute > 0
    axes.plot(f.compute[on], f.pass_rate[on], color=color, lw=0.6, alpha=0.45)
  fewest = min(len(f.compute) for f in fits)
  x = np.mean([f.compute[:fewest] for f in fits], axis=0)
  y = np.mean([f.pass_rate[:fewest] for f in fits], axis=0)
  on = x > 0
  axes.plot(
    x[on],
    y[on],
    "o",
    ms=3.5,
    color=color,
    mec="white",
    mew=0.4,
    label=f"{name} ({len(fits)})",
  )
  known = [f for f in fits if f.fit is not None and not f.reasons]
  if known and on.any():
    grid = np.geomspace(x[on].min(), x.max() * 1.3, 160)
    law = np.mean([_law(f, grid) for f in known], axis=0)
    axes.plot(grid, law, color=color, lw=1.6)


def draw(
  path: str | os.PathLike[str],
  fits: Sequence[Fitted],
  variants: Sequence[str],
  title: str,
) -> None:
  """Writes the figure as PNG; needs no display.

  Args:
    path: of the file.
    fits: of all finished runs.
    variants: in order, which gives the colours.
    title: of the whole.
  """
  import matplotlib
  from matplotlib import ticker
  from matplotlib.figure import Figure

  rows = list(dict.fromkeys(f.heldout for f in fits))
  columns = list(dict.fromkeys(f.axis for f in fits))
  colors = [matplotlib.colormaps["tab10"](i) for i in range(10)]
  figure = Figure(
    figsize=(6.4 * len(columns), 0.4 + 4.2 * len(rows)), layout="constrained"
  )
  panels = figure.subplots(len(rows), len(columns), squeeze=False)
  for row, heldout in enumerate(rows):
    for column, axis in enumerate(columns):
      axes = panels[row][column]
      for number, name in enumerate(variants):
        here = [
          f
          for f in fits
          if (f.variant, f.heldout, f.axis) == (name, heldout, axis)
        ]
        if here:
          _draw(axes, name, here, colors[number % len(colors)])
      axes.set_xscale("log")
      # About one decade: powers of ten alone are too few, all minor ticks
      # are written over each other.
      axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
      axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
      axes.xaxis.set_minor_formatter(ticker.NullFormatter())
      axes.set_xlabel(f"{axis}: {UNITS[axis]}")
      axes.set_ylabel(f"pass rate, {heldout}")
      axes.spines[["top", "right"]].set_visible(False)
      axes.grid(alpha=0.25, lw=0.6)
      axes.legend(frameon=False, fontsize=8, title="variant (seeds)")
  figure.suptitle(
    f"{title}\nthin: a seed; points: mean over seeds; line: mean of the fitted"
    " laws",
    fontsize=10,
  )
  figure.savefig(path, dpi=150)
