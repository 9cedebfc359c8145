import jax
import numpy as np
import pytest

from scalerl_jax.scaling import posterior

COUNT = 9
START = posterior.Initial(0.2, 0.05, 0.21, 0.5)


@pytest.fixture
def evidence():
  rng = np.random.default_rng(0)
  place = np.sort(rng.uniform(-2.5, 0.0, COUNT))
  pass_rate = 0.2 + 0.5 / (1.0 + np.exp(-1.6 * (place + 1.0)))
  pass_rate += rng.normal(scale=0.02, size=COUNT)
  pad = (0, 64 - COUNT)
  return posterior.Evidence(
    np.pad(place, pad),
    np.pad(pass_rate, pad),
    np.pad(np.ones(COUNT), pad),
    np.pad(rng.uniform(0.5, 2.0, COUNT), pad),
    np.array([0.25, 0.66, 0.4, -1.1]),
  )


@pytest.fixture
def phi():
  rng = np.random.default_rng(1)
  middle = np.array([0.5, -1.0, np.log(0.02), np.log(0.015), np.log(0.6)])
  return middle + 0.3 * rng.normal(size=(posterior.SAMPLES, 5))


def _dense(evidence, phi):
  """Covariance, design and residual of one φ, point by point."""
  x, y = evidence.log_compute[:COUNT], evidence.pass_rate[:COUNT]
  exponent, midpoint, noise, misfit, length = phi
  s = 1.0 / (1.0 + np.exp(-np.exp(exponent) * (x - midpoint)))
  gap = np.abs(x[:, None] - x[None, :])
  cov = np.exp(2 * misfit) * np.exp(-gap / np.exp(length))
  cov += np.diag(np.exp(2 * noise) * evidence.noise[:COUNT])
  design = np.stack([1 - s, s], axis=1)
  error = y - design @ evidence.centre[:2]
  return cov, design, error


def _with_initial(evidence, phi):
  """The same with R_0's prior and measurement as two more observations."""
  cov, design, error = _dense(evidence, phi)
  noise = np.exp(2 * phi[2]) * START.measured_noise
  cov = np.block(
    [
      [cov, np.zeros((COUNT, 2))],
      [np.zeros((2, COUNT)), np.diag([START.prior_sd**2, noise])],
    ]
  )
  design = np.vstack([design, [[1.0, 0.0], [1.0, 0.0]]])
  known = np.array([START.prior, START.measured]) - evidence.centre[0]
  return cov, design, np.append(error, known)


def test_filter_equals_dense_generalised_least_squares(evidence, phi):
  with jax.enable_x64(True):
    found = np.asarray(posterior.filtered_products(evidence, phi))
  for k in (0, 3, 7):
    cov, design, error = _dense(evidence, phi[k])
    columns = np.column_stack([design, error])
    gram = columns.T @ np.linalg.solve(cov, columns)
    expected = [
      *(gram[0, 0], gram[0, 1], gram[1, 1]),
      *(gram[0, 2], gram[1, 2], gram[2, 2]),
      np.linalg.slogdet(cov)[1],
    ]
    np.testing.assert_allclose(found[:, k], expected, rtol=1e-9)


def test_conditional_law_of_initial_and_asymptote(evidence, phi):
  with jax.enable_x64(True):
    found = posterior.conditional(evidence, START, phi)
  for k in (0, 3, 7):
    cov, design, error = _with_initial(evidence, phi[k])
    precision = design.T @ np.linalg.solve(cov, design)
    mean = np.linalg.solve(precision, design.T @ np.linalg.solve(cov, error))
    rest = error - design @ mean
    joint = np.linalg.inv(precision)
    expected = [
      rest @ np.linalg.solve(cov, rest),
      mean[0],
      mean[1],
      joint[0, 1] / joint[1, 1],
      np.sqrt(joint[1, 1]),
      precision[0, 0],
    ]
    ours = [found.square[k], *(f[k] for f in found[2:])]
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-6)


def test_sampling_equals_a_grid(evidence):
  """Draws of A against brute-force integration over all five of φ."""
  priors = np.array(
    [
      posterior.LOG_EXPONENT,
      posterior.LOG_MIDPOINT,
      posterior.LOG_NOISE,
      posterior.LOG_MISFIT,
      posterior.LOG_LENGTH,
    ]
  )
  with jax.enable_x64(True):
    draws = posterior.sample_posterior(
      evidence,
      START,
      noise_prior=posterior.LOG_NOISE,
      curvature=np.array([[0.2, 0.1], [0.1, 0.6]]),
      residual=0.02,
      seed=0,
    )
    # Plain importance sampling from the priors: crude, but another method.
    rng = np.random.default_rng(0)
    squares, means = [], []
    for _ in range(120):
      z = rng.normal(size=(posterior.SAMPLES, 5))
      phi = priors[:, 0] + z * priors[:, 1]
      phi[:, 2:4] = np.maximum(phi[:, 2:4], np.log(posterior.NOISE_FLOOR))
      found = posterior.conditional(evidence, START, phi)
      squares.append(-0.5 * (found.square + found.log_det))
      means.append([found.asymptote + 0.66, found.asymptote_sd])
  log_p = np.concatenate(squares)
  mean, sd = np.concatenate(means, axis=1)
  normal = rng.normal(size=(40, len(mean)))
  asymptote = mean + sd * normal
  weight = np.exp(log_p - log_p.max()) * ((asymptote > 0) & (asymptote < 1))
  order = np.argsort(asymptote.ravel())
  share = np.cumsum(weight.ravel()[order]) / weight.sum()
  expected = asymptote.ravel()[order][
    np.searchsorted(share, [0.05, 0.25, 0.5, 0.75, 0.95])
  ]
  ours = np.quantile(draws.asymptote, [0.05, 0.25, 0.5, 0.75, 0.95])
  assert draws.effective > 300
  # Two Monte Carlo answers: 0.006 apart at most when this was written.
  np.testing.assert_allclose(ours, expected, atol=0.015)


def test_uniforms_are_even_and_shifted_by_the_seed():
  u = posterior.uniforms(1000, 2, 0)
  assert ((u > 0) & (u < 1)).all()
  counts, _, _ = np.histogram2d(u[:, 0], u[:, 1], bins=5, range=[[0, 1]] * 2)
  assert counts.min() >= 34  # 40 a cell; independent draws leave about 28.
  assert not np.allclose(u, posterior.uniforms(1000, 2, 1))
