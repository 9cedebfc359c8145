"""Simple forecasts of a run's end, which a better one has to beat.

Each takes the first part of a curve and gives equally likely values for the
mean of the last evaluations, before they are clipped to [0, 1].
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64
from scipy import optimize, special

from scalerl_jax.scaling import draws as draws_lib
from scalerl_jax.scaling import scores
from scalerl_jax.scaling.grid import fit_grid

# The paper's grid in shares of its own window, 1.5k to 50k GPU-hours; A by
# .005 as there, but up to 1.
_ASYMPTOTES = np.linspace(0.05, 1.0, 191)
_MIDPOINTS = np.linspace(100.0, 40000.0, 100) / 50000.0
_FIRST_SHARE = 1500.0 / 50000.0

_LOG_EXPONENT = (-2.3, 3.0)  # As in compare.py.
_MIDPOINT_MARGINS = (-3.0, 6.0)
_STARTS = [(b, m) for b in (-0.3, 0.5, 1.3) for m in (0.3, 0.7, 1.2)]


class Predictive(NamedTuple):
  """A forecast: its mean, and equally likely values; neither is clipped."""

  mean: float
  sample: Float64[np.ndarray, "S"]

  def band(self, level: float = 0.9) -> tuple[float, float]:
    """Equal-tailed band, not clipped.

    Args:
      level: probability inside, in (0, 1).
    """
    tails = (0.5 - level / 2, 0.5 + level / 2)
    low, high = np.quantile(self.sample, tails)
    return float(low), float(high)


def _student(mean: float, variance: float, degrees: int) -> Predictive:
  scale = float(np.sqrt(max(variance, 0.0)))
  return Predictive(mean, scores.student_sample(mean, scale, degrees))


def last_value(
  compute: Float64[np.ndarray, "N"],
  pass_rate: Float64[np.ndarray, "N"],
  end: float,
  evaluations: int,
) -> Predictive:
  """The last evaluation, with the band of a random walk.

  y_N ± t_{N−1} · s · √h, where s² is the mean squared step between evaluations
  and h the number of steps to the end.

  Args:
    compute: of the evaluations, rising.
    pass_rate: of the evaluations.
    end: compute at the end, beyond them.
    evaluations: whose mean is forecast; a random walk has no noise to average.

  Returns:
    The forecast.
  """
  del evaluations
  steps = np.diff(pass_rate)
  spacing = (compute[-1] - compute[0]) / len(steps)
  ahead = max((end - compute[-1]) / max(spacing, 1e-300), 1.0)
  variance = float(np.mean(steps**2)) * ahead
  return _student(float(pass_rate[-1]), variance, len(steps))


def log_linear(
  compute: Float64[np.ndarray, "N"],
  pass_rate: Float64[np.ndarray, "N"],
  end: float,
  evaluations: int,
) -> Predictive:
  """A straight line in ln C by least squares, with its t-interval.

  Args:
    compute: of the evaluations, rising; those at compute 0 have no logarithm
      and are left out.
    pass_rate: of the evaluations.
    end: compute at the end.
    evaluations: whose mean is forecast.

  Returns:
    The forecast.
  """
  started = compute > 0
  x, y = np.log(compute[started]), pass_rate[started]
  design = np.stack([np.ones_like(x), x - x.mean()], axis=1)
  found, *_ = np.linalg.lstsq(design, y, rcond=None)
  degrees = len(x) - 2
  noise = float(((y - design @ found) ** 2).sum()) / degrees
  at = np.array([1.0, np.log(end) - x.mean()])
  spread = at @ np.linalg.inv(design.T @ design) @ at
  variance = noise * (1.0 / evaluations + float(spread))
  return _student(float(at @ found), variance, degrees)


def _gain(place: np.ndarray, shape: np.ndarray) -> np.ndarray:
  return special.expit(np.exp(shape[0]) * (place - shape[1]))


def _law(place: np.ndarray, theta: np.ndarray) -> np.ndarray:
  """R_0 + (A − R_0) · gain, of θ = (R_0, A, ln B, ln C_mid)."""
  return theta[0] + (theta[1] - theta[0]) * _gain(place, theta[2:])


def _slopes(place: np.ndarray, theta: np.ndarray) -> np.ndarray:
  """∂law/∂θ, a row a point; at compute 0 only R_0 matters."""
  finite = np.where(np.isfinite(place), place, 0.0)
  gain, b = _gain(place, theta[2:]), np.exp(theta[2])
  steep = (theta[1] - theta[0]) * gain * (1.0 - gain) * b
  return np.stack(
    [1.0 - gain, gain, steep * (finite - theta[3]), -steep], axis=1
  )


def plain_sigmoid(
  compute: Float64[np.ndarray, "N"],
  pass_rate: Float64[np.ndarray, "N"],
  end: float,
  evaluations: int,
) -> Predictive:
  """Least squares of R_0, A, B and C_mid, with the delta method's t-interval.

  f(θ̂) ± t_{N−4} · s · √(1/n + gᵀ(JᵀJ)⁺g), with g the slopes of the law at the
  end and n the evaluations averaged there. R_0 and A lie in [0, 1]; the best
  of nine starts counts.

  Args:
    compute: of the evaluations, at least 5, rising.
    pass_rate: of the evaluations.
    end: compute at the end.
    evaluations: whose mean is forecast.

  Returns:
    The forecast.
  """
  with np.errstate(divide="ignore"):
    place = np.log(compute) - np.log(compute[-1])
  first = float(place[np.isfinite(place)].min())
  low = [0.0, 0.0, _LOG_EXPONENT[0], first + _MIDPOINT_MARGINS[0]]
  high = [1.0, 1.0, _LOG_EXPONENT[1], _MIDPOINT_MARGINS[1]]

  def solve(b: float, m: float):
    shape = np.array([b, first * (1.0 - m)])
    gain = _gain(place, shape)
    design = np.stack([1.0 - gain, gain], axis=1)
    levels = np.linalg.lstsq(design, pass_rate, rcond=None)[0]
    start = np.concatenate([levels.clip(0.001, 0.999), shape])
    return optimize.least_squares(
      lambda theta: _law(place, theta) - pass_rate,
      start,
      jac=lambda theta: _slopes(place, theta),  # pyright: ignore[reportArgumentType]
      bounds=(low, high),
      xtol=1e-10,
      ftol=1e-12,
    )

  found = min((solve(b, m) for b, m in _STARTS), key=lambda f: f.cost)
  degrees = len(compute) - 4
  noise = 2.0 * float(found.cost) / degrees
  jacobian = _slopes(place, found.x)
  at = np.array([np.log(end) - np.log(compute[-1])])
  slope = _slopes(at, found.x)[0]
  spread = float(slope @ np.linalg.pinv(jacobian.T @ jacobian) @ slope)
  mean = float(_law(at, found.x)[0])
  return _student(mean, noise * (1.0 / evaluations + spread), degrees)


def paper_grid(
  compute: Float64[np.ndarray, "N"],
  pass_rate: Float64[np.ndarray, "N"],
  end: float,
  evaluations: int,
) -> Predictive:
  """The paper's procedure, on a grid in shares of the window.

  R_0 is the first evaluation; points below 3 % of the window are cut, C_mid is
  100 values up to .8 of it, A goes by .005 up to 1: 1.5k, 40k and 50k
  GPU-hours in the paper, whose A ends at .800.

  Args:
    compute: of the evaluations, rising.
    pass_rate: of the evaluations.
    end: compute at the end.
    evaluations: whose mean is forecast.

  Returns:
    The forecast, with the band of independent noise.

  Raises:
    ValueError: where the cut leaves fewer than 6 points.
  """
  last = float(compute[-1])
  fit = fit_grid(
    compute,
    pass_rate,
    initial=float(pass_rate[0]),
    min_compute=_FIRST_SHARE * last,
    asymptotes=_ASYMPTOTES,
    midpoints=_MIDPOINTS * last,
  )
  sample = draws_lib.curve_draws(
    fit, end, "observation", evaluations=evaluations
  )[0]
  best = fit.params
  theta = np.array(
    [best.initial, best.asymptote, np.log(best.exponent), np.log(best.midpoint)]
  )
  mean = float(_law(np.log([end]), theta)[0])
  return Predictive(mean, np.sort(sample))


# The baselines by name, each of (compute, pass_rate, end, evaluations).
BASELINES = {
  "last value": last_value,
  "log-linear": log_linear,
  "plain sigmoid": plain_sigmoid,
  "paper's grid": paper_grid,
}
