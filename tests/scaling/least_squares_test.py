import jax
import numpy as np
import pytest
from scipy import optimize

from scalerl_jax.scaling import least_squares


def _points(compute, pass_rate, initial=0.2, weight=1.0, bucket=64):
  place = np.log(compute) - np.log(compute[-1])
  pad = (0, bucket - len(compute))
  return least_squares.Points(
    np.pad(place, pad),
    np.pad(pass_rate, pad),
    np.pad(np.ones_like(place), pad),
    np.array(initial),
    np.array(weight),
  )


def _solve(points):
  with jax.enable_x64(True):
    return jax.tree.map(np.asarray, jax.jit(least_squares.solve)(points))


def _law(p, compute):
  return p[0] + (p[1] - p[0]) / (1.0 + np.exp(p[2] * (p[3] - np.log(compute))))


def _noisy(seed, count=30):
  rng = np.random.default_rng(seed)
  compute = np.linspace(1.0, 40.0, count)
  truth = [
    rng.uniform(0.1, 0.3),
    rng.uniform(0.5, 0.9),
    rng.uniform(1.0, 3.0),
    np.log(rng.uniform(4.0, 20.0)),
  ]
  noise = rng.normal(scale=0.01, size=count)
  return compute, np.clip(_law(truth, compute) + noise, 0, 1), truth


@pytest.mark.parametrize("seed", range(8))
def test_agrees_with_scipy(seed):
  compute, pass_rate, truth = _noisy(seed)
  found = _solve(_points(compute, pass_rate, initial=truth[0]))
  scipys = optimize.least_squares(
    lambda p: np.append(_law(p, compute) - pass_rate, p[0] - truth[0]),
    truth,
    bounds=([0, 0, 0.1, -3], [1, 1, 20, 10]),
    xtol=1e-15,
    ftol=1e-15,
    gtol=1e-15,
  )
  ours = [
    found.initial,
    found.asymptote,
    np.exp(found.shape[0]),
    found.shape[1] + np.log(compute[-1]),
  ]
  assert found.loss <= 2 * scipys.cost * (1 + 1e-9)
  np.testing.assert_allclose(ours, scipys.x, rtol=1e-5)


def test_padding_changes_nothing():
  compute, pass_rate, _ = _noisy(3)
  short = _points(compute, pass_rate)
  padded = _points(compute, pass_rate, bucket=128)
  padded = padded._replace(
    pass_rate=np.where(padded.weight > 0, padded.pass_rate, 0.9)
  )
  for a, b in zip(_solve(short), _solve(padded), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-7)


def test_asymptote_stays_at_or_below_one():
  compute = np.linspace(1.0, 10.0, 20)
  rising = _law([0.1, 1.6, 2.0, np.log(9.0)], compute)
  found = _solve(_points(compute, rising, initial=0.1))
  assert found.asymptote == 1.0
  # With A held at 1 the rest is still a minimum: scipy can do no better.
  scipys = optimize.least_squares(
    lambda p: np.append(
      _law([p[0], 1.0, p[1], p[2]], compute) - rising, p[0] - 0.1
    ),
    [0.1, 2.0, 2.0],
    xtol=1e-15,
    ftol=1e-15,
  )
  np.testing.assert_allclose(found.loss, 2 * scipys.cost, rtol=1e-6)


def test_given_initial_is_held():
  compute, pass_rate, _ = _noisy(5)
  found = _solve(_points(compute, pass_rate, initial=0.123, weight=1e12))
  assert abs(found.initial - 0.123) < 1e-9
