import jax
import numpy as np
import pytest

from scalerl_jax.scaling import laws, posterior

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
  middle = [0.5, -1.0, np.log(0.02), np.log(0.015), np.log(0.6), 0.0]
  return np.array(middle) + 0.3 * rng.normal(size=(8, 6))


def _share(law, z, tail):
  scale = 2.0 ** (1.0 / tail) - 1.0
  return {
    "sigmoid": 1.0 / (1.0 + np.exp(-z)),
    "burr": 1.0 - (1.0 + scale * np.exp(z)) ** -tail,
    "dagum": (1.0 + scale * np.exp(-z)) ** -tail,
    "power_law": 1.0 - 0.5 * np.exp(-z),
  }[law]


def _dense(evidence, phi, law="sigmoid"):
  """Covariance, design and residual of one φ, point by point."""
  x, y = evidence.log_compute[:COUNT], evidence.pass_rate[:COUNT]
  exponent, midpoint, noise, misfit, length, tail = phi
  s = _share(law, np.exp(exponent) * (x - midpoint), np.exp(tail))
  gap = np.abs(x[:, None] - x[None, :])
  cov = np.exp(2 * misfit) * np.exp(-gap / np.exp(length))
  cov += np.diag(np.exp(2 * noise) * evidence.noise[:COUNT])
  design = np.stack([1 - s, s], axis=1)
  error = y - design @ evidence.centre[:2]
  return cov, design, error


def _with_priors(evidence, phi, asymptote):
  """The same with R_0's prior and measurement, and A's, as observations."""
  cov, design, error = _dense(evidence, phi)
  noise = np.exp(2 * phi[2]) * START.measured_noise
  extra = np.diag([START.prior_sd**2, noise, min(asymptote[2], 100.0) ** 2])
  cov = np.block([[cov, np.zeros((COUNT, 3))], [np.zeros((3, COUNT)), extra]])
  design = np.vstack([design, [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]])
  initial, highest = evidence.centre[:2]
  known = [START.prior - initial, START.measured - initial]
  known.append(asymptote[1] - highest if np.isfinite(asymptote[2]) else 0.0)
  return cov, design, np.append(error, known)


@pytest.mark.parametrize("law", sorted(laws.LAWS))
def test_filter_equals_dense_generalised_least_squares(evidence, phi, law):
  with jax.enable_x64(True):
    found = np.asarray(posterior.filtered_products(evidence, phi, law))
  for k in (0, 3, 7):
    cov, design, error = _dense(evidence, phi[k], law)
    columns = np.column_stack([design, error])
    gram = columns.T @ np.linalg.solve(cov, columns)
    expected = [
      *(gram[0, 0], gram[0, 1], gram[1, 1]),
      *(gram[0, 2], gram[1, 2], gram[2, 2]),
      np.linalg.slogdet(cov)[1],
    ]
    np.testing.assert_allclose(found[:, k], expected, rtol=1e-9)


@pytest.mark.parametrize(
  "asymptote", [posterior.UNIFORM, (0.3, 0.9, 0.04)], ids=["uniform", "normal"]
)
def test_conditional_law_of_initial_and_asymptote(evidence, phi, asymptote):
  with jax.enable_x64(True):
    found = posterior.conditional(evidence, START, phi, "sigmoid", asymptote)
  for k in (0, 3, 7):
    cov, design, error = _with_priors(evidence, phi[k], asymptote)
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


def test_weak_priors_hold_what_a_law_does_not_have():
  sigmoid, burr = (posterior.weak_prior(name) for name in ("sigmoid", "burr"))
  np.testing.assert_array_equal(sigmoid.phi[:5], burr.phi[:5])
  assert tuple(sigmoid.phi[5]) == (0.0, 0.0)
  assert tuple(burr.phi[5]) == (0.0, 0.6)
  exact = posterior.weak_prior("sigmoid", misfit=False).phi
  assert (exact[3:5, 1] == 0).all()
  assert np.exp(exact[3, 0]) < 1e-12
  assert np.exp(sigmoid.phi[0, 0]) == pytest.approx(1.7)
  assert sum(weight for weight, _, _ in sigmoid.asymptote) == 1.0


def test_components_are_densities_in_the_asymptote(evidence, phi):
  """Each part's value is its weight times an integral over A, done here."""
  prior = posterior.weak_prior("sigmoid")._replace(
    asymptote=((0.7, 0.5, np.inf), (0.3, 1.0, 0.03))
  )
  with jax.enable_x64(True):
    found = [
      posterior.conditional(evidence, START, phi, "sigmoid", part)
      for part in prior.asymptote
    ]
    logs = posterior.log_components(evidence, prior, phi, found)
    uniform = found[0]
    # The likelihood at (R_0 maximised out, A), on a grid of A.
    grid = np.linspace(0.0, 1.0, 20001)
  for k in (0, 3):
    mean = uniform.asymptote[k] + evidence.centre[1]
    sd = uniform.asymptote_sd[k]
    like = np.exp(-0.5 * ((grid - mean) / sd) ** 2)
    near_one = np.exp(-0.5 * ((grid - 1.0) / 0.03) ** 2)
    ratio = 0.3 * np.trapezoid(
      like * near_one / np.trapezoid(near_one, grid), grid
    )
    ratio /= 0.7 * np.trapezoid(like, grid)
    assert logs[1, k] - logs[0, k] == pytest.approx(np.log(ratio), abs=2e-3)
