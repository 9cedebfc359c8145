"""A fitted curve: its parameters, intervals and bands.

How it is made is in `fit.py` (the posterior) and `grid.py` (the paper's).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64

from scalerl_jax.scaling import bands, identification, intervals
from scalerl_jax.scaling import points as points_lib
from scalerl_jax.scaling import posterior as posterior_lib

Parameters = intervals.Parameters

# The prior sd of R_0 for which A and a forecast are told.
INITIAL_SDS = (0.01, 0.03, 0.1)


class Sensitivity(NamedTuple):
  """A and a forecast under one prior of R_0: medians and means, with bands."""

  initial_sd: float
  asymptote: float
  asymptote_low: float
  asymptote_high: float
  identified: bool
  mean: float
  low: float
  high: float


@dataclasses.dataclass(frozen=True)
class CurveFit:
  """A law fitted to a curve, with what is not known about it.

  Attributes:
    params: posterior medians; of `fit_grid`, the best pair of the grid.
    law: name of the law; of several, the one with the largest weight.
    weights: weight of each law in the fit and in its forecasts, by what was
      believed of it and a tempered evidence (`integration.mixed`).
    identified: whether the points determine the asymptote.
    reasons: why they do not; empty when they do.
    least_squares: the bounded least-squares law of the same points (without
      tail: the sigmoid, or the power law).
    asymptote_profile: 90 % profile-likelihood interval of A, from the points
      alone: not from siblings.
    compute: the fitted points' compute, rising; without compute 0.
    pass_rate: the fitted points' pass rates.
    residual: sd of noise and misfit together, in pass rate.
    outliers: compute of the evaluations that were given little weight.
  """

  params: Parameters
  law: str
  weights: dict[str, float]
  identified: bool
  reasons: tuple[str, ...]
  least_squares: Parameters
  asymptote_profile: tuple[float, float]
  compute: Float64[np.ndarray, "N"]
  pass_rate: Float64[np.ndarray, "N"]
  residual: float
  outliers: tuple[float, ...]
  _draws: posterior_lib.Posterior = dataclasses.field(repr=False)
  _noise: Float64[np.ndarray, "N"] = dataclasses.field(repr=False)
  _unit: float = dataclasses.field(repr=False)
  _binomial: bool = dataclasses.field(repr=False)
  _start: posterior_lib.Initial = dataclasses.field(repr=False)
  _again: Callable[..., "CurveFit"] | None = dataclasses.field(repr=False)

  def intervals(self, level: float = 0.9) -> dict[str, tuple[float, float]]:
    """Equal-tailed posterior interval of each parameter.

    Args:
      level: probability inside, in (0, 1).

    Returns:
      Name to (low, high), with the names of `params`.
    """
    _check_level(level)
    draws = intervals.parameter_draws(self._draws, self.compute[-1])
    tails = (0.5 - level / 2, 0.5 + level / 2)
    return {
      name: (
        float(np.quantile(values, tails[0])),
        float(np.quantile(values, tails[1])),
      )
      for name, values in draws.items()
    }

  def predict(
    self,
    compute: npt.ArrayLike,
    level: float = 0.9,
    kind: str = "observation",
    *,
    evaluations: int = 1,
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The pass rate at given compute, with its band.

    Args:
      compute: at least 0, in the unit of the fitted points.
      level: probability inside the band, in (0, 1).
      kind: "observation", the band of a new evaluation with the noise of the
        fitted points; or "mean", that of the curve itself, misfit included.
      evaluations: with "observation", how many new evaluations near `compute`
        are averaged.

    Returns:
      Mean, low and high, each in the shape of `compute`.

    Raises:
      ValueError: for compute below 0 or not finite, a level outside (0, 1),
        another kind, or fewer than one evaluation.
    """
    _check_level(level)
    if kind not in ("observation", "mean"):
      raise ValueError(f'kind must be "observation" or "mean", got {kind!r}.')
    if evaluations < 1:
      raise ValueError(f"evaluations must be at least 1, got {evaluations}.")
    at = np.asarray(compute, np.float64)
    if not (np.isfinite(at) & (at >= 0)).all():
      raise ValueError(
        f"compute must be finite and at least 0 to predict, got {compute!r}."
      )
    with np.errstate(divide="ignore"):
      wanted = np.log(at.ravel()) - np.log(self.compute[-1])
    place = np.log(self.compute) - np.log(self.compute[-1])
    mean = bands.law(self._draws, wanted)
    variance = np.zeros_like(mean)
    started = np.isfinite(wanted)
    if started.any() and self._draws.log_misfit.max() > posterior_lib.NO_MISFIT:
      error = self.pass_rate[:, None] - bands.law(self._draws, place)
      misfit, spread = bands.smoothed_misfit(
        self._draws, place, error, self._noise, wanted[started]
      )
      mean[started] += misfit
      variance[started] = spread
    middle = mean.mean(1).clip(0.0, 1.0)
    if kind == "observation":
      unit = np.full_like(middle, self._unit)
      if self._binomial:
        unit *= points_lib.bernoulli(middle)
      white = np.exp(2.0 * self._draws.log_noise) / evaluations
      variance = variance + white * unit[:, None]
    low, high = bands.quantiles(mean, variance, level)
    return (
      middle.reshape(at.shape),
      low.reshape(at.shape),
      high.reshape(at.shape),
    )

  @functools.cached_property
  def decided_at(self) -> float | None:
    """The compute at which A is expected to be identified.

    The median law goes on beyond the data with evaluations as dense as so
    far, noise and misfit at their medians; the information about (R_0,
    A, B, C_mid) that has come in by each compute gives the width of A's 90 %
    interval. The answer is the first compute, among steps of 5 %, that lies
    beyond C_mid, where the interval is at most half of the rise, and below 1.

    Returns:
      Compute, at least the last evaluation's where A is not yet identified;
      None where the curve falls or is flat, or 100 times the compute that was
      spent would not do.
    """
    return identification.decided_at(
      self._draws,
      self.params,
      self.compute,
      self._noise,
      self._start,
      identified=self.identified,
    )

  def sensitivity(
    self,
    compute: float,
    level: float = 0.9,
    initial_sds: Sequence[float] = INITIAL_SDS,
  ) -> tuple[Sensitivity, ...]:
    """How A and a forecast depend on what is believed of R_0.

    Refits with R_0 ~ N(first evaluation, sd) for each sd.

    Args:
      compute: of the forecast, at least 0.
      level: probability inside the bands, in (0, 1).
      initial_sds: in (0, 1].

    Returns:
      One entry an sd; () where R_0 was measured at compute 0 or given, so
      that nothing depends on it.
    """
    if self._again is None:
      return ()
    found = []
    for sd in initial_sds:
      fit = self._again(initial_sd=sd)
      mean, low, high = (float(v) for v in fit.predict(compute, level))
      found.append(
        Sensitivity(
          float(sd),
          fit.params.asymptote,
          *fit.intervals(level)["asymptote"],
          fit.identified,
          mean,
          low,
          high,
        )
      )
    return tuple(found)


def _check_level(level: float) -> None:
  if not 0.0 < level < 1.0:
    raise ValueError(f"level must be in (0, 1), got {level!r}.")
