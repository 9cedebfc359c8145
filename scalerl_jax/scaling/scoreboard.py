"""What a backtest came to: means and ratios with intervals over families.

A family of curves is the only independent unit, so that is what is drawn again.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from scalerl_jax.scaling import conformal
from scalerl_jax.scaling.backtest import Results, Score

REFERENCE = "plain sigmoid"
RESAMPLES = 2000


class Estimate(NamedTuple):
  """A value with its bootstrap interval over families."""

  value: float
  low: float
  high: float


class Row(NamedTuple):
  """A method at one share: means over its curves; `scaled` is conformal."""

  share: float
  method: str
  curves: int
  families: int
  error: Estimate  # Mean absolute.
  rmse: Estimate
  crps: Estimate
  coverage: Estimate
  width: Estimate
  factor: float  # Mean factor of the half-widths.
  scaled_coverage: Estimate
  scaled_width: Estimate


class Ratio(NamedTuple):
  """A method's mean over another's, on the curves that both forecast."""

  share: float
  method: str
  reference: str
  quantity: str
  curves: int
  estimate: Estimate


class _Resampler:
  """Means and their ratios over families drawn again, the same for all."""

  def __init__(self, families: Sequence[str], level: float, seed: int = 0):
    self._labels, self._index = np.unique(families, return_inverse=True)
    count = len(self._labels)
    rng = np.random.default_rng(seed)
    self._times = rng.multinomial(count, np.full(count, 1 / count), RESAMPLES)
    self._tails = (0.5 - level / 2, 0.5 + level / 2)

  def ratio(self, above: np.ndarray, below: np.ndarray) -> Estimate:
    """Σ above / Σ below, with its percentile interval."""
    sums = [
      self._times @ np.bincount(self._index, weights=v) for v in (above, below)
    ]
    with np.errstate(divide="ignore", invalid="ignore"):
      value = np.float64(above.sum()) / np.float64(below.sum())
      drawn = sums[0] / sums[1]
    if len(self._labels) < 2 or not np.isfinite(drawn).all():
      return Estimate(float(value), np.nan, np.nan)
    low, high = np.quantile(drawn, self._tails)
    return Estimate(float(value), float(low), float(high))

  def mean(self, values: np.ndarray) -> Estimate:
    """The mean, with its percentile interval."""
    return self.ratio(values, np.ones_like(values))


def _columns(
  chosen: Sequence[Score], level: float
) -> tuple[dict[str, Float64[np.ndarray, "N"]], float]:
  """What is averaged, a number a curve; and the mean conformal factor.

  The factors are found once: a family drawn twice would be on both sides of
  leaving it out.
  """
  families = np.array([s.family for s in chosen])
  measured, mean = (
    np.array([getattr(s, key) for s in chosen]) for key in ("measured", "mean")
  )
  errors = np.array([s.standardised for s in chosen])
  factor = conformal.leave_one_family_out(errors, families, level)
  centre, below, above = np.array([s.unclipped for s in chosen]).T
  low, high = conformal.scaled(centre, below, above, factor)
  low, high = low.clip(0.0, 1.0), high.clip(0.0, 1.0)
  inside = (errors <= factor * (1.0 + 1e-9)).astype(float)
  return {
    "error": np.abs(mean - measured),
    "square": (mean - measured) ** 2,
    "crps": np.array([s.crps for s in chosen]),
    "coverage": np.array([float(s.inside) for s in chosen]),
    "width": np.array([s.high - s.low for s in chosen]),
    "scaled_coverage": np.where(np.isnan(factor), np.nan, inside),
    "scaled_width": high - low,
  }, float(factor.mean())


def _grouped(
  found: Iterable[Score],
) -> dict[tuple[float, str], list[Score]]:
  grouped: dict[tuple[float, str], list[Score]] = {}
  for one in found:
    grouped.setdefault((one.share, one.method), []).append(one)
  return grouped


def summary(found: Results, level: float = 0.9) -> list[Row]:
  """Means of each method at each share, over the curves it forecast.

  Args:
    found: the scores.
    level: of the bootstrap intervals, in (0, 1).

  Returns:
    A row a share and method. With one family there is no interval and nothing
    to scale by: NaN.
  """
  rows = []
  for (share, method), chosen in sorted(
    _grouped(found.scores).items(), key=lambda item: item[0][0]
  ):
    columns, factor = _columns(chosen, found.level)
    families = [s.family for s in chosen]
    again = _Resampler(families, level)
    mean = {key: again.mean(values) for key, values in columns.items()}
    rmse = Estimate(*(float(np.sqrt(v)) for v in mean.pop("square")))
    rows.append(
      Row(
        share,
        method,
        len(chosen),
        len(set(families)),
        rmse=rmse,
        factor=factor,
        **mean,
      )
    )
  return rows


def ratios(
  found: Results, reference: str = REFERENCE, level: float = 0.9
) -> list[Ratio]:
  """Every method against a reference, on the curves that both forecast.

  Args:
    found: the scores.
    reference: name of the method below the line.
    level: of the bootstrap intervals over families, in (0, 1).

  Returns:
    For each share and other method the ratio of mean absolute errors
    ("error"), "crps", "width", and "scaled_width": widths after each method's
    own leave-one-family-out conformal scaling.
  """
  grouped = _grouped(found.scores)
  answers = []
  for (share, method), chosen in sorted(
    grouped.items(), key=lambda item: item[0][0]
  ):
    below = {s.name: s for s in grouped.get((share, reference), [])}
    ours = [s for s in chosen if s.name in below]
    if method == reference or not ours:
      continue
    theirs = [below[s.name] for s in ours]
    again = _Resampler([s.family for s in ours], level)
    tops, _ = _columns(ours, found.level)
    bottoms, _ = _columns(theirs, found.level)
    answers += [
      Ratio(
        share,
        method,
        reference,
        quantity,
        len(ours),
        again.ratio(tops[quantity], bottoms[quantity]),
      )
      for quantity in ("error", "crps", "width", "scaled_width")
    ]
  return answers
