"""From the curves of a study to its numbers: fits, intervals, differences.

Every curve is fitted alone; what is said of a variant is a mean over seeds.
How the numbers are written down as text is `text.py`.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.studies.runner import Job
from scalerl_jax.run.metrics import read_curves
from scalerl_jax.scaling import compare, points
from scalerl_jax.scaling.fit import CurveFit, fit_curve
from scalerl_jax.scaling.forecast import END_EVALUATIONS

LEVEL = 0.9
PARAMETERS = ("asymptote", "exponent", "midpoint")
QUANTITIES = (*PARAMETERS, "end")


@dataclasses.dataclass(frozen=True, eq=False)
class Fitted:
  """One curve of one run, and what was fitted to it."""

  variant: str
  seed: int
  heldout: str
  axis: str
  compute: np.ndarray
  pass_rate: np.ndarray
  fit: CurveFit | None
  reasons: tuple[str, ...]  # why A is unknown; empty when it is known

  @property
  def end(self) -> float:
    """Mean pass rate of the last evaluations."""
    return float(self.pass_rate[-END_EVALUATIONS:].mean())

  def value(self, quantity: str) -> float | None:
    """A of a curve that does not determine it is no number."""
    if quantity == "end":
      return self.end
    if self.fit is None or self.reasons:
      return None
    return float(getattr(self.fit.params, quantity))


def fit_jobs(jobs: Sequence[Job], axes: Sequence[str]) -> list[Fitted]:
  """Each held-out curve of each finished run, fitted against each axis."""
  found = []
  for job in jobs:
    for heldout, curve in read_curves(job.folder).items():
      trials = curve["prompts"] * curve["samples_per_prompt"]
      for axis in axes:
        x = np.asarray(curve[axis], np.float64)
        found.append(_fit(job, heldout, axis, x, curve["pass_rate"], trials))
  return found


def _fit(job, heldout, axis, compute, pass_rate, trials) -> Fitted:
  fitted = None
  if points.enough(compute):
    fitted = fit_curve(compute, pass_rate, trials=trials)
    reasons = fitted.reasons
  else:
    reasons = (
      f"too few points to fit: {len(compute)}, where"
      f" {points.FEWEST_POINTS} are needed",
    )
  return Fitted(
    job.variant, job.seed, heldout, axis, compute, pass_rate, fitted, reasons
  )


def _interval(found: compare.SeedInterval) -> dict[str, Any]:
  return found._asdict() | {"kind": "t-interval over seeds"}


def _over_seeds(quantity: str, fits: Sequence[Fitted]) -> dict[str, Any] | None:
  """Mean and interval of a quantity; C_mid's are of its logarithm."""
  known = {f.seed: f.value(quantity) for f in fits}
  values = [value for value in known.values() if value is not None]
  if not values:
    return None
  if len(values) >= 2:
    if quantity == "midpoint":
      logs = compare.seed_interval(np.log(values), LEVEL)
      mean, low, high = (float(np.exp(x)) for x in logs[:3])
      return _interval(compare.SeedInterval(mean, low, high, logs.count))
    return _interval(compare.seed_interval(values, LEVEL))
  alone = {"mean": values[0], "low": None, "high": None, "count": 1}
  if quantity == "end":
    return alone | {"kind": "one seed, no interval"}
  one = next(f.fit for f in fits if f.fit and not f.reasons)
  low, high = one.intervals(LEVEL)[quantity]
  return alone | {
    "low": low,
    "high": high,
    "kind": "one seed: the fit's own interval",
  }


def _difference(
  quantity: str, ones: Sequence[Fitted], others: Sequence[Fitted]
) -> dict[str, Any] | None:
  """One minus other, seed by seed; of C_mid the ratio."""
  reference = {f.seed: f.value(quantity) for f in others}
  pairs = [
    (value, reference[f.seed])
    for f in ones
    if (value := f.value(quantity)) is not None
    and reference.get(f.seed) is not None
  ]
  if not pairs:
    return None
  a, b = np.array(pairs, np.float64).T
  ratio = quantity == "midpoint"
  if ratio:
    a, b = np.log(a), np.log(b)
  if len(pairs) < 2:
    mean = float(a[0] - b[0])
    found = {"mean": mean, "low": None, "high": None, "count": 1}
  else:
    found = dict(compare.paired_difference(a, b, LEVEL)._asdict())
  found["verdict"] = _verdict(found)
  if ratio:
    for name in ("mean", "low", "high"):
      found[name] = None if found[name] is None else float(np.exp(found[name]))
  return found | {"kind": "ratio" if ratio else "difference"}


def _verdict(found: Mapping[str, Any]) -> str | None:
  """What may be said from enough pairs: higher, lower, not told apart."""
  if found["count"] < compare.VERDICT_PAIRS:
    return None
  if found["low"] > 0:
    return "higher"
  return "lower" if found["high"] < 0 else "not told apart"


def _same_asymptote(
  ones: Sequence[Fitted], others: Sequence[Fitted]
) -> dict[str, Any] | None:
  """The paper's rule: both B with the averaged A held, where A are alike."""
  means = []
  for fits in (ones, others):
    values = [v for f in fits if (v := f.value("asymptote")) is not None]
    if not values:
      return None
    means.append(float(np.mean(values)))
  asymptote = compare.shared_asymptote(*means)
  if asymptote is None:
    return None
  if any(
    f.fit.params.initial >= asymptote
    for f in (*ones, *others)
    if f.fit is not None and not f.reasons
  ):
    return None  # no law starts at or above its own end
  sides = {}
  for fits in (ones, others):
    refits = [
      compare.refit_exponent(
        f.compute,
        f.pass_rate,
        initial=f.fit.params.initial,
        asymptote=asymptote,
      )
      for f in fits
      if f.fit is not None and not f.reasons
    ]
    sides[fits[0].variant] = {
      "exponents": [refit.exponent for refit in refits],
      "midpoints": [refit.midpoint for refit in refits],
      "exponent": float(np.mean([refit.exponent for refit in refits])),
      "midpoint": float(
        np.exp(np.mean(np.log([refit.midpoint for refit in refits])))
      ),
    }
  return {"asymptote": asymptote, "margin": compare.MARGIN, "variants": sides}


def _run(fitted: Fitted) -> dict[str, Any]:
  """All numbers of one curve."""
  values: dict[str, Any] = {
    "seed": fitted.seed,
    "end": fitted.end,
    "points": len(fitted.compute),
    "identified": not fitted.reasons,
    "reasons": list(fitted.reasons),
  }
  if fitted.fit is not None:
    intervals = fitted.fit.intervals(LEVEL)
    values |= {
      name: {"value": value, "interval": list(intervals[name])}
      for name, value in fitted.fit.params._asdict().items()
    }
  return values


def tabulate(fits: Sequence[Fitted], variants: Sequence[str]) -> list[dict]:
  """A section for each held-out set and axis, JSON-ready.

  Args:
    fits: of all finished runs.
    variants: in order; within a section the first that has curves is the
      reference.

  Returns:
    Sections with `heldout`, `axis`, `reference`, `variants` (numbers over
    seeds, each run's own, and where there is a reference the differences and
    the refit with a shared asymptote).
  """
  sections = []
  for heldout, axis in dict.fromkeys((f.heldout, f.axis) for f in fits):
    here = {
      name: [
        f
        for f in fits
        if (f.variant, f.heldout, f.axis) == (name, heldout, axis)
      ]
      for name in variants
    }
    here = {name: found for name, found in here.items() if found}
    reference = next(iter(here))
    rows: dict[str, Any] = {}
    for name, found in here.items():
      rows[name] = {
        "seeds": {q: _over_seeds(q, found) for q in QUANTITIES},
        "runs": [_run(f) for f in found],
      }
      if name != reference:
        others = here[reference]
        rows[name] |= {
          "paired": {q: _difference(q, found, others) for q in QUANTITIES},
          "same_asymptote": _same_asymptote(found, others),
        }
    sections.append(
      {
        "heldout": heldout,
        "axis": axis,
        "level": LEVEL,
        "reference": reference,
        "variants": rows,
      }
    )
  return sections


def commits(jobs: Sequence[Job]) -> list[str]:
  """Of the code that made the runs, as their `config.json` say."""
  found = set()
  for job in jobs:
    path: pathlib.Path = job.folder / "config.json"
    found.add(json.loads(path.read_text())["provenance"]["commit"])
  return sorted(found)
