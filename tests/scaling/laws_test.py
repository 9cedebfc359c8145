import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.scaling import laws

LAW = {"initial": 0.2, "asymptote": 0.8, "exponent": 1.7, "midpoint": 3e12}


def test_equals_the_papers_formula():
  compute = np.array([1e10, 3e11, 2.9e12, 1e13, 1e15])
  expected = [0.2 + 0.6 / (1.0 + (3e12 / c) ** 1.7) for c in compute.tolist()]
  np.testing.assert_allclose(
    laws.sigmoid(jnp.asarray(compute), **LAW), expected, rtol=2e-6
  )


def test_starts_at_initial_halves_at_midpoint_ends_at_asymptote():
  values = laws.sigmoid(jnp.array([0.0, 3e12, 1e30]), **LAW)
  np.testing.assert_allclose(values, [0.2, 0.5, 0.8], atol=1e-6)


def test_no_power_overflows():
  steep = LAW | {"exponent": 50.0}
  values = laws.sigmoid(jnp.array([1e-20, 1e30]), **steep)
  np.testing.assert_allclose(values, [0.2, 0.8], atol=1e-6)


def test_gradient_at_compute_zero_is_finite():
  gradient = jax.grad(
    lambda p: jnp.sum(laws.sigmoid(jnp.array([0.0, 1e12]), **p))
  )(jax.tree.map(jnp.asarray, LAW))
  assert all(np.isfinite(g) for g in gradient.values())
  # R_0 alone moves the value at 0: dR/dR_0 = 1 − share.
  share = 1.0 / (1.0 + 3.0**1.7)
  np.testing.assert_allclose(gradient["initial"], 2.0 - share, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(laws.LAWS))
def test_every_law_rises_from_initial_to_asymptote(name):
  values = laws.LAWS[name](jnp.geomspace(1e9, 1e16, 31), **LAW)
  assert (jnp.diff(values) >= 0).all()
  assert values[0] >= LAW["initial"]
  assert values[-1] <= LAW["asymptote"] + 1e-6
