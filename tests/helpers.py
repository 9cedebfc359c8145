"""Small policies whose weights come from numpy, and walks over jaxprs.

A policy draws its weights with one compiled random generator a parameter, ten
seconds on a CPU core; with numpy's numbers there is nothing to compile.
"""

import contextlib
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from scalerl_jax.config import ModelConfig
from scalerl_jax.models.policy import Policy

V = 23
# The change of the parameters is the gradient. One rule for all tests: those
# with equal settings share their compiled step.
SGD = optax.sgd(1.0)
SHAPE = ModelConfig(
  width=16,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_width=6,
  mlp_width=20,
)


@contextlib.contextmanager
def optimised():
  """Programs jitted here are compiled as a user's are (see conftest)."""
  options = {
    "xla_backend_optimization_level": 3,
    "xla_cpu_use_fusion_emitters": True,
  }
  jit = functools.partial(jax.jit, compiler_options=options)
  with mock.patch.object(jax, "jit", jit):
    yield


@contextlib.contextmanager
def numpy_normal(seed):
  """Normal numbers from numpy; gives the list of keys that were asked."""
  rng = np.random.default_rng(seed)
  keys = []

  def normal(key, shape, dtype):
    keys.append(key)
    return jnp.asarray(rng.standard_normal(shape), dtype)

  with mock.patch.object(jax.random, "normal", normal):
    yield keys


@functools.lru_cache(maxsize=32)
def small_policy(config=SHAPE, *, vocab_size=V, seed=0, mesh=None):
  """A policy in which every weight matters, the norms' scales too."""
  with numpy_normal(seed):
    policy = Policy(config, vocab_size=vocab_size, rngs=nnx.Rngs(0), mesh=mesh)
  graph, params = nnx.split(policy)
  return nnx.merge(graph, moved(params, 0.2, seed=seed + 1))


def moved(params, scale, *, seed=0):
  """The parameters plus noise: another version of the policy."""
  rng = np.random.default_rng(seed)

  def move(x):
    noise = np.float32(scale * rng.standard_normal(x.shape))
    return jax.device_put(np.asarray(x) + noise, x.sharding)

  return jax.tree.map(move, params)


def weights(params):
  """Parameters as nested dicts of float64 numpy arrays."""
  return jax.tree.map(
    lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(params)
  )


def equations(jaxpr):
  """Every equation of a jaxpr, those of inner jaxprs too."""
  for equation in jaxpr.eqns:
    yield equation
    for value in equation.params.values():
      for inner in value if isinstance(value, tuple | list) else (value,):
        inner = getattr(inner, "jaxpr", inner)
        if hasattr(inner, "eqns"):
          yield from equations(inner)


def products(traced):
  """Every product of a traced function, `jax.make_jaxpr(f)(...)`."""
  return [
    equation
    for equation in equations(traced.jaxpr)
    if equation.primitive.name == "dot_general"
  ]


def in_full_precision(traced):
  """How many products are asked for as float32 is: all, or this fails.

  An accelerator's default rounds float32 operands; a CPU cannot show it.
  """
  found = products(traced)
  highest = jax.lax.Precision.HIGHEST
  for product in found:
    assert product.params["precision"] == (highest, highest)
    assert product.params["preferred_element_type"] == jnp.float32
  return len(found)


def same_update(actual, expected):
  """Two updates, (what was taken off the parameters, metrics), are the same
  but for what was computed to get there."""
  gradient, metrics = actual
  wanted, told = expected
  assert max(np.abs(x).max() for x in jax.tree.leaves(wanted)) > 0.05
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5),
    gradient,
    wanted,
  )
  own = {"micro_batches", "padding_share"}
  own |= {name for name in told if name.startswith("computed_")}
  for metric in set(told) - own:
    assert metrics[metric] == pytest.approx(told[metric], rel=1e-4, abs=1e-6), (
      metric
    )


@contextlib.contextmanager
def compilations():
  """The seconds of each XLA compilation inside."""
  seconds = []

  def listen(event, duration, **_):
    if event == "/jax/core/compile/backend_compile_duration":
      seconds.append(duration)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield seconds
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
