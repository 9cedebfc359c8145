"""Fits the law to a curve: a posterior, its intervals and its bands.

Float64 on the host CPU, whatever the rest of the program runs in. One
compilation serves all curves of up to 64 points, so a run can refit at each
evaluation.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from scalerl_jax.scaling import (
  bands,
  integration,
  intervals,
  laws,
  least_squares,
  outliers,
)
from scalerl_jax.scaling import points as points_lib
from scalerl_jax.scaling import posterior as posterior_lib
from scalerl_jax.scaling import siblings as siblings_lib
from scalerl_jax.scaling.curve_fit import CurveFit
from scalerl_jax.scaling.grid import fit_grid
from scalerl_jax.scaling.host import host_mesh

__all__ = ["AVERAGED", "CurveFit", "Parameters", "fit_curve", "fit_grid"]

Parameters = intervals.Parameters

# The laws of law="auto", and how much each is believed in before the curve is
# seen. Burr is there for width: mean CRPS of forecasts of the end of 17 real
# curves from 20, 33, 50 and 67 % of them was .055, .022, .015 and .013 with the
# sigmoid alone, .053, .018, .020 and .018 with Burr alone and .055, .021, .016
# and .014 with both, whose 90 % bands cover .65, .82, .88 and .71 of the ends
# (the sigmoid's .59, .59, .82, .71). Dagum did no better than Burr.
AVERAGED = {"sigmoid": 0.75, "burr": 0.25}

_SMALLEST_BUCKET = 64
_PRIOR_ROUNDS = 4

_solve = jax.jit(least_squares.solve, static_argnames="law")
_bounds = jax.jit(least_squares.shape_bounds)


class _Curve:
  """A curve on its way through least squares: padded, outliers told apart.

  `inflation` is what each point's noise variance is multiplied by, and
  `zero_weight` the weight that is left to the evaluations at compute 0.
  """

  def __init__(self, chosen: points_lib.Chosen, law: str):
    self.chosen, self.count = chosen, len(chosen.compute)
    self.law = "power_law" if law == "power_law" else "sigmoid"
    bucket = max(_SMALLEST_BUCKET, 1 << (self.count - 1).bit_length())
    self.padded = functools.partial(np.pad, pad_width=(0, bucket - self.count))
    place = np.log(chosen.compute) - np.log(chosen.compute[-1])
    self.place = self.padded(place)
    self.pass_rate = self.padded(chosen.pass_rate)
    self.used = self.padded(np.ones(self.count))
    self.inflation, self.zero_weight = np.ones(self.count), 1.0

  @property
  def at_zero(self) -> bool:
    """Whether compute 0 was evaluated."""
    return bool(np.isfinite(self.chosen.initial.measured_noise))

  @property
  def noise(self) -> np.ndarray:
    """The shape of the noise variance, outliers' inflated."""
    return self.chosen.noise * self.inflation

  def solve(self, weight: np.ndarray, zero: float):
    """Least squares, the sd of its residuals, and its box.

    Args:
      weight: of each point.
      zero: of the evaluations at compute 0, relative to the others.
    """
    known, held = self.chosen.initial, self.chosen.initial_weight
    centre = known.measured if self.at_zero else known.prior
    points = least_squares.Points(
      self.place,
      self.pass_rate,
      self.padded(weight),
      np.array(centre),
      np.array(1.0 if held is None else held * zero),
    )
    number = max(float(weight.sum()) - 4.0, 1.0)
    found = jax.tree.map(np.asarray, _solve(points, self.law))
    residual = float(np.sqrt(found.loss / number))
    for _ in range(_PRIOR_ROUNDS if held is None else 0):
      # A prior weighs as much as points of the noise that is found.
      relative = np.clip((residual / known.prior_sd) ** 2, 1e-12, 1.0)
      points = points._replace(initial_weight=np.array(relative))
      found = jax.tree.map(np.asarray, _solve(points, self.law))
      residual = float(np.sqrt(found.loss / number))
    return found, residual, jax.tree.map(np.asarray, _bounds(points))

  def residuals(self, weight: np.ndarray) -> np.ndarray:
    """Of weighted least squares; that at compute 0, if any, comes first."""
    zero, rest = (weight[0], weight[1:]) if self.at_zero else (1.0, weight)
    found, _, _ = self.solve(rest, float(zero))
    z = np.exp(found.shape[0]) * (self.place[: self.count] - found.shape[1])
    share = laws.gain(self.law, z, xp=np)
    law = found.initial + (found.asymptote - found.initial) * share
    error = self.chosen.pass_rate - law
    if self.at_zero:
      error = np.append(self.chosen.initial.measured - found.initial, error)
    return error

  def resist_outliers(
    self, *, free_initial: bool, initial_sd: float | None
  ) -> None:
    """Finds outliers, and mends what they told of R_0.

    Args:
      free_initial: whether R_0 is not given.
      initial_sd: of its prior, or None for the default.
    """
    chosen, known = self.chosen, self.chosen.initial
    values = chosen.pass_rate
    if self.at_zero:
      values = np.append(known.measured, values)
    inflation = outliers.inflation(values, self.residuals)
    if self.at_zero:
      first, inflation = float(inflation[0]), inflation[1:]
      self.zero_weight = 1.0 / first
      known = known._replace(measured_noise=known.measured_noise * first)
    elif free_initial and (inflation[:2] > 1.0).any():
      good = inflation == 1.0
      x, y = chosen.compute[good], chosen.pass_rate[good]
      known = points_lib.what_is_known(x, y, float(y[0]), initial_sd=initial_sd)
    self.inflation, self.chosen = inflation, chosen._replace(initial=known)


def fit_curve(
  compute: npt.ArrayLike,
  pass_rate: npt.ArrayLike,
  *,
  initial: float | None = None,
  min_compute: float = 0.0,
  max_compute: float | None = None,
  trials: npt.ArrayLike | None = None,
  law: str = "auto",
  siblings: Sequence[CurveFit] = (),
  seed: int = 0,
  initial_sd: float | None = None,
  counts: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
  misfit: bool = True,
) -> CurveFit:
  """Fits the compute-performance law, and says how well it is known.

  The posterior of R(C) = R_0 + (A − R_0) · gain(B · ln(C / C_mid)) with
  evaluation noise and a correlated misfit, under the weak priors of
  `posterior.py`. A point at compute 0 counts as a measurement of R_0 and is
  kept whatever `min_compute` is; without one R_0 has a weak prior about the
  first evaluation. A single evaluation far from its neighbours and from the
  law has little weight.

  Args:
    compute: of each evaluation, at least 0, in any unit and order.
    pass_rate: of each evaluation, in [0, 1].
    initial: R_0, when known (exactly, without `initial_sd`); None to infer it.
    min_compute: points below it are left out, except at compute 0.
    max_compute: points above it are left out; None for no limit.
    trials: samples behind each evaluation (one number, or one a point), from
      which the size of its noise is expected; None when unknown.
    law: a name in `laws.LAWS`, or "auto" for the average of the laws of
      `AVERAGED`.
    siblings: fits of finished runs of the same task, which lend a prior of A
      and ln B and, where the axis of compute is shared, of the value at their
      end; the run may escape it. `identified` is about the points alone.
    seed: shifts the quasi-random points of the integration: two seeds differ
      by its error.
    initial_sd: sd of R_0's prior about `initial`, or else about the first
      evaluation; None for the default.
    counts: (correct, samples) of each evaluation and prompt, [N, P] each (one
      number will do for samples): the noise is then the prompts' own.
    misfit: False for curves that follow the law exactly (simulated ones): all
      that is left is independent noise.

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
    search and least squares with R_0 held: `fit_grid`.
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
    initial_sd=initial_sd,
    min_compute=min_compute,
    max_compute=max_compute,
    counts=counts,
  )
  believed = AVERAGED if law == "auto" else {law: 1.0}
  with jax.enable_x64(True), jax.set_mesh(host_mesh()):
    curve = _Curve(chosen, next(iter(believed)))
    curve.resist_outliers(free_initial=initial is None, initial_sd=initial_sd)
    priors = [
      prior
      for name, weight in believed.items()
      for prior in siblings_lib.sibling_priors(
        posterior_lib.weak_prior(
          name, chosen.noise_prior, misfit=misfit, weight=weight
        ),
        siblings,
      )
    ]
    value = siblings_lib.expected_value(siblings) if siblings else None
    solved, found = _integrated(curve, priors, value, seed)
  again = None
  if initial is None and not curve.at_zero:
    again = functools.partial(
      fit_curve,
      compute,
      pass_rate,
      min_compute=min_compute,
      max_compute=max_compute,
      trials=trials,
      law=law,
      siblings=siblings,
      seed=seed,
      counts=counts,
      misfit=misfit,
    )
  held = initial if initial_sd is None else None
  return _described(curve, solved, found, held, again)


class _Integrated(NamedTuple):
  """What the points say: draws, weights of laws, profile of A."""

  draws: posterior_lib.Posterior
  weights: dict[str, float]
  profile: tuple[float, float]


def _integrated(curve: _Curve, priors, value, seed: int):
  """Least squares, and the posterior under all priors."""
  solved = curve.solve(1.0 / curve.inflation, curve.zero_weight)
  solution = solved[0]
  evidence = posterior_lib.Evidence(
    curve.place,
    curve.pass_rate,
    curve.used,
    curve.padded(curve.noise),
    np.array([solution.initial, solution.asymptote, *solution.shape]),
  )
  known = curve.chosen.initial
  parts = [
    integration.sample_posterior(
      evidence,
      known,
      prior,
      curvature=solution.curvature,
      residual=solved[1],
      seed=seed,
    )
    for prior in priors
  ]
  own = [k for k, prior in enumerate(priors) if not prior.lent]
  by_points, _ = integration.mixed(
    [parts[k] for k in own], [priors[k] for k in own]
  )
  profile = intervals.profile_asymptote(evidence, known, by_points, 0.9)
  if value is not None:
    chosen = curve.chosen
    place = np.log(chosen.compute) - np.log(chosen.compute[-1])
    wanted = float(np.log(value.compute) - np.log(chosen.compute[-1]))
    for k in own:
      at = siblings_lib.curve_at(
        parts[k], place, chosen.pass_rate, curve.noise, wanted
      )
      parts[k] = siblings_lib.borrowed(parts[k], at, value)
  draws, weight = integration.mixed(parts, priors)
  weights: dict[str, float] = {}
  for share, prior in zip(weight, priors, strict=True):
    weights[prior.law] = weights.get(prior.law, 0.0) + float(share)
  return solved, _Integrated(draws, weights, profile)


def _described(
  curve: _Curve, solved, found: _Integrated, held, again
) -> CurveFit:
  """The fit in the law's words, with the verdict on its asymptote."""
  solution, _, bounds = solved
  chosen, draws = curve.chosen, found.draws
  last = float(chosen.compute[-1])
  params = Parameters(
    *(
      float(np.median(values))
      for values in intervals.parameter_draws(draws, last).values()
    )
  )
  least = Parameters(
    float(solution.initial),
    float(solution.asymptote),
    float(np.exp(solution.shape[0])),
    float(np.exp(solution.shape[1]) * last),
  )
  if held is not None:
    params, least = (p._replace(initial=float(held)) for p in (params, least))
  white = np.exp(2.0 * draws.log_noise) * chosen.noise.mean()
  spread = float(np.sqrt(np.median(white + np.exp(2.0 * draws.log_misfit))))
  kept = curve.inflation == 1.0
  reasons = intervals.reasons_unidentified(
    params=params,
    least=least,
    shape=solution.shape,
    bounds=bounds,
    profile=found.profile,
    rise=bands.law(draws, np.zeros(1))[0] - draws.initial,
    residual=spread,
    last_compute=last,
    pass_rate=chosen.pass_rate[kept],
    effective=draws.effective,
  )
  outlying = chosen.compute[~kept].tolist()
  if curve.zero_weight < 1.0:
    outlying.insert(0, 0.0)
  unit = chosen.noise
  if chosen.binomial:
    unit = unit / points_lib.bernoulli(chosen.pass_rate)
  return CurveFit(
    params=params,
    law=max(found.weights, key=lambda name: found.weights[name]),
    weights=found.weights,
    identified=not reasons,
    reasons=reasons,
    least_squares=least,
    asymptote_profile=found.profile,
    compute=chosen.compute,
    pass_rate=chosen.pass_rate,
    residual=spread,
    outliers=tuple(outlying),
    _draws=draws,
    _noise=curve.noise,
    _unit=float(np.median(unit)),
    _binomial=chosen.binomial,
    _start=chosen.initial,
    _again=again,
  )
