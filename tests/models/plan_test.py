"""Which layers are alike, and that scanning them runs them in order."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.config import ModelConfig
from scalerl_jax.models import plan
from scalerl_jax.models.plan import Kind

PLAIN, SPARSE = Kind(True, False), Kind(True, True)
FLAT = Kind(False, True)  # does not rotate


def _config(depth, *, dense="", flat="", experts=3):
  return ModelConfig(
    width=4,
    num_layers=depth,
    num_heads=2,
    num_kv_heads=1,
    head_width=6,
    mlp_width=10,
    num_experts=experts,
    expert_width=5,
    dense_layers=dense,
    no_rope_layers=flat,
  )


@pytest.mark.parametrize(
  ("config", "expected"),
  [
    (ModelConfig(num_layers=7), [(0, (PLAIN,), 7)]),
    (ModelConfig(num_layers=1), [(0, (PLAIN,), 1)]),
    # As Scout: three layers in four rotate.
    (_config(8, flat="3,7"), [(0, (SPARSE, SPARSE, SPARSE, FLAT), 2)]),
    (_config(4, flat="3"), [(0, (SPARSE,), 3), (3, (FLAT,), 1)]),
    # One dense layer before the others, and every other layer.
    (_config(5, dense="0"), [(0, (PLAIN,), 1), (1, (SPARSE,), 4)]),
    (
      _config(7, dense="0,2,4"),
      [(0, (PLAIN, SPARSE), 3), (6, (SPARSE,), 1)],
    ),
  ],
)
def test_layers_are_cut_into_repeated_patterns(config, expected):
  assert [tuple(segment) for segment in plan.segments(config)] == expected


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize(
  "config",
  [
    ModelConfig(num_layers=3),
    _config(8, flat="3,7"),
    _config(7, dense="0,2,4", flat="3"),
    _config(5, dense="0,4"),
  ],
)
def test_scan_gives_every_layer_its_own_weights_in_order(config, unroll):
  held = {
    name: plan.stack_layers(config, name)
    for name in plan.parameter_plan(config, 11)
    if name not in ("embedding", "final_norm", "output")
  }
  # Weights that are their layer's number.
  stack = {
    name: jnp.asarray(layers, jnp.int32)[:, None] * jnp.ones((1, 2), jnp.int32)
    for name, layers in held.items()
  }
  kinds = []

  def block(carry, weights, layer, kind):
    kinds.append((kind, set(weights)))
    same = [jnp.all(value == layer) for value in weights.values()]
    return carry * 3 + layer, (layer * 10, jnp.stack(same).all())

  carry, (outs, same) = plan.scan_layers(
    config, block, jnp.int32(1), stack, unroll=unroll
  )
  expected = 1
  for layer in range(config.num_layers):
    expected = expected * 3 + layer
  assert int(carry) == expected
  np.testing.assert_array_equal(outs, 10 * np.arange(config.num_layers))
  assert np.asarray(same).all()
  for kind, names in kinds:
    assert ("router" in names) == kind.sparse
    assert ("gate" in names) != kind.sparse
  for layer in range(config.num_layers):
    mine, kind = plan.layer_weights(config, stack, layer)
    assert {int(x[0]) for x in mine.values()} == {layer}
    assert kind == Kind(config.rotates[layer], config.sparse[layer])


def test_parts_have_their_shapes_and_nothing_is_there_that_is_not_used():
  config = _config(5, dense="0,3")
  shapes = {
    name: part.shape for name, part in plan.parameter_plan(config, 11).items()
  }
  assert shapes["gate"] == (2, 4, 10)
  assert shapes["router"] == (3, 4, 3)
  assert shapes["expert_up"] == (3, 3, 4, 5)
  assert shapes["expert_down"] == (3, 3, 5, 4)
  assert shapes["query"] == (5, 4, 2, 6)
  assert not {"shared_up", "query_bias", "query_norm", "output"} & set(shapes)
  more = dataclasses.replace(
    config,
    shared_expert=True,
    dense_layers="",
    attention_bias=True,
    qk_norm="scaled",
    tied_head=False,
  )
  shapes = {
    name: part.shape for name, part in plan.parameter_plan(more, 11).items()
  }
  assert "gate" not in shapes
  assert shapes["shared_down"] == (5, 5, 4)
  assert shapes["key_bias"] == (5, 1, 6)
  assert shapes["query_norm"] == (5, 6)
  assert shapes["output"] == (11, 4)


def test_biases_start_at_zero_and_norms_at_one():
  config = ModelConfig(attention_bias=True, qk_norm="scaled")
  for name, part in plan.parameter_plan(config, 7).items():
    start = {"bias": 0.0, "norm": 1.0}.get(name.rpartition("_")[2])
    assert (part.deviation == 0.0) == (start is not None)
    assert part.mean == (start or 0.0)
