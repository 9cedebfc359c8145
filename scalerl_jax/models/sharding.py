"""Meshes and the one table that says which mesh axis holds which axis.

Auto-mode meshes only: arrays carry their sharding, XLA propagates it, and
activations are constrained at block boundaries.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import (
  AbstractMesh,
  AxisType,
  Mesh,
  NamedSharding,
  PartitionSpec,
)

AXES = ("data", "fsdp", "tensor", "expert")

# Logical axis -> mesh axis. An axis that is not here is replicated.
RULES: dict[str, str | tuple[str, ...]] = {
  "batch": ("data", "fsdp"),
  "embed": "fsdp",
  "vocab": "tensor",
  "heads": "tensor",
  "kv_heads": "tensor",
  "mlp": "tensor",
  "expert": "expert",
}


def make_mesh(
  devices: Sequence[jax.Device] | None = None,
  *,
  fsdp: int = 1,
  tensor: int = 1,
  expert: int = 1,
) -> Mesh:
  """A mesh with all four axes over `devices`; `data` takes what is left.

  Args:
    devices: local devices, the first one only by default.
    fsdp: devices that share parameters and optimiser state.
    tensor: devices that share each weight matrix.
    expert: devices that share the experts of a layer.

  Raises:
    ValueError: `fsdp * tensor * expert` does not divide the devices.
  """
  devices = jax.local_devices()[:1] if devices is None else devices
  data, rest = divmod(len(devices), fsdp * tensor * expert)
  if rest or not data:
    experts = f" x expert ({expert})" if expert != 1 else ""
    raise ValueError(
      f"fsdp ({fsdp}) x tensor ({tensor}){experts} must divide the"
      f" {len(devices)} devices of the mesh; lower one of them"
    )
  return Mesh(
    np.asarray(devices).reshape(data, fsdp, tensor, expert),
    AXES,
    axis_types=(AxisType.Auto,) * len(AXES),
  )


def partition_spec(
  logical: Sequence[str | None], shape: Sequence[int], mesh: Mesh | AbstractMesh
) -> PartitionSpec:
  """The spec of an array; axes that the mesh does not divide are replicated.

  >>> spec = partition_spec(("embed", None), (6, 10), make_mesh())
  >>> tuple(spec)
  ('fsdp', None)
  """
  spec = []
  for name, size in zip(logical, shape, strict=True):
    axes = RULES.get(name) if name else None
    names = (axes,) if isinstance(axes, str) else axes or ()
    ways = int(np.prod([mesh.shape[axis] for axis in names]))
    spec.append(axes if size % ways == 0 else None)
  return PartitionSpec(*spec)


def named_sharding(
  logical: Sequence[str | None], shape: Sequence[int], mesh: Mesh
) -> NamedSharding:
  """`partition_spec` on its mesh."""
  return NamedSharding(mesh, partition_spec(logical, shape, mesh))


def replicated(mesh: Mesh) -> NamedSharding:
  """A full copy on each device of the mesh."""
  return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, size: int) -> NamedSharding:
  """Leading axis of length `size` over the batch axes of the mesh."""
  return NamedSharding(mesh, partition_spec(("batch",), (size,), mesh))


def constrain(x: jax.Array, logical: Sequence[str | None]) -> jax.Array:
  """`x` constrained to the rules on the mesh in context; no mesh, no change."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return x
  spec = partition_spec(logical, x.shape, mesh)
  return jax.lax.with_sharding_constraint(x, spec)


def check_heads(num_heads: int, num_kv_heads: int, tensor: int) -> None:
  """Refuses a mesh that would cut a head.

  Raises:
    ValueError: `tensor` does not divide the query or the key/value heads.
  """
  for name, heads in (
    ("query heads", num_heads),
    ("key/value heads", num_kv_heads),
  ):
    if heads % tensor:
      raise ValueError(
        f"pipeline.tensor ({tensor}) must divide the {heads} {name} of the"
        " policy; lower it"
      )


def check_experts(num_experts: int, expert: int) -> None:
  """Refuses a mesh that would share experts unevenly.

  Raises:
    ValueError: `expert` does not divide the experts.
  """
  if num_experts % expert:
    raise ValueError(
      f"pipeline.expert ({expert}) must divide the {num_experts} experts of the"
      " policy; lower it"
    )


def spec_of(x: jax.Array) -> PartitionSpec:
  """The spec of an array; of one without a mesh, that of a whole copy."""
  return getattr(x.sharding, "spec", PartitionSpec())


def shardings_on(mesh: Mesh, tree: Any) -> Any:
  """Shardings of the same arrays on another mesh with the same axes.

  What an array's own spec asks for, less the axes that do not divide there.
  """

  def one(x: jax.Array) -> NamedSharding:
    spec = spec_of(x)
    kept = []
    for axes, size in zip(spec, x.shape, strict=False):
      names = (axes,) if isinstance(axes, str) else axes or ()
      ways = int(np.prod([mesh.shape[axis] for axis in names]))
      kept.append(axes if size % ways == 0 else None)
    return NamedSharding(mesh, PartitionSpec(*kept))

  return jax.tree.map(one, tree)
