"""Adaptive importance sampling of a law's posterior, and mixtures of laws.

R_0 and A are drawn from their exact normal law given the rest (`posterior.py`);
the rest from t distributions that are matched to it round by round.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64
from scipy import special

from scalerl_jax.scaling import laws
from scalerl_jax.scaling import posterior as posterior_lib

SAMPLES = 512
DRAWS = 1024
_ROUNDS = 3
_MOST_ROUNDS = 10
_ENOUGH = 300  # Effective samples; more rounds are made below it.
# The power of the evidence in the weights of laws. At 1, the first halves of
# three training runs gave the Dagum law .6 to .95 of the weight, and the
# forecast of the end became worse for two of them.
TEMPER = 0.1
_DEGREES = 5.0  # Of freedom, of the proposals.


def uniforms(count: int, dims: int, seed: int) -> np.ndarray:
  """Evenly spread points in (0, 1)^dims: Roberts' R sequence, shifted.

  Point k is (shift + k·g) mod 1 with g_j = φ^−j, where φ is the root of
  φ^(dims+1) = φ + 1; the shift is random by the seed.
  """
  root = 2.0
  for _ in range(50):
    root = (1.0 + root) ** (1.0 / (dims + 1.0))
  steps = root ** -np.arange(1.0, dims + 1.0)
  shift = np.random.default_rng(seed).random(dims)
  u = (shift + np.arange(1.0, count + 1.0)[:, None] * steps) % 1.0
  return np.clip(u, 1e-12, 1.0 - 1e-12)


@functools.lru_cache(maxsize=16)
def _tables(seed: int, dims: int):
  """Draws of a standard multivariate t, and uniforms for A, R_0, A's part."""
  u = uniforms(SAMPLES * _MOST_ROUNDS, dims + 1, seed)
  stretch = np.sqrt(_DEGREES / special.chdtri(_DEGREES, u[:, dims]))
  t = special.ndtri(u[:, :dims]) * stretch[:, None]
  return t.reshape(_MOST_ROUNDS, SAMPLES, dims), uniforms(DRAWS, 3, seed + 1)


class _Proposal(NamedTuple):
  """A multivariate t around a centre."""

  centre: np.ndarray
  scale: np.ndarray  # Lower triangular.

  def draw(self, t):
    return self.centre + t @ self.scale.T

  def log_density(self, phi):
    z = (phi - self.centre) @ np.linalg.inv(self.scale).T
    dims = z.shape[1]
    power = 0.5 * (_DEGREES + dims)
    tail = power * np.log1p(np.einsum("mk,mk->m", z, z) / _DEGREES)
    constant = special.gammaln(power) - special.gammaln(0.5 * _DEGREES)
    constant -= 0.5 * dims * np.log(_DEGREES * np.pi)
    return constant - tail - np.log(np.diag(self.scale)).sum()


@functools.lru_cache(maxsize=16)
def _drift(seed: int) -> np.ndarray:
  """Draws of the drift; a sequence of its own, like no other that is used."""
  u = uniforms(DRAWS, 4, seed + 1)[:, 3]
  return posterior_lib.DRIFT * special.ndtri(u)


def _draw_asymptote(mean, sd, u):
  """A of a normal truncated to [0, 1], by its inverse distribution."""
  high, low, mirrored = posterior_lib.edges(mean, sd)
  z = special.ndtri_exp(high + np.log(u + (1.0 - u) * np.exp(low)))
  return np.clip(mean + sd * np.where(mirrored, -z, z), 0.0, 1.0)


def _around(centre, curvature, prior, log_noise, log_misfit, spread):
  """A proposal around least squares, for residuals of about this size."""
  believed = prior[:2, 1] ** -2.0
  # Four times the variance: correlated residuals tell less than their number.
  size = 4.0 * np.exp(2.0 * log_misfit)
  precision = curvature / size + np.diag(believed)
  pull = np.linalg.solve(precision, (prior[:2, 0] - centre[2:]) * believed)
  scale = np.diag([0.0, 0.0, spread, spread, prior[4, 1], prior[5, 1]])
  scale[:2, :2] = np.linalg.cholesky(np.linalg.inv(precision))
  middle = [*(centre[2:] + pull), log_noise, log_misfit, *prior[4:, 0]]
  free = prior[:, 1] > 0
  return _Proposal(np.array(middle)[free], scale[np.ix_(free, free)])


def _adapted(phi, log_weight):
  """The t with the moments of the weighted samples, tempered if few count."""
  for temper in (1.0, 0.5, 0.25, 0.12, 0.06, 0.03):
    weight = np.exp(log_weight * temper)
    weight /= weight.sum()
    if 1.0 / (weight @ weight) > 50.0:
      break
  mean = weight @ phi
  spread = (phi - mean) * np.sqrt(weight)[:, None]
  cov = spread.T @ spread
  cov += np.diag(1e-6 * np.diag(cov) + 1e-20)
  return _Proposal(mean, np.linalg.cholesky(cov))


def _evaluated(evidence, start, prior, phi):
  """ln p of samples by part of A's prior, and (R_0, A)'s laws given each."""
  phi = np.where(
    np.arange(6) == 3, np.minimum(phi, posterior_lib.LARGEST_MISFIT), phi
  )
  products = np.asarray(
    posterior_lib.filtered_products(evidence, phi, prior.law)
  )
  found = [
    posterior_lib.conditional(
      evidence, start, phi, prior.law, asymptote, products
    )
    for asymptote in prior.asymptote
  ]
  log_p = posterior_lib.log_components(evidence, prior, phi, found)
  return log_p, np.stack([np.stack(f[2:]) for f in found])


def sample_posterior(
  evidence: posterior_lib.Evidence,
  start: posterior_lib.Initial,
  prior: posterior_lib.Prior,
  *,
  curvature: Float64[np.ndarray, "2 2"],
  residual: float,
  seed: int,
) -> posterior_lib.Posterior:
  """Draws from the posterior, by adaptive multiple importance sampling.

  Each round proposes from a t matched to all samples so far, and every sample
  is weighted by the mixture of all proposals (Cornuet et al., 2012).

  Args:
    evidence: the curve and its least-squares law.
    start: what is known of R_0.
    prior: the law and its prior.
    curvature: JᵀJ of least squares in (ln B, ln C_mid).
    residual: the sd of the least-squares residuals.
    seed: shifts the quasi-random points.

  Returns:
    Draws of equal weight, how many independent ones they are worth, and the
    evidence for law and prior.
  """
  table, free = prior.phi, prior.phi[:, 1] > 0
  centre = np.asarray(evidence.centre)
  shape = np.asarray(evidence.noise)[np.asarray(evidence.used) > 0]
  unit = 0.5 * np.log(np.median(shape))
  log_size = np.log(max(residual, posterior_lib.NOISE_FLOOR))
  seen = functools.partial(_around, centre, curvature, table)
  small = 0.5 * (log_size + table[3, 0]) if free[3] else log_size
  # Residuals may be pure noise, or small only because the points are few.
  proposals = [
    seen(log_size - unit, log_size, 0.6),
    seen(table[2, 0], small, 1.0),
  ]
  tables, uniform = _tables(seed, int(free.sum()))
  half = SAMPLES // 2
  phis = [
    np.concatenate(
      [proposals[0].draw(tables[0, :half]), proposals[1].draw(tables[0, half:])]
    )
  ]
  shares = [half, half]
  logs, moments, whole = [], [], np.empty((0, 6))
  for round_index in range(_MOST_ROUNDS):
    if round_index:
      proposals.append(_adapted(phi, log_weight))
      shares.append(SAMPLES)
      phis.append(proposals[-1].draw(tables[round_index]))
    fresh = np.tile(table[:, 0], (SAMPLES, 1))
    fresh[:, free] = phis[-1]
    log_p, moment = _evaluated(evidence, start, prior, fresh)
    logs.append(log_p)
    moments.append(moment)
    whole = np.concatenate([whole, fresh])
    phi = np.concatenate(phis)
    density = np.logaddexp.reduce(
      [
        p.log_density(phi) + np.log(n)
        for p, n in zip(proposals, shares, strict=True)
      ]
    )
    parts = np.concatenate(logs, axis=1)
    log_weight = np.logaddexp.reduce(parts) - density
    largest = log_weight.max()
    log_weight -= largest
    weight = np.exp(log_weight)
    effective = weight.sum() ** 2 / (weight @ weight)
    if round_index + 1 >= _ROUNDS and effective >= _ENOUGH:
      break
  share = np.cumsum(weight) / weight.sum()
  index = np.searchsorted(share, (np.arange(DRAWS) + 0.5) / DRAWS)
  of_part = parts[:, index]
  of_part = np.exp(of_part - np.logaddexp.reduce(of_part)).cumsum(0)
  part = (uniform[:, 2] > of_part[:-1]).sum(0)
  initial, asymptote, slope, sd, precision = np.concatenate(moments, 2)[
    part, :, index
  ].T
  drawn = _draw_asymptote(centre[1] + asymptote, sd, uniform[:, 0])
  initial = initial + slope * (drawn - centre[1] - asymptote)
  initial += special.ndtri(uniform[:, 1]) / np.sqrt(precision) + centre[0]
  log_b, log_mid, log_noise, log_misfit, log_length, log_tail = whole[index].T
  return posterior_lib.Posterior(
    initial=np.clip(initial, 0.0, 1.0),
    asymptote=drawn,
    log_exponent=log_b,
    log_midpoint=log_mid,
    log_noise=log_noise,
    log_misfit=log_misfit,
    log_length=log_length,
    log_tail=log_tail,
    # A law that holds exactly has neither misfit nor drift.
    drift=_drift(seed) if free[3] else np.zeros(DRAWS),
    law=np.full(DRAWS, laws.NAMES.index(prior.law)),
    effective=float(effective),
    # The densities were weighted by numbers of samples: no division by them.
    log_evidence=float(largest + np.log(weight.sum())),
  )


def mixed(
  posteriors: Sequence[posterior_lib.Posterior],
  priors: Sequence[posterior_lib.Prior],
) -> tuple[posterior_lib.Posterior, np.ndarray]:
  """One posterior of several laws and priors, by their evidence.

  Priors of one law are weighted by prior weight times p(curve); laws, by prior
  weight times p(curve) to the power of `TEMPER`: none of them is the truth, and
  how well one fits the points hardly tells how well it goes on.

  Args:
    posteriors: of one curve, each with `DRAWS` draws.
    priors: of each, for its law and its weight before the curve was seen.

  Returns:
    The mixture, and the weight of each part in it.
  """
  log_weight = np.array(
    [
      p.log_evidence + np.log(prior.weight)
      for p, prior in zip(posteriors, priors, strict=True)
    ]
  )
  names = [prior.law for prior in priors]
  for law in set(names):
    of = np.array([name == law for name in names])
    believed = np.log(sum(p.weight for p in priors if p.law == law))
    evidence = np.logaddexp.reduce(log_weight[of]) - believed
    log_weight[of] += (TEMPER - 1.0) * evidence
  total = float(np.logaddexp.reduce(log_weight))
  weight = np.exp(log_weight - total)
  ends = np.round(DRAWS * np.cumsum(weight)).astype(int)
  counts = np.diff(ends, prepend=0)
  picks = [np.linspace(0, DRAWS - 1, n).round().astype(int) for n in counts]
  rows = [p.rows(i) for p, i in zip(posteriors, picks, strict=True)]
  columns = [np.concatenate(column) for column in zip(*rows, strict=True)]
  effective = 1.0 / sum(
    w * w / p.effective for w, p in zip(weight, posteriors, strict=True)
  )
  mixture = posterior_lib.Posterior(
    *columns, effective=float(effective), log_evidence=total
  )
  return mixture, weight
