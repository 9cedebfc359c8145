"""Draws of a fitted curve, which decisions and scores are computed from.

One column a draw of the posterior: what one column says of two computes goes
together, which a band at each of them does not tell.
"""

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64
from scipy import special

from scalerl_jax.scaling import bands, integration
from scalerl_jax.scaling import points as points_lib
from scalerl_jax.scaling import posterior as posterior_lib
from scalerl_jax.scaling.curve_fit import CurveFit


def _places(fit: CurveFit, compute: npt.ArrayLike) -> np.ndarray:
  """ln of compute over the last fitted one; −∞ at compute 0."""
  at = np.atleast_1d(np.asarray(compute, np.float64))
  if at.ndim != 1 or not (np.isfinite(at) & (at >= 0)).all():
    raise ValueError(
      "compute must be finite numbers of at least 0 for draws, got "
      f"{compute!r}."
    )
  with np.errstate(divide="ignore"):
    return np.log(at) - np.log(fit.compute[-1])


def law_draws(
  fit: CurveFit, compute: npt.ArrayLike
) -> Float64[np.ndarray, "K M"]:
  """The fitted law of each draw, without misfit and noise.

  Args:
    fit: the fit.
    compute: K numbers, at least 0, in the unit of the fitted points.

  Returns:
    A row a compute and a column a draw; not clipped to [0, 1].
  """
  return bands.law(fit._draws, _places(fit, compute))


def misfit_moments(
  fit: CurveFit, compute: npt.ArrayLike
) -> tuple[Float64[np.ndarray, "K M"], Float64[np.ndarray, "K M"]]:
  """Mean and variance of each draw's misfit, given the fitted points.

  Args:
    fit: the fit.
    compute: K numbers, at least 0; at 0 there is no misfit.

  Returns:
    Both with a row a compute and a column a draw.
  """
  wanted = _places(fit, compute)
  mean = np.zeros((len(wanted), len(fit._draws.asymptote)))
  variance = np.zeros_like(mean)
  started = np.isfinite(wanted)
  if started.any() and fit._draws.log_misfit.max() > posterior_lib.NO_MISFIT:
    place = np.log(fit.compute) - np.log(fit.compute[-1])
    error = fit.pass_rate[:, None] - bands.law(fit._draws, place)
    mean[started], variance[started] = bands.smoothed_misfit(
      fit._draws, place, error, fit._noise, wanted[started]
    )
  return mean, variance


def curve_draws(
  fit: CurveFit,
  compute: npt.ArrayLike,
  kind: str = "mean",
  *,
  evaluations: int = 1,
) -> Float64[np.ndarray, "K M"]:
  """Equally likely pass rates at given compute.

  Their quantiles are the bands of `fit.predict`, before these are clipped.

  Args:
    fit: the fit.
    compute: K numbers, at least 0, in the unit of the fitted points.
    kind: "mean", the curve itself, misfit included; or "observation", an
      evaluation with the noise of the fitted points.
    evaluations: with "observation", how many evaluations are averaged.

  Returns:
    A row a compute and a column a draw; not clipped to [0, 1].

  Raises:
    ValueError: for compute below 0 or not finite, another kind, or fewer than
      one evaluation.
  """
  if kind not in ("observation", "mean"):
    raise ValueError(f'kind must be "observation" or "mean", got {kind!r}.')
  if evaluations < 1:
    raise ValueError(f"evaluations must be at least 1, got {evaluations}.")
  misfit, variance = misfit_moments(fit, compute)
  mean = law_draws(fit, compute) + misfit
  if kind == "observation":
    unit = np.full(len(mean), fit._unit)
    if fit._binomial:
      unit *= points_lib.bernoulli(mean.mean(1).clip(0.0, 1.0))
    white = np.exp(2.0 * fit._draws.log_noise) / evaluations
    variance = variance + white * unit[:, None]
  z = special.ndtri(integration.uniforms(mean.shape[1], 1, 0)[:, 0])
  return mean + np.sqrt(variance) * z


def gain_draws(
  fit: CurveFit, budget: float
) -> tuple[Float64[np.ndarray, "M"], Float64[np.ndarray, "M"]]:
  """What the curve gains from the last fitted compute to a later one.

  R(budget) − R(last), misfit included. The misfit at the budget is what is
  left of the one at the data's end, e^−(ln budget − ln last)/length of it, and
  a fresh part, so that the variance of the difference is exact.

  Args:
    fit: the fit.
    budget: compute, at least the last fitted one.

  Returns:
    Mean and standard deviation of the gain for each draw.

  Raises:
    ValueError: for a budget below the last fitted compute or not finite.
  """
  last = float(fit.compute[-1])
  if not last <= budget < np.inf:
    raise ValueError(
      f"budget must be a compute of at least the last fitted one, {last:g}, "
      f"got {budget!r}."
    )
  ends = np.array([last, float(budget)])
  misfit, variance = misfit_moments(fit, ends)
  curve = law_draws(fit, ends) + misfit
  kept = np.exp(-np.log(budget / last) / np.exp(fit._draws.log_length))
  spread = variance[0] * (1.0 - 2.0 * kept) + variance[1]
  return curve[1] - curve[0], np.sqrt(spread.clip(0.0))
