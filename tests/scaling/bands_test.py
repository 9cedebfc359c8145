import numpy as np
import pytest

from scalerl_jax.scaling import bands, laws, posterior

N, K, M = 7, 4, 3


@pytest.fixture
def draws():
  rng = np.random.default_rng(0)
  return posterior.Posterior(
    *rng.uniform(0.1, 0.3, (1, M)),
    *rng.uniform(0.6, 0.9, (1, M)),
    *rng.normal(0.5, 0.1, (1, M)),
    *rng.normal(-1.0, 0.1, (1, M)),
    *rng.normal(np.log(0.01), 0.3, (1, M)),
    *rng.normal(np.log(0.02), 0.3, (1, M)),
    *rng.normal(np.log(0.7), 0.3, (1, M)),
    log_tail=np.array([0.0, 0.4, -0.5]),
    drift=np.array([0.0, 0.2, -0.1]),
    law=np.array([laws.NAMES.index(n) for n in ("sigmoid", "burr", "dagum")]),
    effective=3.0,
    log_evidence=0.0,
  )


def test_law_equals_the_formula(draws):
  place = np.array([-np.inf, -2.0, 0.0, 5.0])
  found = bands.law(draws, place)
  for m in range(M):
    b, mid = np.exp(draws.log_exponent[m]), draws.log_midpoint[m]
    tail = np.exp(draws.log_tail[m])
    with np.errstate(divide="ignore"):
      odds = np.exp(b * (mid - place))  # (C_mid / C)^B
      share = (
        1.0 / (1.0 + odds),
        1.0 - (1.0 + (2.0 ** (1.0 / tail) - 1.0) / odds) ** -tail,
        (1.0 + (2.0 ** (1.0 / tail) - 1.0) * odds) ** -tail,
      )[m]
    expected = draws.initial[m] * (1 - share) + draws.asymptote[m] * share
    # Beyond the data, at place 0, what is gained is drift more.
    expected[3] += (0.0, 0.2, -0.1)[m] * (expected[3] - expected[2])
    np.testing.assert_allclose(found[:, m], expected, rtol=1e-12)


def test_misfit_equals_dense_gaussian_process(draws):
  rng = np.random.default_rng(1)
  place = np.sort(rng.uniform(-3.0, 0.0, N))
  wanted = np.array([0.8, -1.5, place[2], -4.0])
  noise = rng.uniform(0.5, 2.0, N)
  error = rng.normal(scale=0.02, size=(N, M))
  mean, variance = bands.smoothed_misfit(draws, place, error, noise, wanted)
  assert mean.shape == variance.shape == (K, M)
  for m in range(M):
    misfit, length = np.exp(2 * draws.log_misfit[m]), draws.log_length[m]

    def cov(a, b, misfit=misfit, length=length):
      gap = np.abs(a[:, None] - b[None, :])
      return misfit * np.exp(-gap / np.exp(length))

    seen = cov(place, place) + np.diag(np.exp(2 * draws.log_noise[m]) * noise)
    across = cov(wanted, place)
    np.testing.assert_allclose(
      mean[:, m], across @ np.linalg.solve(seen, error[:, m]), rtol=1e-9
    )
    expected = misfit - np.einsum(
      "kn,nk->k", across, np.linalg.solve(seen, across.T)
    )
    np.testing.assert_allclose(variance[:, m], expected, rtol=1e-8)


def test_quantiles_of_one_normal():
  mean = np.full((2, 4096), 0.5)
  low, high = bands.quantiles(mean, np.full_like(mean, 0.01**2), 0.9)
  np.testing.assert_allclose(low, 0.5 - 0.01645, atol=1e-4)
  np.testing.assert_allclose(high, 0.5 + 0.01645, atol=1e-4)


def test_quantiles_stay_pass_rates():
  mean = np.array([[0.99] * 64, [0.01] * 64])
  low, high = bands.quantiles(mean, np.full_like(mean, 0.1**2), 0.9)
  assert high[0] == 1.0
  assert low[1] == 0.0
