"""Forecasts of the ends of finished runs from their first parts, scored.

The fit and the simple forecasts of `baselines.py` side by side; their means
and ratios are in `scoreboard.py`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scalerl_jax.scaling import baselines, conformal, forecast, scores
from scalerl_jax.scaling import draws as draws_lib
from scalerl_jax.scaling.curve_fit import CurveFit
from scalerl_jax.scaling.fit import fit_curve

SHARES = (0.1, 0.2, 1.0 / 3.0, 0.5, 2.0 / 3.0)
OURS, WITH_SIBLINGS = "ours", "ours, siblings"


class Case(NamedTuple):
  """A finished run; runs of one `family` are not independent of each other."""

  name: str
  family: str
  compute: npt.ArrayLike
  pass_rate: npt.ArrayLike
  trials: npt.ArrayLike | None = None
  # Siblings are runs of one group, in one unit of compute; "" for none.
  group: str = ""


class Score(NamedTuple):
  """One forecast of one run's end; mean and band are clipped to [0, 1]."""

  name: str
  family: str
  share: float
  method: str
  measured: float
  mean: float
  low: float
  high: float
  crps: float
  standardised: float  # Error in half-widths of the band before clipping.
  unclipped: tuple[float, float, float]  # Mean, low, high.

  @property
  def error(self) -> float:
    """Forecast minus measured."""
    return self.mean - self.measured

  @property
  def inside(self) -> bool:
    """Whether the measured end lies in the band."""
    return self.low <= self.measured <= self.high


class Skipped(NamedTuple):
  """A forecast that could not be made, and why."""

  name: str
  share: float
  method: str
  reason: str


class Results(NamedTuple):
  """All scores, and what was left out."""

  level: float
  scores: tuple[Score, ...]
  skipped: tuple[Skipped, ...]


def fitted_forecast(
  part: forecast.Part, siblings: Sequence[CurveFit] = ()
) -> baselines.Predictive:
  """Our forecast of the end: the posterior's.

  Args:
    part: the first part of a run.
    siblings: fits of finished runs of the same task.

  Returns:
    The forecast of the mean of the last evaluations.
  """
  fit = fit_curve(
    part.compute, part.pass_rate, trials=part.trials, siblings=siblings
  )
  sample = draws_lib.curve_draws(
    fit, part.end, "observation", evaluations=forecast.END_EVALUATIONS
  )[0]
  mean = float(fit.predict(part.end)[0])
  return baselines.Predictive(mean, np.sort(sample))


def score(
  case: Case,
  part: forecast.Part,
  share: float,
  method: str,
  found: baselines.Predictive,
  level: float,
) -> Score:
  """Scores a forecast: pass rates lie in [0, 1], and so does what is scored.

  Clipping makes every method better, the widest most: a t-interval of an
  asymptote that is not identified reaches far beyond 1.

  Args:
    case: the run.
    part: its first part, with the measured end.
    share: of the run's compute that was seen.
    method: name of the forecaster.
    found: its forecast.
    level: of the band, in (0, 1).
  """
  low, high = found.band(level)
  # A point outside its own band would have a half-width below 0.
  centre = min(max(found.mean, low), high)
  return Score(
    case.name,
    case.family,
    share,
    method,
    part.measured,
    float(np.clip(found.mean, 0.0, 1.0)),
    float(np.clip(low, 0.0, 1.0)),
    float(np.clip(high, 0.0, 1.0)),
    scores.crps_sample(found.sample.clip(0.0, 1.0), part.measured),
    float(conformal.standardised_error(centre, low, high, part.measured)),
    (centre, low, high),
  )


def _methods(cases: Sequence[Case], siblings: bool):
  """Name to forecaster of (case, part); finished runs are fitted once."""
  finished: dict[int, CurveFit] = {}

  def lent(case: Case) -> list[CurveFit]:
    found = []
    for index, other in enumerate(cases):
      if other is case or not case.group or other.group != case.group:
        continue
      if index not in finished:
        finished[index] = fit_curve(
          other.compute, other.pass_rate, trials=other.trials
        )
      found.append(finished[index])
    return found

  def with_siblings(case, part):
    others = lent(case)
    if not others:
      raise ValueError(f"{case.name} has no sibling among the curves.")
    return fitted_forecast(part, others)

  def simple(forecaster):
    def of_part(case, part):
      return forecaster(
        part.compute, part.pass_rate, part.end, forecast.END_EVALUATIONS
      )

    return of_part

  named: dict[str, Callable[[Case, forecast.Part], baselines.Predictive]] = {
    OURS: lambda case, part: fitted_forecast(part)
  }
  if siblings:
    named[WITH_SIBLINGS] = with_siblings
  return named | {n: simple(f) for n, f in baselines.BASELINES.items()}


def backtest(
  cases: Sequence[Case],
  shares: Sequence[float] = SHARES,
  *,
  level: float = 0.9,
  siblings: bool = False,
) -> Results:
  """Fits the first shares of finished runs and scores the forecasts of the end.

  The end is the mean of the last `forecast.END_EVALUATIONS` evaluations, and
  the band is of that mean. A method that cannot answer is skipped, not scored.

  Args:
    cases: finished runs.
    shares: of each run's compute, each in (0, 1).
    level: probability inside the bands, in (0, 1).
    siblings: whether ours is also tried with the other cases of a run's group,
      fitted to their end, as its siblings.

  Returns:
    A score for each run, share and method, and what was skipped.

  Raises:
    ValueError: for no cases, names that are not distinct, or a share or level
      outside (0, 1).
  """
  names = [case.name for case in cases]
  if not names or len(set(names)) < len(names):
    raise ValueError(
      f"cases must be at least one run, each with its own name, got {names}."
    )
  if not 0.0 < level < 1.0:
    raise ValueError(f"level must be in (0, 1), got {level!r}.")
  methods = _methods(cases, siblings)
  found, skipped = [], []
  for case in cases:
    for share in shares:
      part = forecast.split(
        case.compute, case.pass_rate, share, trials=case.trials
      )
      if part is None:
        reason = "too few evaluations before or after the cut"
        skipped.append(Skipped(case.name, share, "all", reason))
        continue
      for method, forecaster in methods.items():
        try:
          predictive = forecaster(case, part)
        except ValueError as error:
          skipped.append(Skipped(case.name, share, method, str(error)))
        else:
          found.append(score(case, part, share, method, predictive, level))
  return Results(level, tuple(found), tuple(skipped))
