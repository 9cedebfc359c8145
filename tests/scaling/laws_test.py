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
def test_every_law_rises_to_the_asymptote_through_half_the_gain(name):
  values = laws.LAWS[name](jnp.geomspace(1e9, 1e16, 31), **LAW)
  assert (jnp.diff(values) >= 0).all()
  assert values[-1] <= LAW["asymptote"] + 1e-6
  at = laws.LAWS[name](jnp.array([0.0, 3e12, 1e30]), **LAW)
  np.testing.assert_allclose(at, [0.2, 0.5, 0.8], atol=1e-6)
  if name != "power_law":  # It has no beginning.
    assert values[0] >= LAW["initial"]


@pytest.mark.parametrize("tail", [0.4, 1.0, 3.0])
@pytest.mark.parametrize("name", laws.WITH_TAIL)
def test_laws_with_a_tail_equal_their_formula(name, tail):
  compute = np.array([1e11, 9e11, 3e12, 2e13])
  scale, ratio = 2.0 ** (1.0 / tail) - 1.0, compute / 3e12
  share = (
    1.0 - (1.0 + scale * ratio**1.7) ** -tail
    if name == "burr"
    else (1.0 + scale * ratio**-1.7) ** -tail
  )
  found = laws.LAWS[name](jnp.asarray(compute), **LAW, tail=tail)
  np.testing.assert_allclose(found, 0.2 + 0.6 * share, rtol=3e-6)
  if tail == 1.0:
    same = laws.sigmoid(jnp.asarray(compute), **LAW)
    np.testing.assert_allclose(found, same, rtol=1e-6)


def test_power_law_is_the_papers():
  compute = np.array([2e12, 9e12, 1e14])
  constant = 0.6 * 3e12**1.7 / 2.0  # D
  np.testing.assert_allclose(
    laws.power_law(jnp.asarray(compute), **LAW),
    0.8 - constant / compute**1.7,
    rtol=3e-6,
  )


@pytest.mark.parametrize("name", sorted(laws.LAWS))
def test_gain_is_the_same_in_numpy_and_jax(name):
  z = np.array([-3.0, -0.4, 0.0, 1.3, 40.0])
  ours = laws.gain(name, z, 0.3, xp=np)
  np.testing.assert_allclose(laws.gain(name, jnp.asarray(z), 0.3), ours, 2e-6)
  if name != "power_law":
    assert laws.gain(name, np.array([-np.inf]), 0.3, xp=np) == 0.0


def test_unknown_law_is_refused():
  with pytest.raises(ValueError, match="law must be one of"):
    laws.gain("line", 0.0)
