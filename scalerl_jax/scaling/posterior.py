"""The posterior of the law, with correlated misfit beside evaluation noise.

pass_rate_i = law(C_i) + misfit(ln C_i) + noise_i. The misfit is an
Ornstein-Uhlenbeck process in log-compute: a real curve leaves the law for a
while and comes back, so neighbouring residuals agree, and a band that counts
them as independent is too narrow. R_0 and A enter linearly and are integrated
exactly; the other five parameters by adaptive importance sampling.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64
from scipy import special

# The weak priors, fixed in advance: (centre, sd) of a normal. ln C_mid is
# measured from the last point. A is uniform on [0, 1]; R_0 has its own prior,
# `Initial`. Noise is in pass rate; when the number of samples is known it is
# relative to their binomial noise, which is an upper bound on a fixed set of
# prompts. Forecasts of real curves hardly depend on misfit and its length (in
# ln C): halving or doubling either moved the mean error of half-run forecasts
# of nine laptop curves by at most 0.002, and their coverage by one curve.
LOG_EXPONENT = (float(np.log(1.7)), 0.5)
LOG_MIDPOINT = (0.0, 1.5)
LOG_NOISE = (float(np.log(0.008)), 0.8)
LOG_NOISE_RATIO = (float(np.log(0.7)), 0.4)
LOG_MISFIT = (float(np.log(0.015)), 0.7)
LOG_LENGTH = (float(np.log(0.7)), 0.5)
# Logs in float32 round at this size: added to the noise, so that a noiseless
# curve has a posterior of some width.
NOISE_FLOOR = 1e-7

SAMPLES = 512
_ROUNDS = 4
_MOST_ROUNDS = 10
_ENOUGH = 300  # Effective samples; more rounds are made below it.
_DRAWS = 1024
_DEGREES = 5.0  # Of freedom, of the proposals.
# As good as flat on [0, 1], which the truncation then makes exact.
_FLAT = 1e-4
_LARGEST = 0.0  # ln misfit.


class Evidence(NamedTuple):
  """What the filter sees: a padded curve, and the least-squares law.

  `noise` is the shape of the noise variance: 1, or p(1−p)/trials. `centre` is
  (R_0, A, ln B, ln C_mid) of least squares: everything is computed as a
  difference from it, which keeps the digits of nearly noiseless curves.
  """

  log_compute: Float[Array | np.ndarray, "N"]
  pass_rate: Float[Array | np.ndarray, "N"]
  used: Float[Array | np.ndarray, "N"]
  noise: Float[Array | np.ndarray, "N"]
  centre: Float[Array | np.ndarray, "4"]


class Initial(NamedTuple):
  """What is known of R_0: a normal prior, and evaluations at compute 0."""

  prior: float
  prior_sd: float
  measured: float
  measured_noise: float  # Noise shape of their mean; infinite without any.


class Posterior(NamedTuple):
  """Equally likely draws of law, misfit and noise; and their true number."""

  initial: Float64[np.ndarray, "M"]
  asymptote: Float64[np.ndarray, "M"]
  log_exponent: Float64[np.ndarray, "M"]
  log_midpoint: Float64[np.ndarray, "M"]
  log_noise: Float64[np.ndarray, "M"]
  log_misfit: Float64[np.ndarray, "M"]
  log_length: Float64[np.ndarray, "M"]
  effective: float


@jax.jit
def filtered_products(
  evidence: Evidence, phi: Float[Array | np.ndarray, "M 5"]
) -> Float[Array, "7 M"]:
  """Whitened inner products of (1−s, s, error), and the log-determinant.

  A Kalman filter of the misfit, run on the three columns at once for all M
  samples of φ = (ln B, ln C_mid, ln noise, ln misfit, ln length): linear in
  the number of points, where a Cholesky factor is cubic.
  """
  exponent, midpoint = jnp.exp(phi[:, 0]), phi[:, 1]
  noise, misfit = jnp.exp(2.0 * phi[:, 2]), jnp.exp(2.0 * phi[:, 3])
  noise += NOISE_FLOOR**2
  rate = jnp.exp(-phi[:, 4])
  initial, asymptote = evidence.centre[0], evidence.centre[1]

  def step(carry, point):
    last, variance, states, products, log_det = carry
    x, y, used, shape = point
    s = jax.nn.sigmoid(exponent * (x - midpoint))
    columns = (1.0 - s, s, y - initial - (asymptote - initial) * s)
    decay = jnp.exp((last - x) * rate)
    fresh = -jnp.expm1(2.0 * (last - x) * rate)
    ahead = decay * decay * variance + misfit * fresh
    total = ahead + noise * shape
    gain = ahead / total
    known = [decay * state for state in states]
    e = [c - k for c, k in zip(columns, known, strict=True)]
    new = [k + gain * i for k, i in zip(known, e, strict=True)]
    keep = used > 0
    weight = used / total
    pairs = ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 2))
    return (
      jnp.where(keep, x, last),
      jnp.where(keep, ahead * (1.0 - gain), variance),
      [jnp.where(keep, n, o) for n, o in zip(new, states, strict=True)],
      [
        p + e[i] * e[j] * weight
        for p, (i, j) in zip(products, pairs, strict=True)
      ],
      log_det + used * jnp.log(total),
    ), None

  zero = jnp.zeros_like(noise)
  start = (evidence.log_compute[0], misfit, [zero] * 3, [zero] * 6, zero)
  (_, _, _, products, log_det), _ = jax.lax.scan(step, start, evidence[:4])
  return jnp.stack([*products, log_det])


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


@functools.lru_cache(maxsize=8)
def _tables(seed: int):
  """Draws of a standard multivariate t, and uniforms for (A, R_0)."""
  u = uniforms(SAMPLES * _MOST_ROUNDS, 6, seed)
  stretch = np.sqrt(_DEGREES / special.chdtri(_DEGREES, u[:, 5]))
  t = special.ndtri(u[:, :5]) * stretch[:, None]
  return t.reshape(_MOST_ROUNDS, SAMPLES, 5), uniforms(_DRAWS, 2, seed + 1)


class _Proposal(NamedTuple):
  """A multivariate t around a centre."""

  centre: np.ndarray
  scale: np.ndarray  # Lower triangular.

  def draw(self, t):
    return self.centre + t @ self.scale.T

  def log_density(self, phi):
    z = (phi - self.centre) @ np.linalg.inv(self.scale).T
    power = 0.5 * (_DEGREES + z.shape[1])
    tail = power * np.log1p(np.einsum("mk,mk->m", z, z) / _DEGREES)
    return -tail - np.log(np.diag(self.scale)).sum()


def _edges(mean, sd):
  """[0, 1] in standard units, mirrored so that the lower tail is used."""
  top, bottom = (1.0 - mean) / sd, -mean / sd
  mirrored = bottom > 0
  high = special.log_ndtr(np.where(mirrored, -bottom, top))
  low = special.log_ndtr(np.where(mirrored, -top, bottom))
  return high, np.minimum(low - high, -1e-15), mirrored


def _draw_asymptote(mean, sd, u):
  """A of a normal truncated to [0, 1], by its inverse distribution."""
  high, low, mirrored = _edges(mean, sd)
  z = special.ndtri_exp(high + np.log(u + (1.0 - u) * np.exp(low)))
  return np.clip(mean + sd * np.where(mirrored, -z, z), 0.0, 1.0)


class Conditional(NamedTuple):
  """The normal law of (R_0, A) given φ, both measured from `centre`."""

  square: np.ndarray  # Smallest weighted sum of squares.
  log_det: np.ndarray  # What the density's normalisation adds to it.
  initial: np.ndarray
  asymptote: np.ndarray
  slope: np.ndarray  # Of R_0's mean in A.
  asymptote_sd: np.ndarray
  initial_precision: np.ndarray  # When A is known.


def conditional(
  evidence: Evidence, start: Initial, phi: Float64[np.ndarray, "M 5"]
) -> Conditional:
  """(R_0, A) of generalised least squares for each φ, with R_0's prior.

  Args:
    evidence: the curve.
    start: what is known of R_0.
    phi: (ln B, ln C_mid, ln noise, ln misfit, ln length), a row a sample.

  Returns:
    Their normal law for each row, A's truncation to [0, 1] left out.
  """
  phi = np.where(np.arange(5) == 3, np.minimum(phi, _LARGEST), phi)
  products = np.asarray(filtered_products(evidence, phi))
  noise = np.exp(2.0 * phi[:, 2]) + NOISE_FLOOR**2
  known = 1.0 / (noise * start.measured_noise)
  prior = start.prior_sd**-2.0
  centre = np.asarray(evidence.centre)
  measured, believed = start.measured - centre[0], start.prior - centre[0]
  a = products[0] + known + prior
  b = products[1]
  d = products[2] + _FLAT
  p = products[3] + known * measured + prior * believed
  q = products[4]
  det = a * d - b * b
  initial, asymptote = (d * p - b * q) / det, (a * q - b * p) / det
  square = products[5] + known * measured**2 + prior * believed**2
  log_det = products[6] + np.log(det)
  if np.isfinite(start.measured_noise):
    log_det = log_det - np.log(known)
  return Conditional(
    square - p * initial - q * asymptote,
    log_det,
    initial,
    asymptote,
    -b / a,
    np.sqrt(a / det),
    a,
  )


def _log_posterior(evidence: Evidence, priors, phi, found: Conditional):
  """ln p(φ | curve) + constant, with R_0 and A integrated out."""
  mean = found.asymptote + np.asarray(evidence.centre)[1]
  high, low, _ = _edges(mean, found.asymptote_sd)
  z = (phi - priors[:, 0]) / priors[:, 1]
  log_p = high + np.log1p(-np.exp(low)) - 0.5 * (found.square + found.log_det)
  log_p = log_p - 0.5 * np.einsum("mk,mk->m", z, z)
  # Pass rates lie in [0, 1], and so does a misfit.
  return np.where(phi[:, 3] < _LARGEST, log_p, -np.inf)


def _around(centre, curvature, priors, log_noise, log_misfit, spread):
  """A proposal around least squares, for residuals of about this size."""
  size = np.exp(2.0 * log_misfit)
  believed = priors[:2, 1] ** -2.0
  # Four times the variance: correlated residuals tell less than their number.
  precision = curvature / (4.0 * size) + np.diag(believed)
  pull = np.linalg.solve(precision, (priors[:2, 0] - centre[2:]) * believed)
  scale = np.diag([0.0, 0.0, spread, spread, priors[4, 1]])
  scale[:2, :2] = np.linalg.cholesky(np.linalg.inv(precision))
  middle = [*(centre[2:] + pull), log_noise, log_misfit, priors[4, 0]]
  return _Proposal(np.array(middle), scale)


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


def sample_posterior(
  evidence: Evidence,
  start: Initial,
  *,
  noise_prior: tuple[float, float],
  curvature: Float64[np.ndarray, "2 2"],
  residual: float,
  seed: int,
) -> Posterior:
  """Draws from the posterior, by adaptive multiple importance sampling.

  Each round proposes from a t matched to all samples so far, and every sample
  is weighted by the mixture of all proposals (Cornuet et al., 2012).

  Args:
    evidence: the curve and its least-squares law.
    start: what is known of R_0.
    noise_prior: centre and sd of ln noise.
    curvature: JᵀJ of least squares in (ln B, ln C_mid).
    residual: the sd of the least-squares residuals.
    seed: shifts the quasi-random points.

  Returns:
    Draws of equal weight, and how many independent ones they are worth.
  """
  priors = np.array(
    [LOG_EXPONENT, LOG_MIDPOINT, noise_prior, LOG_MISFIT, LOG_LENGTH]
  )
  centre = np.asarray(evidence.centre)
  shape = np.asarray(evidence.noise)[np.asarray(evidence.used) > 0]
  unit = 0.5 * np.log(shape.mean())
  log_size = np.log(max(residual, NOISE_FLOOR))
  seen = functools.partial(_around, centre, curvature, priors)
  # Residuals may be pure noise, or small only because the points are few.
  proposals = [
    seen(log_size - unit, log_size, 0.6),
    seen(priors[2, 0], 0.5 * (log_size + priors[3, 0]), 1.0),
  ]
  tables, uniform = _tables(seed)
  half = SAMPLES // 2
  phis = [
    np.concatenate(
      [proposals[0].draw(tables[0, :half]), proposals[1].draw(tables[0, half:])]
    )
  ]
  shares = [half, half]
  logs, moments = [], []
  for round_index in range(_MOST_ROUNDS):
    if round_index:
      proposals.append(_adapted(phi, log_weight))
      shares.append(SAMPLES)
      phis.append(proposals[-1].draw(tables[round_index]))
    found = conditional(evidence, start, phis[-1])
    logs.append(_log_posterior(evidence, priors, phis[-1], found))
    moments.append(np.stack(found[2:]))
    phi = np.concatenate(phis)
    density = special.logsumexp(
      [p.log_density(phi) for p in proposals],
      axis=0,
      b=np.array(shares)[:, None],
    )
    log_weight = np.concatenate(logs) - density
    log_weight -= log_weight.max()
    weight = np.exp(log_weight)
    effective = weight.sum() ** 2 / (weight @ weight)
    if round_index + 1 >= _ROUNDS and effective >= _ENOUGH:
      break
  share = np.cumsum(weight) / weight.sum()
  index = np.searchsorted(share, (np.arange(_DRAWS) + 0.5) / _DRAWS)
  initial, asymptote, slope, sd, precision = np.concatenate(moments, 1)[
    :, index
  ]
  drawn = _draw_asymptote(centre[1] + asymptote, sd, uniform[:, 0])
  initial = initial + slope * (drawn - centre[1] - asymptote)
  initial += special.ndtri(uniform[:, 1]) / np.sqrt(precision) + centre[0]
  log_b, log_mid, log_noise, log_misfit, log_length = phi[index].T
  return Posterior(
    np.clip(initial, 0.0, 1.0),
    drawn,
    log_b,
    log_mid,
    log_noise,
    log_misfit,
    log_length,
    float(effective),
  )
