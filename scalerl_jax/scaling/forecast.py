"""What a curve says about its own future: the end, and tests of that."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64

from scalerl_jax.scaling import fit as fit_lib
from scalerl_jax.scaling import points

# The end of a run is the mean of this many evaluations.
END_EVALUATIONS = 3


class Forecast(NamedTuple):
  """The forecast pass rate at one compute, and whether A is identified."""

  compute: float
  mean: float
  low: float
  high: float
  identified: bool
  reasons: tuple[str, ...]


class Backtest(NamedTuple):
  """A forecast of the end from the first part of a run, and what came."""

  fit: fit_lib.CurveFit
  forecast: Forecast
  measured: float

  @property
  def error(self) -> float:
    """Forecast minus measured."""
    return self.forecast.mean - self.measured

  @property
  def inside(self) -> bool:
    """Whether the measured end lies in the band."""
    return self.forecast.low <= self.measured <= self.forecast.high


class Part(NamedTuple):
  """The first part of a finished run, and the end that is to be forecast."""

  compute: Float64[np.ndarray, "N"]
  pass_rate: Float64[np.ndarray, "N"]
  trials: Float64[np.ndarray, "*N"] | None  # One for all, or one a point.
  end: float  # Compute: the mean of the last evaluations'.
  measured: float  # Their mean pass rate.


def split(
  compute: npt.ArrayLike,
  pass_rate: npt.ArrayLike,
  share: float,
  *,
  trials: npt.ArrayLike | None = None,
) -> Part | None:
  """The first part of a finished run and its measured end.

  Args:
    compute: of each evaluation.
    pass_rate: of each evaluation, in [0, 1].
    share: of the run's compute that the part may hold, in (0, 1).
    trials: samples behind each evaluation, or None.

  Returns:
    The part in order of compute and the mean of the last `END_EVALUATIONS`, at
    the mean of their compute; or None where the part or the rest holds too few
    evaluations.

  Raises:
    ValueError: for a share outside (0, 1).
  """
  if not 0.0 < share < 1.0:
    raise ValueError(f"share must be in (0, 1), got {share!r}.")
  x, y = np.asarray(compute, np.float64), np.asarray(pass_rate, np.float64)
  order = np.argsort(x, kind="stable")
  x, y = x[order], y[order]
  seen = x <= share * x[-1]
  if (~seen).sum() < END_EVALUATIONS or not points.enough(x[seen]):
    return None
  behind = None if trials is None else np.asarray(trials, np.float64)
  if behind is not None and behind.ndim:
    behind = behind[order][seen]
  end = float(x[-END_EVALUATIONS:].mean())
  measured = float(y[-END_EVALUATIONS:].mean())
  return Part(x[seen], y[seen], behind, end, measured)


def forecast_from(
  fit: fit_lib.CurveFit, end: float, level: float = 0.9
) -> Forecast:
  """The mean of the last evaluations about `end`, forecast by a fit.

  Args:
    fit: of the run so far.
    end: compute at the end.
    level: probability inside the band, in (0, 1).

  Returns:
    Mean and band of the average of `END_EVALUATIONS` new evaluations.
  """
  mean, low, high = fit.predict(end, level, evaluations=END_EVALUATIONS)
  return Forecast(
    float(end),
    float(mean),
    float(low),
    float(high),
    fit.identified,
    fit.reasons,
  )


def first_part(
  compute: npt.ArrayLike,
  pass_rate: npt.ArrayLike,
  share: float = 0.5,
  level: float = 0.9,
  *,
  trials: npt.ArrayLike | None = None,
) -> Backtest | None:
  """Forecasts the end from the first part of a finished run.

  Args:
    compute: of each evaluation.
    pass_rate: of each evaluation, in [0, 1].
    share: of the run's compute that the fit may see, in (0, 1).
    level: probability inside the band, in (0, 1).
    trials: samples behind each evaluation, or None.

  Returns:
    The fit, its forecast and the measured end (the mean of the last 3
    evaluations, at the mean of their compute), or None where the part or the
    rest holds too few evaluations.

  Raises:
    ValueError: for a share outside (0, 1).
  """
  part = split(compute, pass_rate, share, trials=trials)
  if part is None:
    return None
  fit = fit_lib.fit_curve(part.compute, part.pass_rate, trials=part.trials)
  return Backtest(fit, forecast_from(fit, part.end, level), part.measured)
