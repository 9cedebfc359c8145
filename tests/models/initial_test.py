"""Initial weights: the plan's shapes and spread, sharded from the start."""

import jax
import numpy as np

from scalerl_jax.models.initial import initial_weights
from scalerl_jax.models.plan import parameter_plan
from scalerl_jax.models.sharding import make_mesh, named_sharding
from tests.helpers import SHAPE, V


def test_weights_have_the_plans_shapes_spread_and_places():
  mesh = make_mesh(jax.devices()[:2], fsdp=2)
  found = initial_weights(SHAPE, V, jax.random.key(0), mesh)
  plan = parameter_plan(SHAPE, V)
  assert set(found) == set(plan)
  for name, part in plan.items():
    weight = found[name]
    assert weight.shape == part.shape
    assert weight.sharding == named_sharding(part.axes, part.shape, mesh)
    values = np.asarray(weight)
    if part.deviation:
      error = 5 * part.deviation / np.sqrt(2 * values.size)
      assert abs(values.std() - part.deviation) < error
    else:
      assert (values == part.mean).all()


def test_another_key_gives_other_weights():
  mesh = make_mesh()
  one, other = (
    initial_weights(SHAPE, V, jax.random.key(seed), mesh)["embedding"]
    for seed in (0, 1)
  )
  assert (np.asarray(one) != np.asarray(other)).any()
