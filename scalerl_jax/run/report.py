"""The report of a run: `curve.png` and a self-contained `report.html`.

Made from the workdir's own files, so that a stopped run and one that ended a
month ago get theirs too. Fits and their figures are `scaling`'s.
"""

import base64
import dataclasses
import html
import io
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scalerl_jax.run import throughput
from scalerl_jax.run.metrics import read_curves, read_metrics
from scalerl_jax.run.progress import quantity
from scalerl_jax.scaling import fit as fit_lib
from scalerl_jax.scaling import forecast as forecast_lib
from scalerl_jax.scaling import interactive, points
from scalerl_jax.scaling import report as fragments

UNITS = {
  "step": "optimiser steps",
  "trained_tokens": "tokens trained on",
  "generated_tokens": "tokens generated",
  "flops_full": "FLOPs of all work asked for",
  "flops_spent": "FLOPs really computed",
  "device_seconds": "device-seconds",
  "wall_seconds": "seconds",
}
_BLUE = "#1f5fa8"
_STYLE = """
.cards{display:flex;flex-wrap:wrap;gap:.8rem;margin:1.2rem 0 .4rem}
.card{flex:1 1 11rem;border:1px solid #dde1e6;border-radius:.5rem;
padding:.7rem 1rem}.card b{display:block;font-size:1.5rem;line-height:1.3;
font-variant-numeric:tabular-nums}.card span{color:#5b6470;font-size:.85rem}
td{vertical-align:top}td.text{font-family:ui-monospace,monospace;
font-size:.85rem;white-space:pre-wrap;word-break:break-word}
.right{color:#1b7a3d}.wrong{color:#b3261e}details{margin:.5rem 0}
summary{cursor:pointer;font-size:1.15rem;font-weight:600;margin:2rem 0 .5rem}
"""


@dataclasses.dataclass(frozen=True)
class Summary:
  """What a run came to; None where it was stopped too early to tell."""

  start: float | None  # held-out pass rate of the first evaluation
  end: float | None  # mean of the last 3 evaluations; of 1 without a forecast
  evaluations: int
  forecast: forecast_lib.Forecast | None  # of the end, from the first half
  error: float | None  # forecast minus end
  inside: bool | None  # whether the end lies in the band
  level: float  # probability held by the band
  report: str  # path of report.html

  def lines(self) -> list[str]:
    """The summary in words, the report's path last."""
    path = f"report: {self.report}"
    if self.start is None or self.end is None:
      return ["held-out pass rate: not evaluated", path]
    rise = f"held-out pass rate: {self.start:.3f} -> {self.end:.3f}"
    told = self.forecast
    if told is None:
      rise = f"{rise} ({self.evaluations} evaluations)"
      return [rise, f"forecast: {_FEW}", path]
    where = "inside" if self.inside else "outside"
    return [
      f"{rise} (mean of the last {forecast_lib.END_EVALUATIONS} evaluations)",
      f"forecast from the first half of the run: {told.mean:.3f}"
      f" [{told.low:.3f}, {told.high:.3f}]; measured: {self.end:.3f};"
      f" difference {self.error:+.3f}, {where} the {self.level:.0%} band",
      path,
    ]


_FEW = (
  f"none, there are too few evaluations: the first half of a run must hold"
  f" {points.FEWEST_POINTS}, the rest {forecast_lib.END_EVALUATIONS}"
)


def write_report(
  workdir: str | os.PathLike[str],
  *,
  title: str,
  config: Mapping[str, Any],
  level: float,
  axis: str,
) -> Summary:
  """Writes `curve.png` and `report.html` from what a workdir holds.

  Args:
    workdir: with `curve.csv`, `metrics.jsonl`, `samples.json` where sample
      completions were kept, and the provenance in `config.json`; what is
      missing is left out.
    title: of the page.
    config: sections, each a mapping of fields.
    level: probability held by the bands, in (0, 1).
    axis: compute axis of the fits, a column of `curve.csv`.

  Returns:
    What the report's first lines say.

  Raises:
    ValueError: an unknown axis, or a file that is not one of ours.
  """
  if axis not in UNITS:
    raise ValueError(f"axis must be one of {', '.join(UNITS)}, got {axis!r}")
  folder = pathlib.Path(workdir)
  curves, metrics = read_curves(folder), read_metrics(folder)
  task, curve = next(iter(curves.items()), ("", {}))
  path = folder / "report.html"
  part, whole = _fits(curve, axis, level) if curve else (None, None)
  summary = _summary(curve, part, level, path)
  name = f"Pass rate of {task} against {UNITS[axis]}"
  body = [
    f"<style>{_STYLE}</style>",
    _cards(summary),
    "" if part else f'<p class="note">Forecast: {html.escape(_FEW)}.</p>',
  ]
  if curve:
    body += _curve_sections(folder, curve, part, whole, axis, level, name)
  body += [
    _tasks(curves),
    _throughput(metrics),
    _staleness(metrics),
    _samples(folder / "samples.json"),
    _details("Config", _flat(config)),
    _details("Provenance", _flat(_provenance(folder))),
  ]
  path.write_text(fragments.page(title, body), encoding="utf-8")
  return summary


def _fits(curve, axis, level):
  """The forecast of the end from the first half, and a fit of all points."""
  x, y = np.asarray(curve[axis], np.float64), curve["pass_rate"]
  trials = curve["prompts"] * curve["samples_per_prompt"]
  part = forecast_lib.first_part(x, y, level=level, trials=trials)
  enough = points.enough(x)
  return part, fit_lib.fit_curve(x, y, trials=trials) if enough else None


def _summary(curve, part, level, path) -> Summary:
  rates = curve["pass_rate"] if curve else np.zeros((0,))
  last = rates[-forecast_lib.END_EVALUATIONS if part else -1 :]
  return Summary(
    start=float(rates[0]) if len(rates) else None,
    end=float(last.mean()) if len(rates) else None,
    evaluations=len(rates),
    forecast=part.forecast if part else None,
    error=part.error if part else None,
    inside=part.inside if part else None,
    level=level,
    report=str(path),
  )


def _cards(summary: Summary) -> str:
  """The headline: two or three figures, large."""

  def card(name: str, value: str, note: str) -> str:
    name, value, note = map(html.escape, (name, value, note))
    inner = f"<span>{name}</span><b>{value}</b><span>{note}</span>"
    return f'<div class="card">{inner}</div>'

  if summary.start is None or summary.end is None:
    nothing = card("held-out pass rate", "-", "no evaluation was made")
    return f'<div class="cards">{nothing}</div>'
  cards = [
    card(
      "held-out pass rate",
      f"{summary.start:.3f} → {summary.end:.3f}",
      f"first → mean of the last {forecast_lib.END_EVALUATIONS} evaluations"
      if summary.forecast
      else f"first → last of {summary.evaluations} evaluations",
    )
  ]
  told = summary.forecast
  if told is not None:
    band = f"{summary.level:.0%} band {told.low:.3f} to {told.high:.3f}"
    where = "inside the band" if summary.inside else "outside the band"
    cards += [
      card("forecast from the first half", f"{told.mean:.3f}", band),
      card("forecast − measured", f"{summary.error:+.3f}", where),
    ]
  return f'<div class="cards">{"".join(cards)}</div>'


def _curve_sections(folder, curve, part, whole, axis, level, name):
  """The figure, also written as `curve.png`, and the parameters."""
  x, y, unit = curve[axis], curve["pass_rate"], UNITS[axis]
  shown = part.fit if part else whole
  picture = {"end": part.forecast.compute if part else None, "level": level}
  picture |= {"unit": unit, "title": name}
  if shown is None:
    caption = "Too few evaluations to fit."
    figure, axes = _panel(4.6, name, f"compute ({unit})", "pass rate")
    axes.plot(x, y, "o-", ms=5, lw=1, color=_BLUE, mec="white", mew=0.6)
    (folder / "curve.png").write_bytes(_png(figure))
  else:
    caption = (
      "Fitted on the first half of the run; the rest was not shown to the fit."
      if part
      else "Fitted on all evaluations."
    )
    fragments.plot_curve(folder / "curve.png", x, y, shown, **picture)
  sections = [_image((folder / "curve.png").read_bytes(), caption)]
  if whole:
    run = fragments.ShownCurve(folder.name, x, y, whole, part, (), unit)
    sections = [
      interactive.interactive_fragment([run], level=level, still=sections[0])
    ]
  if part:
    told = fragments.parameters_fragment(part.fit, unit=unit, level=level)
    sections += ["<h2>The law, from the first half</h2>", told]
  if whole:
    told = fragments.parameters_fragment(whole, unit=unit, level=level)
    sections += ["<h2>The law, from the whole run</h2>", told]
  return sections


def _panel(height: float, title: str, x_label: str, y_label: str):
  """An empty figure of the report's width, and its axes."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(8.0, height), layout="constrained")
  axes = figure.add_subplot()
  axes.set_title(title, loc="left", fontsize=11)
  axes.set_xlabel(x_label)
  axes.set_ylabel(y_label)
  axes.set_axisbelow(True)
  axes.spines[["top", "right"]].set_visible(False)
  axes.grid(alpha=0.25, lw=0.6, axis="y")
  return figure, axes


def _png(figure) -> bytes:
  buffer = io.BytesIO()
  figure.savefig(buffer, dpi=150, format="png")
  return buffer.getvalue()


def _image(png: bytes, caption: str) -> str:
  source = f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"
  text = html.escape(caption)
  image = f'<img alt="{text}" src="{source}">'
  return f"<figure>{image}<figcaption>{text}</figcaption></figure>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """A table of HTML cells."""
  top = "".join(f"<th>{cell}</th>" for cell in head)
  body = "".join(
    f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows
  )
  return f"<table><tr>{top}</tr>{body}</table>"


def _details(name: str, rows: Sequence[tuple[str, str]]) -> str:
  """A folded table of names and values."""
  if not rows:
    return ""
  cells = [tuple(map(html.escape, row)) for row in rows]
  table = _table(("name", "value"), cells)
  return f"<details><summary>{name}</summary>{table}</details>"


def _provenance(folder: pathlib.Path) -> dict[str, Any]:
  """What made the run, as its `config.json` says."""
  path = folder / "config.json"
  if not path.exists():
    return {}
  return json.loads(path.read_text(encoding="utf-8")).get("provenance", {})


def _flat(config: Mapping[str, Any]) -> list[tuple[str, str]]:
  rows = []
  for section, fields in config.items():
    if isinstance(fields, Mapping):
      rows += [(f"{section}.{name}", str(v)) for name, v in fields.items()]
    else:
      rows.append((section, str(fields)))
  return rows


def _tasks(curves) -> str:
  """A line for each held-out set, where there are several."""
  if len(curves) < 2:
    return ""
  rows = [
    (
      html.escape(task),
      f"{c['pass_rate'][0]:.3f}",
      f"{c['pass_rate'][-forecast_lib.END_EVALUATIONS :].mean():.3f}",
      f"{c['prompts'][-1]} x {c['samples_per_prompt'][-1]:g}",
    )
    for task, c in curves.items()
  ]
  table = _table(("set", "start", "end", "prompts x samples"), rows)
  return f"<h2>Held-out sets</h2>{table}"


def _throughput(metrics) -> str:
  rows = throughput.rows(metrics)
  if not rows:
    return ""
  steps, speed = throughput.series(metrics, throughput.SPEED)
  figure = ""
  if len(steps) > 1:
    drawn, axes = _panel(2.6, "Generation", "step", "tokens a second")
    axes.plot(steps, speed, lw=1.2, color=_BLUE)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: quantity(value))
    figure = _image(_png(drawn), "Tokens generated a second, step by step.")
  table = _table(("", "value", "over"), rows)
  return f"<h2>Throughput</h2>{table}{figure}"


def _staleness(metrics) -> str:
  lists = [line["staleness"] for line in metrics if line.get("staleness")]
  if not lists:
    return ""
  count = np.zeros(max(map(len, lists)), int)
  for values in lists:
    count[: len(values)] += np.array(values, int)
  label = "learner steps between a group's oldest token and its use"
  drawn, axes = _panel(2.6, "Staleness", label, "groups")
  axes.bar(np.arange(len(count)), count, color=_BLUE, width=0.7)
  axes.set_xticks(np.arange(len(count), step=max(1, len(count) // 16)))
  mean = (count * np.arange(len(count))).sum() / max(count.sum(), 1)
  caption = (
    f"{count.sum()} groups of {len(lists)} batches; mean {mean:.2f}, most"
    f" {np.flatnonzero(count).max(initial=0)}, allowed {len(count) - 1}."
  )
  return f"<h2>Staleness</h2>{_image(_png(drawn), caption)}"


def _samples(path: pathlib.Path) -> str:
  """Completions of the same held-out prompts before and after."""
  if not path.exists():
    return ""

  def told(completion: Mapping[str, Any] | None) -> str:
    if completion is None:  # the run was stopped before its next evaluation
      return ""
    kind, mark = ("right", "✓") if completion["correct"] else ("wrong", "✗")
    text = html.escape(str(completion["text"]))
    return f'<span class="{kind}">{mark}</span> {text}'

  rows = [
    (
      html.escape(str(sample["prompt"])),
      html.escape(str(sample["answer"])),
      told(sample.get("before")),
      told(sample.get("after")),
    )
    for sample in json.loads(path.read_text(encoding="utf-8"))
  ]
  head = ("prompt", "answer", "before training", "after")
  table = _table(head, rows).replace("<td>", '<td class="text">')
  return f"<h2>Completions</h2>{table}"
