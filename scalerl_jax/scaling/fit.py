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
from scalerl_jax.scaling import points as points_lib
from scalerl_jax.scaling import posterior as posterior_lib

Parameters = intervals.Parameters

_SMALLEST_BUCKET = 64
_PRIOR_ROUNDS = 4


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
        last = self.pass_rate[-1:]
        unit *= points_lib.bernoulli(middle) / points_lib.bernoulli(last)
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


_solve = jax.jit(least_squares.solve)


def _solved(points: least_squares.Points, count: int):
  """Least squares, and the sd of its residuals."""
  solution = jax.tree.map(np.asarray, _solve(points))
  return solution, float(np.sqrt(solution.loss / max(count - 4, 1)))


@functools.cache
def _host() -> jax.sharding.Mesh:
  """One device of the CPU, where there is one: others may lack float64.

  A mesh, because a caller's own mesh would put the fit on all its devices.
  """
  try:
    device = jax.local_devices(backend="cpu")[0]
  except RuntimeError:  # The process was told to use an accelerator alone.
    device = jax.local_devices()[0]
  return jax.sharding.Mesh(np.array([device]), ("host",))


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
  chosen = points_lib.choose(
    compute,
    pass_rate,
    trials,
    initial=initial,
    min_compute=min_compute,
    max_compute=max_compute,
  )
  x, y, noise, known, weight, binomial = chosen
  place = np.log(x) - np.log(x[-1])
  bucket = max(_SMALLEST_BUCKET, 1 << (len(x) - 1).bit_length())
  padded = functools.partial(np.pad, pad_width=(0, bucket - len(x)))
  used = padded(np.ones_like(x))
  with jax.enable_x64(True), jax.set_mesh(_host()):
    points = least_squares.Points(
      padded(place),
      padded(y),
      used,
      np.array(known.prior),
      np.array(1.0 if weight is None else weight),
    )
    solution, residual = _solved(points, len(x))
    for _ in range(_PRIOR_ROUNDS if weight is None else 0):
      # A prior weighs as much as points of the noise that is found.
      relative = np.clip((residual / known.prior_sd) ** 2, 1e-12, 1.0)
      points = points._replace(initial_weight=np.array(relative))
      solution, residual = _solved(points, len(x))
    bounds = jax.tree.map(np.asarray, least_squares.shape_bounds(points))
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
    effective=draws.effective,
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
