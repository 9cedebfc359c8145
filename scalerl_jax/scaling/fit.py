"""Fits the law to a curve: a posterior, its intervals and its bands.

Float64 on the host CPU, whatever the rest of the program runs in. One
compilation serves all curves of up to 64 points, so a run can refit at each
evaluation.
"""

import dataclasses
import functools

import jax
import numpy as np
import numpy.typing as npt
from jaxtyping import Float64

from scalerl_jax.scaling import bands, intervals, laws, least_squares
from scalerl_jax.scaling import posterior as posterior_lib

Parameters = intervals.Parameters

FEWEST_POINTS = 6
_SMALLEST_BUCKET = 64
_MOST_POINTS = 1024
# R_0's prior sd about the first evaluation, when compute 0 was not evaluated.
_INITIAL_SD = 0.03
# The sd that stands for "given exactly", and for "measured, so prior is moot".
_EXACT_SD, _MOOT_SD = 1e-9, 1.0
# Weight of a given R_0 in least squares, in points.
_EXACT_WEIGHT = 1e12


@dataclasses.dataclass(frozen=True)
class CurveFit:
  """A law fitted to a curve, with what is not known about it.

  Attributes:
    params: posterior medians.
    law: name of the law.
    weights: weight of each law in the fit.
    identified: whether the points determine the asymptote.
    reasons: why they do not; empty when they do.
    least_squares: the bounded least-squares law of the same points.
    asymptote_profile: 90 % profile-likelihood interval of A.
    compute: the fitted points' compute, rising; without compute 0.
    pass_rate: the fitted points' pass rates.
    residual: sd of noise and misfit together, in pass rate.
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
  _draws: posterior_lib.Posterior = dataclasses.field(repr=False)
  _noise: Float64[np.ndarray, "N"] = dataclasses.field(repr=False)
  _binomial: bool = dataclasses.field(repr=False)

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
    if started.any():
      error = self.pass_rate[:, None] - bands.law(self._draws, place)
      misfit, spread = bands.smoothed_misfit(
        self._draws, place, error, self._noise, wanted[started]
      )
      mean[started] += misfit
      variance[started] = spread
    middle = mean.mean(1).clip(0.0, 1.0)
    if kind == "observation":
      unit = np.full_like(middle, self._noise[-1])
      if self._binomial:
        last = self.pass_rate[-1]
        unit *= _bernoulli(middle) / _bernoulli(last)
      white = np.exp(2.0 * self._draws.log_noise) / evaluations
      variance = variance + white * unit[:, None]
    low, high = bands.quantiles(mean, variance, level)
    return (
      middle.reshape(at.shape),
      low.reshape(at.shape),
      high.reshape(at.shape),
    )


def _check_level(level: float) -> None:
  if not 0.0 < level < 1.0:
    raise ValueError(f"level must be in (0, 1), got {level!r}.")


def _bernoulli(pass_rate):
  """p(1−p), kept away from 0 where a finite sample shows 0 or 1."""
  p = np.clip(pass_rate, 0.02, 0.98)
  return p * (1.0 - p)


def _checked(compute, pass_rate, trials):
  """The three as float64 arrays in order of compute, or one sentence."""
  x, y = np.asarray(compute, np.float64), np.asarray(pass_rate, np.float64)
  if x.ndim != 1 or x.shape != y.shape:
    raise ValueError(
      "compute and pass_rate must be two lists of the same length, got "
      f"shapes {x.shape} and {y.shape}."
    )
  for name, values, rule, good in (
    ("compute", x, "finite and at least 0", np.isfinite(x) & (x >= 0)),
    ("pass_rate", y, "in [0, 1]", (y >= 0) & (y <= 1)),
  ):
    if not good.all():
      first = int(np.argmin(good))
      raise ValueError(
        f"{name} must be {rule}, got {values[first]} at index {first}; drop "
        "such points, and divide percents by 100."
      )
  n = np.full_like(x, np.nan)
  if trials is not None:
    n = np.asarray(trials, np.float64)
    if n.ndim > 1 or (n.ndim and n.shape != x.shape) or not (n >= 1).all():
      raise ValueError(
        "trials must be one number of samples, or one for each point, at "
        f"least 1, got {trials!r}."
      )
    n = np.broadcast_to(n, x.shape)
  order = np.argsort(x, kind="stable")
  return x[order], y[order], n[order]


def _thinned(x, y, noise):
  """Neighbours averaged until at most `_MOST_POINTS` points are left."""
  size = -(-len(x) // _MOST_POINTS)
  if size == 1:
    return x, y, noise
  starts = np.arange(0, len(x), size)
  count = np.diff(np.append(starts, len(x)))

  def mean(values):
    return np.add.reduceat(values, starts) / count

  return np.exp(mean(np.log(x))), mean(y), mean(noise) / count


def _what_is_known(x, y, first_pass_rate, at_zero, zero_noise, initial):
  """R_0's prior and measurement, and its weight in least squares."""
  if initial is not None:
    known = posterior_lib.Initial(initial, _EXACT_SD, initial, np.inf)
    return known, _EXACT_WEIGHT
  if len(at_zero):
    value = float(at_zero.mean())
    noise = float(zero_noise.mean()) / len(at_zero)
    known = posterior_lib.Initial(value, _MOOT_SD, value, noise)
    return known, float(len(at_zero))
  # The first evaluation may already stand above R_0: as far as the line
  # through the first two points falls back to compute 0.
  step = max(x[1] - x[0], 1e-9 * x[0])
  back = min(abs(y[1] - y[0]) * x[0] / step, first_pass_rate)
  sd = float(np.hypot(_INITIAL_SD, back))
  return posterior_lib.Initial(first_pass_rate, sd, 0.0, np.inf), 0.05


@functools.cache
def _solver():
  return jax.jit(least_squares.solve)


def _host():
  """The CPU where there is one: accelerators may lack float64."""
  try:
    return jax.default_device(jax.local_devices(backend="cpu")[0])
  except RuntimeError:  # The process was told to use an accelerator alone.
    return jax.default_device(jax.local_devices()[0])


def fit_curve(
  compute: npt.ArrayLike,
  pass_rate: npt.ArrayLike,
  *,
  initial: float | None = None,
  min_compute: float = 0.0,
  max_compute: float | None = None,
  trials: npt.ArrayLike | None = None,
  law: str = "auto",
  seed: int = 0,
) -> CurveFit:
  """Fits the compute-performance law, and says how well it is known.

  The posterior of R(C) = R_0 + (A − R_0) / (1 + (C_mid / C)^B) with
  evaluation noise and a correlated misfit, under the weak priors of
  `posterior.py`. A point at compute 0 counts as a measurement of R_0 and is
  kept whatever `min_compute` is; without one R_0 has a weak prior about the
  first evaluation.

  Args:
    compute: of each evaluation, at least 0, in any unit and order.
    pass_rate: of each evaluation, in [0, 1].
    initial: R_0, when known exactly; None to infer it.
    min_compute: points below it are left out, except at compute 0.
    max_compute: points above it are left out; None for no limit.
    trials: samples behind each evaluation (one number, or one a point), from
      which the size of its noise is expected; None when unknown.
    law: a name in `laws.LAWS`, or "auto" for all of them.
    seed: shifts the quasi-random points of the integration: two seeds differ
      by its error.

  Returns:
    The fit; its `identified` says whether its asymptote means anything.

  Raises:
    ValueError: for arrays that do not match, values outside their domain, an
      unknown law, or fewer than 6 usable points.

  Example:
    >>> import numpy as np
    >>> compute = np.linspace(0.0, 40.0, 21)
    >>> pass_rate = 0.2 + 0.6 / (1.0 + (8.0 / np.maximum(compute, 1e-9)) ** 2)
    >>> fit = fit_curve(compute, pass_rate)
    >>> fit.identified, round(fit.params.asymptote, 3)
    (True, 0.8)
    >>> mean, low, high = fit.predict(80.0)
    >>> round(float(mean), 3)
    0.794

  Reference:
    Khatri et al., 2025, arXiv 2510.13786, equation 1; the paper fits by grid
    search and least squares with R_0 held.
  """
  if law != "auto" and law not in laws.LAWS:
    raise ValueError(
      f'law must be "auto" or one of {sorted(laws.LAWS)}, got {law!r}.'
    )
  if initial is not None and not 0.0 <= initial <= 1.0:
    raise ValueError(f"initial must be in [0, 1] or None, got {initial!r}.")
  x, y, n = _checked(compute, pass_rate, trials)
  most = np.inf if max_compute is None else max_compute
  keep = (x == 0) | ((x >= min_compute) & (x <= most))
  if keep.sum() < FEWEST_POINTS or len(np.unique(x[keep & (x > 0)])) < 4:
    raise ValueError(
      f"a fit needs at least {FEWEST_POINTS} points, at 4 or more values of "
      f"compute above 0, got {int(keep.sum())} of {len(x)} between "
      f"min_compute {min_compute:g} and max_compute {most:g}."
    )
  first_pass_rate = float(y[0])
  x, y, n = x[keep], y[keep], n[keep]
  binomial = trials is not None
  noise = _bernoulli(y) / n if binomial else np.ones_like(y)
  zero = x == 0
  known, initial_weight = _what_is_known(
    x[~zero], y[~zero], first_pass_rate, y[zero], noise[zero], initial
  )
  x, y, noise = _thinned(x[~zero], y[~zero], noise[~zero])
  place = np.log(x) - np.log(x[-1])
  bucket = max(_SMALLEST_BUCKET, 1 << (len(x) - 1).bit_length())
  padded = functools.partial(np.pad, pad_width=(0, bucket - len(x)))
  used = padded(np.ones_like(x))
  with jax.enable_x64(True), _host():
    points = least_squares.Points(
      padded(place),
      padded(y),
      used,
      np.array(known.prior),
      np.array(initial_weight),
    )
    solution = jax.tree.map(np.asarray, _solver()(points))
    bounds = jax.tree.map(np.asarray, least_squares.shape_bounds(points))
    free = max(len(x) - 4, 1)
    residual = float(np.sqrt(solution.loss / free))
    evidence = posterior_lib.Evidence(
      *points[:3],
      padded(noise),
      np.array([solution.initial, solution.asymptote, *solution.shape]),
    )
    draws = posterior_lib.sample_posterior(
      evidence,
      known,
      noise_prior=posterior_lib.LOG_NOISE_RATIO
      if binomial
      else posterior_lib.LOG_NOISE,
      curvature=solution.curvature,
      residual=residual,
      seed=seed,
    )
    profile = intervals.profile_asymptote(evidence, known, draws, 0.9)
  return _described(
    x, y, noise, binomial, solution, bounds, draws, profile, initial
  )


def _described(
  x, y, noise, binomial, solution, bounds, draws, profile, initial
) -> CurveFit:
  """The fit in the law's words, with the verdict on its asymptote."""
  params = Parameters(
    *(
      float(np.median(values))
      for values in intervals.parameter_draws(draws, x[-1]).values()
    )
  )
  least = Parameters(
    float(solution.initial),
    float(solution.asymptote),
    float(np.exp(solution.shape[0])),
    float(np.exp(solution.shape[1]) * x[-1]),
  )
  if initial is not None:
    params, least = (
      p._replace(initial=float(initial)) for p in (params, least)
    )
  white = np.exp(2.0 * draws.log_noise) * noise.mean()
  spread = float(np.sqrt(np.median(white + np.exp(2.0 * draws.log_misfit))))
  rise = bands.law(draws, np.zeros(1))[0] - draws.initial
  reasons = intervals.reasons_unidentified(
    params=params,
    least=least,
    shape=solution.shape,
    bounds=bounds,
    profile=profile,
    rise=rise,
    residual=spread,
    last_compute=float(x[-1]),
    pass_rate=y,
  )
  return CurveFit(
    params=params,
    law="sigmoid",
    weights={"sigmoid": 1.0},
    identified=not reasons,
    reasons=reasons,
    least_squares=least,
    asymptote_profile=profile,
    compute=x,
    pass_rate=y,
    residual=spread,
    _draws=draws,
    _noise=noise,
    _binomial=binomial,
  )
