"""What a run will need, told before anything is allocated: `--plan`.

Only closed forms and the devices' names; no array is made. The largest
micro-batch and slots are those whose bytes fit a device's memory.
"""

import dataclasses
from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from scalerl_jax.config import Config
from scalerl_jax.data.tasks import load_task
from scalerl_jax.learning.buckets import Bucket, layout
from scalerl_jax.models import pretrained
from scalerl_jax.run import memory
from scalerl_jax.run.accounting import generation_flops, learning_flops
from scalerl_jax.run.meshes import Meshes, make_meshes
from scalerl_jax.run.warm_start import resolved

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Plan:
  """Bytes are those of one device of the mesh."""

  meshes: Meshes
  parameters: int  # numbers, on all devices together
  learner: Mapping[str, int]  # bytes by name
  sampler: Mapping[str, int]
  replicated: tuple[str, ...]  # dimensions that no device shares
  rows: str  # a micro-batch in words
  slots: str
  generation_flops: float  # of one step, completions of full length
  training_flops: float
  device_bytes: int | None  # of a device's memory; None: not known
  largest_micro_batch: int  # 0: none fits; meaningless if memory is not known
  largest_slots: int

  @property
  def shared(self) -> bool:
    """Whether both roles are on the same devices."""
    return self.meshes.generator.devices.tolist() == (
      self.meshes.trainer.devices.tolist()
    )

  def lines(self) -> list[str]:
    """The plan as a person reads it."""
    told = [
      f"parameters: {self.parameters:,}",
      f"trainer: {_mesh(self.meshes.trainer)}; {self.rows}",
      *_table(self.learner),
      f"generator: {_mesh(self.meshes.generator)}; {self.slots}",
      *_table(self.sampler),
      f"FLOPs a step, completions of full length: generation"
      f" {self.generation_flops:.3g}, training {self.training_flops:.3g}",
    ]
    told += [f"not shared by devices: {line}" for line in self.replicated]
    if self.shared:
      total = sum(self.learner.values()) + sum(self.sampler.values())
      told.append(f"both roles share their devices: {_bytes(total)} each")
    if self.device_bytes is None:
      told.append(
        "memory of a device: not told by it; give --device_memory_gib for the"
        " largest micro-batch and slots"
      )
    else:
      told += [
        f"memory of a device: {_bytes(self.device_bytes)}",
        "largest batch.micro_batch that fits: "
        + _or_none(self.largest_micro_batch),
        f"largest sampler.slots that fit: {_or_none(self.largest_slots)}",
      ]
    return told


def make_plan(
  config: Config,
  meshes: Meshes,
  *,
  vocab_size: int,
  device_bytes: int | None,
) -> Plan:
  """The plan of a run.

  Args:
    config: with its checkpoint's architecture, if it has one.
    meshes: of both roles.
    vocab_size: V.
    device_bytes: memory of a device; None: not known.
  """
  tensor = meshes.trainer.shape["tensor"]
  vocab_size = -(-vocab_size // tensor) * tensor  # tables are filled up
  learner = _learner(config, meshes, vocab_size)
  sampler = _sampler(config, meshes, vocab_size)
  micro_batch = slots = 0
  if device_bytes is not None:
    shared = meshes.generator.devices.tolist() == (
      meshes.trainer.devices.tolist()
    )
    beside = sum(sampler.values()) if shared else 0
    micro_batch = _largest_micro_batch(
      config, meshes, vocab_size, device_bytes - beside
    )
    beside = sum(learner.values()) if shared else 0
    slots = _largest_slots(config, meshes, vocab_size, device_bytes - beside)
  tokens = config.batch.completions * config.sampler.max_completion_tokens
  chunk = config.loss.logprob_chunk
  return Plan(
    meshes=meshes,
    parameters=memory.parameter_count(config.model, vocab_size),
    learner=learner,
    sampler=sampler,
    replicated=memory.replicated_parameters(
      config.model, vocab_size, meshes.trainer
    ),
    rows=f"a micro-batch is {_shapes(config)},"
    f" {f'{chunk} tokens' if chunk else 'all'} with logits at a time",
    slots=f"{config.sampler.slots} slots x {_budget(config)} tokens",
    generation_flops=generation_flops(
      config.model,
      vocab_size=vocab_size,
      prompts=config.batch.prompts,
      prompt_tokens=config.sampler.max_prompt_tokens,
      completions=config.batch.completions,
      completion_tokens=tokens,
      context=_budget(config),
    ),
    training_flops=_training_flops(config, vocab_size),
    device_bytes=device_bytes,
    largest_micro_batch=micro_batch,
    largest_slots=slots,
  )


def plan_run(config: Config, device_gib: float = 0.0) -> Plan:
  """The plan of a config on the local devices.

  Of a checkpoint only `config.json` is read; otherwise the task says how large
  the vocabulary is.

  Args:
    config: the experiment.
    device_gib: memory of a device in GiB; 0: what the device tells.

  Raises:
    ValueError: as a run of this config would, for mesh, task and checkpoint.
  """
  if device_gib < 0:
    raise ValueError(
      f"--device_memory_gib must be 0 (ask the device) or more, got"
      f" {device_gib:g}"
    )
  asked, config = config.model, resolved(config)
  meshes = make_meshes(config)
  if asked.checkpoint:
    vocab_size = pretrained.vocabulary(asked)
  else:
    task = load_task(
      config.task,
      config.supervised,
      max_prompt_tokens=config.sampler.max_prompt_tokens,
    )
    vocab_size = task.tokenizer.vocab_size
  return make_plan(
    config,
    meshes,
    vocab_size=vocab_size,
    device_bytes=int(device_gib * GIB) if device_gib else device_memory(),
  )


def device_memory() -> int | None:
  """Bytes of the first device's memory, where it tells them."""
  stats = jax.local_devices()[0].memory_stats()
  return stats.get("bytes_limit") if stats else None


def _budget(config: Config) -> int:
  sampler = config.sampler
  return sampler.max_prompt_tokens + sampler.max_completion_tokens


def _buckets(config: Config) -> tuple[Bucket, ...]:
  batch, sampler = config.batch, config.sampler
  return layout(
    rows=batch.completions,
    prompt=sampler.max_prompt_tokens,
    completion=sampler.max_completion_tokens,
    micro_batch=batch.micro_batch,
    width_buckets=batch.width_buckets,
    packing=batch.packing,
    shared=batch.group_size if batch.share_prompts else 0,
  )


def _training_flops(config: Config, vocab_size: int) -> float:
  """Of a step in which every completion has full length, none packed."""
  rows = dataclasses.replace(config.batch, packing=0)
  bucket = _buckets(dataclasses.replace(config, batch=rows))[0]
  count = config.batch.completions // (bucket.rows * bucket.group_size)
  return learning_flops(
    config.model,
    vocab_size=vocab_size,
    tokens=count * bucket.tokens,
    keys=count * bucket.keys,
    logits=count * bucket.logits,
  )


def _shapes(config: Config) -> str:
  """The shapes of micro-batch, as words."""
  first, *others = _buckets(config)
  narrower = "".join(f" or {b.rows} x {b.width}" for b in others)
  if first.prompt:
    return (
      f"{first.rows} prompts x {first.prompt} tokens, with"
      f" {first.group_size} completions each x {first.width}{narrower}"
    )
  return f"{first.rows} rows x {first.width} tokens{narrower}"


def _learner(config: Config, meshes: Meshes, vocab_size: int) -> dict[str, int]:
  of_each = (
    memory.learner_bytes(
      config.model,
      config.loss,
      vocab_size=vocab_size,
      bucket=bucket,
      mesh=meshes.trainer,
    )
    for bucket in _buckets(config)
  )
  return max(of_each, key=lambda held: sum(held.values()))


def _sampler(config: Config, meshes: Meshes, vocab_size: int) -> dict[str, int]:
  return memory.sampler_bytes(
    config.model,
    config.sampler,
    group_size=config.batch.group_size,
    samples=config.evaluation.samples,
    vocab_size=vocab_size,
    mesh=meshes.generator,
  )


def _largest_micro_batch(
  config: Config, meshes: Meshes, vocab_size: int, room: int
) -> int:
  """The largest divisor of a step's completions that devices can share."""
  total = config.batch.completions
  ways = meshes.trainer.shape["data"] * meshes.trainer.shape["fsdp"]
  ways *= config.batch.group_size if config.batch.share_prompts else 1
  for size in range(total, 0, -1):
    if total % size or size % ways:
      continue
    batch = dataclasses.replace(config.batch, micro_batch=size)
    tried = dataclasses.replace(config, batch=batch)
    if sum(_learner(tried, meshes, vocab_size).values()) <= room:
      return size
  return 0


def _largest_slots(
  config: Config, meshes: Meshes, vocab_size: int, room: int
) -> int:
  """The most whole groups that devices can share, by halving."""
  ways = meshes.generator.shape["data"] * meshes.generator.shape["fsdp"]
  unit = config.batch.group_size * ways

  def fits(groups: int) -> bool:
    sampler = dataclasses.replace(config.sampler, slots=groups * unit)
    tried = dataclasses.replace(config, sampler=sampler)
    return sum(_sampler(tried, meshes, vocab_size).values()) <= room

  few = -(-config.evaluation.samples // unit)
  if not fits(few):
    return 0
  many = 2 * few
  while fits(many):
    few, many = many, 2 * many
  while many - few > 1:
    middle = (few + many) // 2
    few, many = (middle, many) if fits(middle) else (few, middle)
  return few * unit


def _mesh(mesh: Mesh) -> str:
  axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
  return f"{mesh.size} {mesh.devices.flat[0].platform} device(s), {axes}"


def _table(held: Mapping[str, int]) -> list[str]:
  rows = [*held.items(), ("together", sum(held.values()))]
  return [f"  {_bytes(size):>12}  {name}" for name, size in rows]


def _bytes(size: int) -> str:
  if size < GIB:
    return f"{size / 2**20:.1f} MiB"
  return f"{size / GIB:.2f} GiB"


def _or_none(count: int) -> str:
  return str(count) if count else "none"
