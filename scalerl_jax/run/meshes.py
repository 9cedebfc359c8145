"""Which devices sample and which devices learn."""

from typing import NamedTuple

import jax
from jax.sharding import Mesh

from scalerl_jax.config import Config
from scalerl_jax.models.attention import check_kernel
from scalerl_jax.models.sharding import (
  check_experts,
  check_heads,
  make_mesh,
)


class Meshes(NamedTuple):
  """Disjoint sub-meshes when there are two devices or more, else the same."""

  generator: Mesh
  trainer: Mesh

  @property
  def devices(self) -> int:
    """Devices that the run holds."""
    held = {*self.generator.devices.flat, *self.trainer.devices.flat}
    return len(held)


def make_meshes(config: Config) -> Meshes:
  """The generator and trainer meshes over the local devices.

  On a CPU a role stays on as few devices as its sharding needs: two
  multi-device programs of one process never overlap there.

  Raises:
    ValueError: too few devices, heads, experts, slots or micro-batch rows
      that the devices do not divide, or an attention that they do not have.
  """
  pipeline = config.pipeline
  devices = jax.local_devices()
  on_cpu = devices[0].platform == "cpu"
  check_heads(
    config.model.num_heads, config.model.num_kv_heads, pipeline.tensor
  )
  check_experts(config.model.num_experts, pipeline.expert)
  check_kernel(config.model, devices[0].platform)
  if pipeline.expert > 1 and not config.model.num_experts:
    raise ValueError(
      "pipeline.expert must be 1 for a policy without experts, got"
      f" {pipeline.expert}"
    )
  if len(devices) == 1 and not pipeline.generator_devices:
    generator = trainer = devices
  else:
    needed = pipeline.tensor * pipeline.expert
    default = needed if on_cpu else len(devices) // 2
    count = pipeline.generator_devices or default
    if not 0 < count < len(devices):
      raise ValueError(
        "pipeline.generator_devices must leave a device to the trainer mesh:"
        f" got {count} of {len(devices)}"
      )
    generator, trainer = devices[:count], devices[count:]
    if on_cpu:
      trainer = trainer[: pipeline.fsdp * needed]
  shared = {"tensor": pipeline.tensor, "expert": pipeline.expert}
  meshes = Meshes(
    generator=make_mesh(generator, **shared),
    trainer=make_mesh(trainer, fsdp=pipeline.fsdp, **shared),
  )
  batch = config.batch
  divided = [
    ("sampler.slots", config.sampler.slots, meshes.generator),
    ("batch.micro_batch", batch.micro_batch, meshes.trainer),
  ]
  if batch.share_prompts:
    name = f"batch.micro_batch / batch.group_size ({batch.group_size})"
    groups = batch.micro_batch // batch.group_size
    divided.append((name, groups, meshes.trainer))
  for name, rows, mesh in divided:
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    if rows % ways:
      raise ValueError(
        f"{name} must be divisible by the {ways} devices that share it, got"
        f" {rows}"
      )
  return meshes
