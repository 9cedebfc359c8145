"""Bytes a device in closed form: what a learner and a sampler hold at most.

For the plan, before anything is allocated. Within a quarter of what XLA says
of the train step; a compiler that keeps less or more may differ.
"""

import numpy as np
from jax.sharding import Mesh

from scalerl_jax.config import (
  Config,
  LossConfig,
  ModelConfig,
  SamplerConfig,
)
from scalerl_jax.learning.buckets import Bucket
from scalerl_jax.models.generator import generator_model, weight_dtype
from scalerl_jax.models.plan import parameter_plan
from scalerl_jax.models.policy import UNROLL_LAYERS
from scalerl_jax.models.sharding import RULES, partition_spec
from scalerl_jax.sampling.entering import PROMPTS
from scalerl_jax.sampling.occupancy import slot_shards
from scalerl_jax.sampling.rings import NARROWEST

FLOAT = 4  # bytes of a float32
MOMENTS = 2  # AdamW's
# Floats that the backward pass keeps of a layer and token, as multiples of D,
# F, H·keys, H·Dh and K·Dh: inputs of products, of norms and of silu. Counted
# from XLA's buffers; a scan keeps whole what unrolled layers compute again in a
# fusion.
UNROLLED = (8, 5, 1, 3, 2)
SCANNED = (9, 6, 2, 3, 2)
LOGIT_COPIES = 3  # logits, their exponentials, and their gradient


def per_device(
  shape: tuple[int, ...], axes: tuple[str | None, ...], mesh: Mesh
) -> int:
  """Numbers of an array that one device of the mesh holds."""
  ways = 1
  for axis in partition_spec(axes, shape, mesh):
    names = (axis,) if isinstance(axis, str) else axis or ()
    ways *= int(np.prod([mesh.shape[name] for name in names]))
  return int(np.prod(shape)) // ways


def parameter_count(model: ModelConfig, vocab_size: int) -> int:
  """Numbers in all parameters together."""
  plan = parameter_plan(model, vocab_size).values()
  return sum(int(np.prod(parameter.shape)) for parameter in plan)


def parameter_bytes(model: ModelConfig, vocab_size: int, mesh: Mesh) -> int:
  """Parameters that one device holds, in float32."""
  return FLOAT * sum(
    per_device(parameter.shape, parameter.axes, mesh)
    for parameter in parameter_plan(model, vocab_size).values()
  )


def published_bytes(
  model: ModelConfig, sampler: SamplerConfig, vocab_size: int, mesh: Mesh
) -> int:
  """One version of the weights that a device of the generator mesh holds."""
  return sum(
    weight_dtype(name, model, sampler).itemsize
    * per_device(parameter.shape, parameter.axes, mesh)
    for name, parameter in parameter_plan(model, vocab_size).items()
  )


def replicated_parameters(
  model: ModelConfig, vocab_size: int, mesh: Mesh
) -> tuple[str, ...]:
  """Parameters with a dimension that its mesh axis does not divide.

  Returns:
    Lines as "embedding: vocab 97 on tensor 2".
  """
  found = []
  for name, parameter in parameter_plan(model, vocab_size).items():
    spec = partition_spec(parameter.axes, parameter.shape, mesh)
    for axis, size, cut in zip(
      parameter.axes, parameter.shape, spec, strict=True
    ):
      held = RULES.get(axis) if axis else None
      if isinstance(held, str) and cut is None:
        found.append(f"{name}: {axis} {size} on {held} {mesh.shape[held]}")
  return tuple(found)


def layer_floats(
  model: ModelConfig, keys: float, *, tensor: int, sparse: bool
) -> float:
  """Floats a token that the backward pass of one layer needs.

  Args:
    model: the architecture.
    keys: that a token is multiplied with; attention keeps a weight for each,
      of each head.
    tensor: devices that share heads and MLPs.
    sparse: the layer has experts; a token goes through few of them.
  """
  scanned = model.num_layers > UNROLL_LAYERS
  width, mlp, weights, heads, kv_heads = SCANNED if scanned else UNROLLED
  inner = model.mlp_width
  if sparse:
    chosen = model.experts_per_token + model.shared_expert
    inner = chosen * model.expert_width + model.experts_per_token * model.width
  shared = (
    mlp * inner
    + weights * model.num_heads * keys
    + heads * model.num_heads * model.head_width
    + kv_heads * model.num_kv_heads * model.head_width
  )
  return width * model.width + shared / tensor


def learner_bytes(
  model: ModelConfig,
  loss: LossConfig,
  *,
  vocab_size: int,
  bucket: Bucket,
  mesh: Mesh,
) -> dict[str, int]:
  """What a device of the trainer mesh holds during an update, by name.

  Args:
    model: the architecture.
    loss: says how many tokens have logits at a time.
    vocab_size: V.
    bucket: the largest micro-batch; it has activations at a time.
    mesh: the trainer mesh.
  """
  parameters = parameter_bytes(model, vocab_size, mesh)
  tensor = mesh.shape["tensor"]
  ways = mesh.shape["data"] * mesh.shape["fsdp"]
  tokens, keys = bucket.tokens // ways, bucket.keys / bucket.tokens
  layers = [
    layer_floats(model, keys, tensor=tensor, sparse=sparse) * tokens
    for sparse in model.sparse
  ]
  scored = bucket.logits // ways
  scored = min(loss.logprob_chunk or scored, scored)
  logits = LOGIT_COPIES * scored * -(-vocab_size // tensor)
  # Few layers are unrolled, and XLA then keeps them whatever was asked for.
  if model.remat == "block" and model.num_layers > UNROLL_LAYERS:
    item = 2 if model.dtype == "bfloat16" else FLOAT
    kept = model.num_layers * tokens * model.width * item // FLOAT
    # One layer's at a time, when the logits are gone.
    activations, logits = kept, max(logits, max(layers))
    name = "logits, or a layer computed again"
  else:
    activations, name = sum(layers), "logits"
  held = {
    "parameters": parameters,
    "optimiser": MOMENTS * parameters,
    "gradients": 2 * parameters,  # their sum, and a micro-batch's own
    "activations": int(FLOAT * activations),
    name: int(FLOAT * logits),
  }
  if mesh.shape["fsdp"] > 1:
    # A layer's weights and the table, whole while they are used.
    plan = parameter_plan(model, vocab_size)
    whole = sum(int(np.prod(p.shape)) for p in plan.values())
    table = int(np.prod(plan["embedding"].shape))
    layer = (whole - table) // model.num_layers
    held["gathered weights"] = FLOAT * (table + layer) // tensor
  return held


def cache_bytes(
  model: ModelConfig, sampler: SamplerConfig, *, group_size: int, mesh: Mesh
) -> tuple[int, int]:
  """KV of a device of the generator mesh: at rest, and what a move adds.

  A prompt's keys and values are shared by its group, for twice as many prompts
  as groups fit; each slot has a ring of its completion's. When rings are made
  wider, the old ones are there beside the new ones for a moment.
  """
  held = sampler.kv_dtype or generator_model(model, sampler).dtype
  item = 2 if held == "bfloat16" else FLOAT
  heads = model.num_kv_heads // mesh.shape["tensor"]
  column = 2 * model.num_layers * heads * model.head_width * item
  slots = sampler.slots // (mesh.shape["data"] * mesh.shape["fsdp"])
  shards = slot_shards(mesh, sampler.slots, group_size)
  full = shards * (sampler.slots // shards // group_size)
  # Prompts stay with their slots where these are kept apart.
  places = min(sampler.slots, 2 * full) // shards
  completion = column * slots * sampler.max_completion_tokens
  one_ring = sampler.max_completion_tokens < 2 * NARROWEST
  return (
    column * places * sampler.max_prompt_tokens + completion,
    0 if one_ring else completion,
  )


def sampler_bytes(
  model: ModelConfig,
  sampler: SamplerConfig,
  *,
  group_size: int,
  samples: int,
  vocab_size: int,
  mesh: Mesh,
) -> dict[str, int]:
  """What a device of the generator mesh holds while a chunk is decoded.

  Args:
    model: the architecture.
    sampler: slots and budgets.
    group_size: G.
    samples: completions a held-out prompt: evaluations have slots of their own.
    vocab_size: V.
    mesh: the generator mesh.
  """
  rest, moved = cache_bytes(model, sampler, group_size=group_size, mesh=mesh)
  held, _ = cache_bytes(model, sampler, group_size=samples, mesh=mesh)
  ways = mesh.shape["data"] * mesh.shape["fsdp"]
  tensor = mesh.shape["tensor"]
  logits = sampler.slots // ways * -(-vocab_size // tensor)
  prompt = sampler.max_prompt_tokens
  # The prompts of an insertion, each with its whole budget.
  entering = min(-(-sampler.slots // group_size), PROMPTS[-1])
  tokens = -(-entering // ways) * prompt
  widest = max(
    layer_floats(model, prompt, tensor=tensor, sparse=sparse)
    for sparse in model.sparse
  )
  return {
    # The running version and, at a publication, the next one.
    "weights": 2 * published_bytes(model, sampler, vocab_size, mesh),
    "KV cache": rest,
    "rings that are made wider, or a prefill": max(
      moved, int(FLOAT * tokens * widest)
    ),
    "KV cache of evaluations": held,
    "logits": FLOAT * LOGIT_COPIES * logits,
  }


def out_of_memory(error: Exception, config: Config) -> str | None:
  """One sentence for an error that is a device out of memory; None for others.

  Args:
    error: as JAX raises it.
    config: whose settings are named with their values.
  """
  text = str(error)
  if "RESOURCE_EXHAUSTED" not in text:
    return None
  chunk = config.loss.logprob_chunk
  halved = (
    f"set loss.logprob_chunk lower ({chunk})"
    if chunk
    else ("set loss.logprob_chunk (0: all logits at once)")
  )
  where = text.splitlines()[0].partition("RESOURCE_EXHAUSTED: ")[2]
  return (
    f"a device is out of memory ({where or 'it says no more'}); lower"
    f" batch.micro_batch ({config.batch.micro_batch}) or sampler.slots"
    f" ({config.sampler.slots}), {halved} or model.remat to 'block'; --plan"
    " says what fits"
  )
