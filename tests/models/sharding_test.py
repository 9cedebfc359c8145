"""Meshes and the table of axes: who holds which piece of an array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from scalerl_jax.models import sharding


def _mesh():
  """Eight devices: data 2, fsdp 2, tensor 2."""
  return sharding.make_mesh(jax.devices()[:8], fsdp=2, tensor=2)


def _piece(array):
  """Shape of what one device holds."""
  (shape,) = {shard.data.shape for shard in array.addressable_shards}
  return shape


def test_data_takes_the_devices_that_are_left():
  for fsdp, tensor, data in ((1, 1, 8), (2, 1, 4), (1, 4, 2), (2, 2, 2)):
    mesh = sharding.make_mesh(jax.devices()[:8], fsdp=fsdp, tensor=tensor)
    assert dict(mesh.shape) == {
      "data": data,
      "fsdp": fsdp,
      "tensor": tensor,
      "expert": 1,
    }
    assert list(mesh.devices.flat) == jax.devices()[:8]


def test_a_mesh_is_one_device_by_default_and_auto():
  mesh = sharding.make_mesh()
  assert list(mesh.devices.flat) == jax.local_devices()[:1]
  assert mesh.axis_names == sharding.AXES
  assert mesh.axis_types == (AxisType.Auto,) * 4


@pytest.mark.parametrize(("fsdp", "tensor"), [(3, 1), (1, 5), (16, 1), (3, 2)])
def test_axes_that_do_not_divide_the_devices_are_refused(fsdp, tensor):
  with pytest.raises(
    ValueError, match=rf"fsdp \({fsdp}\) x tensor \({tensor}\) must divide"
  ):
    sharding.make_mesh(jax.devices()[:8], fsdp=fsdp, tensor=tensor)


def test_axes_are_cut_by_the_table_or_replicated_where_they_do_not_divide():
  mesh = _mesh()
  for logical, shape, spec in (
    (("vocab", "embed"), (6, 10), ("tensor", "fsdp")),
    (("vocab", "embed"), (7, 10), (None, "fsdp")),
    (("embed", "heads", None), (5, 4, 6), (None, "tensor", None)),
    (("layers", "mlp", "embed"), (2, 20, 16), (None, "tensor", "fsdp")),
    (("batch", None), (12, 3), (("data", "fsdp"), None)),
    (("batch", None), (6, 3), (None, None)),
    (("kv_heads", "nobody's"), (2, 8), ("tensor", None)),
  ):
    assert tuple(sharding.partition_spec(logical, shape, mesh)) == spec


def test_a_spec_needs_a_name_for_each_axis():
  with pytest.raises(ValueError, match="zip"):
    sharding.partition_spec(("embed",), (4, 6), _mesh())


def test_named_sharding_leaves_each_device_its_piece():
  x = np.arange(2 * 12 * 10.0).reshape(2, 12, 10)
  named = sharding.named_sharding(
    ("layers", "heads", "embed"), x.shape, _mesh()
  )
  placed = jax.device_put(x, named)
  assert _piece(placed) == (2, 6, 5)
  np.testing.assert_array_equal(placed, x)


def test_batch_is_cut_over_data_and_fsdp_and_replicated_is_not():
  mesh = _mesh()
  x = np.ones((12, 3))
  assert _piece(jax.device_put(x, sharding.batch_sharding(mesh, 12))) == (3, 3)
  assert _piece(jax.device_put(x, sharding.replicated(mesh))) == (12, 3)


def test_a_constraint_without_a_mesh_changes_nothing():
  x = jnp.ones((4, 3))
  assert sharding.constrain(x, ("batch", None)) is x
  with jax.set_mesh(sharding.make_mesh()):
    assert sharding.constrain(x, ("batch", None)) is x


def test_a_constraint_cuts_activations_by_the_table():
  with jax.set_mesh(_mesh()):
    cut = jax.jit(lambda x: sharding.constrain(2.0 * x, ("batch", None)))
    assert _piece(cut(jnp.ones((12, 3)))) == (3, 3)
    assert _piece(cut(jnp.ones((6, 3)))) == (6, 3)


@pytest.mark.parametrize(
  ("heads", "kv_heads", "tensor", "named"),
  [(6, 6, 4, "6 query heads"), (8, 2, 4, "2 key/value heads")],
)
def test_a_mesh_that_would_cut_a_head_is_refused(
  heads, kv_heads, tensor, named
):
  with pytest.raises(
    ValueError, match=rf"pipeline.tensor \({tensor}\) must divide the {named}"
  ):
    sharding.check_heads(heads, kv_heads, tensor)


def test_experts_are_cut_over_their_axis_and_never_unevenly():
  mesh = sharding.make_mesh(jax.devices()[:6], fsdp=2, expert=3)
  assert dict(mesh.shape) == {"data": 1, "fsdp": 2, "tensor": 1, "expert": 3}
  spec = sharding.partition_spec(("expert", "embed", "mlp"), (6, 4, 5), mesh)
  assert tuple(spec) == ("expert", "fsdp", "tensor")
  sharding.check_experts(6, 3)
  sharding.check_experts(0, 3)  # a dense policy
  with pytest.raises(ValueError, match=r"expert \(3\) must divide the 8 exp"):
    sharding.check_experts(8, 3)
  with pytest.raises(ValueError, match=r"tensor \(1\) x expert \(4\) must"):
    sharding.make_mesh(jax.devices()[:6], expert=4)


def test_spec_of_an_array_without_a_mesh_is_that_of_a_copy():
  assert sharding.spec_of(jnp.ones(3)) == PartitionSpec()
  array = jax.device_put(
    np.ones((6, 12)), sharding.named_sharding(("vocab", None), (6, 12), _mesh())
  )
  assert sharding.spec_of(array) == PartitionSpec("tensor", None)


def test_a_mesh_that_divides_the_heads_is_accepted():
  sharding.check_heads(8, 4, 4)
  sharding.check_heads(6, 3, 3)
  sharding.check_heads(5, 1, 1)


def test_the_same_arrays_keep_their_cuts_on_another_mesh_where_it_divides():
  logical = ("vocab", "embed")
  tree = {
    "even": jax.device_put(
      np.ones((6, 12)), sharding.named_sharding(logical, (6, 12), _mesh())
    ),
    "odd": jax.device_put(
      np.ones((4, 6)), sharding.named_sharding(logical, (4, 6), _mesh())
    ),
    "scalar": jax.device_put(np.float32(1.0), sharding.replicated(_mesh())),
    "alone": jnp.ones((4, 2)),
  }
  other = sharding.make_mesh(jax.devices()[:6], fsdp=1, tensor=3)
  placed = jax.device_put(tree, sharding.shardings_on(other, tree))
  assert {name: _piece(array) for name, array in placed.items()} == {
    "even": (2, 12),  # fsdp is 1 there
    "odd": (4, 6),
    "scalar": (),
    "alone": (4, 2),
  }
  for array in placed.values():
    assert len(array.addressable_shards) == 6
