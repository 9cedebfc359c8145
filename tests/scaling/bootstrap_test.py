import jax
import numpy as np
import pytest

from scalerl_jax.scaling import bootstrap, fit, least_squares

COMPUTE = np.arange(0.0, 31.0)


@pytest.fixture(scope="module")
def fitted():
  rng = np.random.default_rng(0)
  law = 0.2 + 0.5 / (1.0 + (7.0 / np.maximum(COMPUTE, 1e-9)) ** 1.7)
  return fit.fit_curve(COMPUTE, law + rng.normal(scale=0.01, size=31))


def test_each_refit_is_the_multi_start_least_squares(fitted):
  found = bootstrap.bootstrap_refits(fitted, 40, seed=3)
  weight = np.random.default_rng(3).multinomial(30, np.full(30, 1 / 30), 40)
  place = np.log(fitted.compute / fitted.compute[-1])
  with jax.enable_x64(True):
    for k in range(0, 40, 8):
      points = least_squares.Points(
        np.pad(place, (0, 34)),
        np.pad(fitted.pass_rate, (0, 34)),
        np.pad(weight[k].astype(float), (0, 34)),
        np.array(fitted._start.measured),
        np.array(1.0),
      )
      solution = fit._solve(points, "sigmoid")
      expected = [
        float(solution.initial),
        float(solution.asymptote),
        float(np.exp(solution.shape[0])),
        float(np.exp(solution.shape[1]) * 30.0),
      ]
      ours = [values[k] for values in found.values()]
      np.testing.assert_allclose(ours, expected, rtol=1e-5)


def test_spread_is_the_standard_error(fitted):
  """Against the delta method, which counts points as independent, too."""
  found = bootstrap.bootstrap_refits(fitted, 2000)
  assert list(found) == ["initial", "asymptote", "exponent", "midpoint"]
  p, c = fitted.least_squares, fitted.compute

  def law(a, b, m, r):
    return r + (a - r) / (1.0 + (m / c) ** b)

  at = np.array([p.asymptote, p.exponent, p.midpoint, p.initial])
  slopes = np.stack(
    [(law(*(at + h)) - law(*(at - h))) / 2e-6 for h in 1e-6 * np.eye(4)]
  )
  information = slopes @ slopes.T + np.diag([0.0, 0.0, 0.0, 1.0])
  residual = fitted.pass_rate - law(*at)
  sd = np.sqrt(np.diag(np.linalg.inv(information)) * (residual @ residual) / 27)
  spread = np.std([found["asymptote"], found["exponent"], found["midpoint"]], 1)
  np.testing.assert_allclose(spread, sd[:3], rtol=0.3)


def test_seed_decides_and_count_is_checked(fitted):
  one, same, other = (
    bootstrap.bootstrap_refits(fitted, 40, seed=s)["asymptote"]
    for s in (0, 0, 1)
  )
  np.testing.assert_array_equal(one, same)
  assert not np.allclose(one, other)
  with pytest.raises(ValueError, match="count must be at least 1"):
    bootstrap.bootstrap_refits(fitted, 0)
