"""Experts: every token through its own, whatever the mesh."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalerl_jax.config import ModelConfig
from scalerl_jax.learning.optimizer import init_sharded
from scalerl_jax.models import moe
from scalerl_jax.models.sharding import make_mesh
from tests.helpers import V, small_policy

D, E, F, N, K = 8, 6, 10, 7, 3
SPARSE = ModelConfig(
  width=16,
  num_layers=1,
  num_heads=4,
  num_kv_heads=2,
  head_width=6,
  mlp_width=20,
  num_experts=E,
  experts_per_token=2,
  expert_width=F,
  router="softmax_chosen",
)


def _weights(seed=0):
  rng = np.random.default_rng(seed)

  def draw(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)

  names = ("shared_gate", "shared_up")
  return {
    "router": draw(D, E),
    "expert_gate": draw(E, D, F),
    "expert_up": draw(E, D, F),
    "expert_down": draw(E, F, D),
    **{name: draw(D, F) for name in names},
    "shared_down": draw(F, D),
  }


def _mlp(x, gate, up, down):
  g, u = x @ gate, x @ up
  return (g / (1 + np.exp(-g)) * u) @ down


def _slow(x, weights, router, count, shared):
  """One token and one expert at a time, in float64."""
  w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
  out = np.zeros_like(x)
  for n, row in enumerate(x):
    logits = row @ w["router"]
    chosen = sorted(range(E), key=lambda e: -logits[e])[:count]
    masses = {e: np.exp(logits[e]) for e in range(E)}
    among = chosen if router == "softmax_chosen" else range(E)
    total = sum(masses[e] for e in among)
    for e in chosen:
      mlp = w["expert_gate"][e], w["expert_up"][e], w["expert_down"][e]
      if router == "sigmoid":
        out[n] += _mlp(row / (1 + np.exp(-logits[e])), *mlp)
      else:
        out[n] += masses[e] / total * _mlp(row, *mlp)
    if shared:
      names = ("shared_gate", "shared_up", "shared_down")
      out[n] += _mlp(row, *(w[name] for name in names))
  return out


def _config(router, count, *, shared=False):
  return dataclasses.replace(
    SPARSE, router=router, experts_per_token=count, shared_expert=shared
  )


@pytest.mark.parametrize(
  ("router", "count", "shared"),
  [
    ("softmax", 2, False),
    ("softmax_chosen", K, False),
    ("sigmoid", 1, True),
    ("sigmoid", 2, False),
  ],
)
def test_mixture_equals_one_token_and_one_expert_at_a_time(
  router, count, shared
):
  x = np.random.default_rng(1).standard_normal((N, D))
  weights = _weights()
  found = moe.mixture(
    jnp.asarray(x, jnp.float32), weights, _config(router, count, shared=shared)
  )
  expected = _slow(x, weights, router, count, shared)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_no_token_is_dropped_when_all_choose_the_same_expert():
  weights = _weights()
  x = np.abs(np.random.default_rng(1).standard_normal((N, D)))
  weights["router"] = jnp.zeros((D, E)).at[:, 2].set(5.0)
  found = moe.mixture(
    jnp.asarray(x, jnp.float32), weights, _config("softmax_chosen", 1)
  )
  mlp = (weights[name][2] for name in moe.WEIGHTS)
  expected = _mlp(x, *(np.asarray(w, np.float64) for w in mlp))
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
  assert np.abs(expected).min(axis=1).max() > 0


def test_rows_of_experts_elsewhere_are_zero():
  weights = _weights()
  rows = jnp.ones((N, 2, D))
  chosen = jnp.asarray(np.arange(2 * N).reshape(N, 2) % (E + 2) - 1)
  out = moe.experts(rows, chosen, *(weights[name] for name in moe.WEIGHTS))
  here = (np.asarray(chosen) >= 0) & (np.asarray(chosen) < E)
  assert not np.asarray(out)[~here].any()
  assert np.abs(np.asarray(out)[here]).max(axis=-1).min() > 0


def _loss_and_gradient(mesh):
  policy = small_policy(SPARSE, mesh=mesh)
  graph, params = nnx.split(policy)
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, V, (4, 5)))

  def loss(params):
    logps = jax.nn.log_softmax(nnx.merge(graph, params)(tokens))
    return logps[..., 3].mean(), logps

  return jax.jit(jax.value_and_grad(loss, has_aux=True)), params


@pytest.fixture(scope="module")
def alone():
  step, params = _loss_and_gradient(None)
  return step(params)


# A result of an all-gather, as "f32[2,16,10]".
GATHERED = re.compile(r"= \(?\w+\[([\d,]*)\][^=]*? all-gather")


@pytest.mark.parametrize(
  ("devices", "axes", "gathers"),
  [
    pytest.param(2, {"expert": 2}, False, marks=pytest.mark.slow),
    (8, {"fsdp": 2, "tensor": 2, "expert": 2}, True),
  ],
)
def test_experts_stay_on_their_devices_value_and_gradient(
  devices, axes, gathers, alone
):
  mesh = make_mesh(jax.devices()[:devices], **axes)
  step, params = _loss_and_gradient(mesh)
  held = params["layers"]["expert_gate"][...].addressable_shards
  cut = (1, E // 2, 16 // axes.get("fsdp", 1), F // axes.get("tensor", 1))
  assert {shard.data.shape for shard in held} == {cut}
  with jax.set_mesh(mesh):
    compiled = step.lower(params).compile()
    (_, logps), gradient = compiled(params)
  (_, expected), expected_gradient = alone
  np.testing.assert_allclose(logps, expected, rtol=1e-4, atol=1e-4)
  for x, y in zip(
    *map(jax.tree.leaves, (gradient, expected_gradient)), strict=True
  ):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
  shapes = [
    [int(size) for size in found.split(",") if size]
    for found in GATHERED.findall(compiled.as_text())
  ]
  # FSDP gathers widths, of a device's own experts; never the experts.
  assert bool(shapes) == gathers
  assert all(E not in shape[:-2] for shape in shapes)


def test_moments_of_adam_are_cut_as_the_experts_are():
  mesh = make_mesh(jax.devices()[:4], fsdp=2, expert=2)
  _, params = nnx.split(small_policy(SPARSE, mesh=mesh))
  optimizer = optax.scale_by_adam()
  state = init_sharded(optimizer, params, mesh)
  for moments in (state.mu, state.nu):
    held = moments["layers"]["expert_down"][...].addressable_shards
    assert {shard.data.shape for shard in held} == {(1, E // 2, F, 8)}


def test_a_gathered_expert_would_be_seen():
  mesh = make_mesh(jax.devices()[:2], expert=2)
  weights = jnp.ones((1, E, 16, F))
  weights = jax.device_put(weights, NamedSharding(mesh, P(None, "expert")))
  whole = jax.jit(lambda w: w * 2, out_shardings=NamedSharding(mesh, P()))
  text = whole.lower(weights).compile().as_text()
  (shape,) = [found.split(",") for found in GATHERED.findall(text)]
  assert str(E) in shape[:-2]
