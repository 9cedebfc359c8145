"""Where each parameter of a policy lies in a published checkpoint.

Published linear layers are `[out, in]` and one tensor a layer; ours are
`[in, out]` with heads apart and layers stacked.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from scalerl_jax.config import ModelConfig
from scalerl_jax.models.config import family
from scalerl_jax.models.plan import parameter_plan, stack_layers

LAYER = "model.layers.{layer}."


class Stored(NamedTuple):
  """One kind of published tensor.

  `groups` says which of our axes each published one holds, outer axis first;
  axes that a name in `template` stands for (layer, expert) are left out.
  """

  template: str
  groups: tuple[tuple[int, ...], ...]
  part: int = 0  # of `parts` side by side on the last published axis
  parts: int = 1
  interleaved: bool = False  # the two of a rotary pair stand side by side


VECTOR, IDENTITY = ((0,),), ((0,), (1,))
LINEAR, STACKED = ((1,), (0,)), ((0,), (1,), (2,))
INTO_HEADS, FROM_HEADS = ((1, 2), (0,)), ((2,), (0, 1))


def stored(config: ModelConfig) -> dict[str, Stored]:
  """The published place of each parameter, by its name in the plan.

  Raises:
    ValueError: no published family is like this policy.

  >>> stored(ModelConfig())["gate"].template
  'model.layers.{layer}.mlp.gate_proj.weight'
  """
  llama4 = family(config) == "llama4_text"
  attention = f"{LAYER}self_attn."
  mlp = LAYER + ("feed_forward." if llama4 else "mlp.")
  places = {
    "embedding": Stored("model.embed_tokens.weight", IDENTITY),
    "output": Stored("lm_head.weight", IDENTITY),
    "final_norm": Stored("model.norm.weight", VECTOR),
    "attention_norm": Stored(f"{LAYER}input_layernorm.weight", VECTOR),
    "mlp_norm": Stored(f"{LAYER}post_attention_layernorm.weight", VECTOR),
    "out": Stored(f"{attention}o_proj.weight", FROM_HEADS),
  }
  for name in ("query", "key", "value"):
    letter = f"{attention}{name[0]}"
    places |= {
      name: Stored(
        f"{letter}_proj.weight",
        INTO_HEADS,
        interleaved=llama4 and name != "value",
      ),
      f"{name}_bias": Stored(f"{letter}_proj.bias", ((0, 1),)),
      f"{name}_norm": Stored(f"{letter}_norm.weight", VECTOR),
    }
  for name in ("gate", "up", "down"):
    shared = f"{mlp}shared_expert.{name}_proj.weight"
    places |= {
      name: Stored(f"{mlp}{name}_proj.weight", LINEAR),
      f"shared_{name}": Stored(shared, LINEAR),
      f"expert_{name}": Stored(
        f"{mlp}experts.{{expert}}.{name}_proj.weight", LINEAR
      ),
    }
  router = "router" if llama4 else "gate"
  places["router"] = Stored(f"{mlp}{router}.weight", LINEAR)
  if llama4:
    joined = Stored(f"{mlp}experts.gate_up_proj", STACKED, 0, 2)
    places |= {
      "expert_gate": joined,
      "expert_up": joined._replace(part=1),
      "expert_down": Stored(f"{mlp}experts.down_proj", STACKED),
    }
  return {name: places[name] for name in parameter_plan(config, 1)}


def tensors(
  config: ModelConfig, name: str, place: Stored
) -> Iterator[tuple[tuple[int, ...], str]]:
  """Leading index into our stack, and the name of the tensor that it is."""
  layers: tuple[Any, ...] = (None,)
  if "{layer}" in place.template:
    layers = stack_layers(config, name)
  for at, layer in enumerate(layers):
    index = () if layer is None else (at,)
    if "{expert}" not in place.template:
      yield index, place.template.format(layer=layer)
      continue
    for expert in range(config.num_experts):
      tensor = place.template.format(layer=layer, expert=expert)
      yield (*index, expert), tensor


def published_shapes(
  config: ModelConfig, vocab_size: int
) -> dict[str, tuple[int, ...]]:
  """Every tensor that a published checkpoint of this policy holds."""
  plan, shapes = parameter_plan(config, vocab_size), {}
  for name, place in stored(config).items():
    for index, tensor in tensors(config, name, place):
      inner = plan[name].shape[len(index) :]
      shape = [
        int(np.prod([inner[axis] for axis in group])) for group in place.groups
      ]
      shape[-1] *= place.parts
      shapes[tensor] = tuple(shape)
  return shapes


def read_part(
  read: Callable[[tuple[slice, ...]], np.ndarray],
  place: Stored,
  shape: tuple[int, ...],
  wanted: tuple[slice, ...],
) -> np.ndarray:
  """The wanted part of one of our arrays, from a published tensor.

  Args:
    read: gives a rectangle of the published tensor.
    place: where it lies.
    shape: of our whole array, axes that the name stands for left out.
    wanted: a slice for each axis, without steps.
  """
  spans = [
    part.indices(size)[:2] for part, size in zip(wanted, shape, strict=True)
  ]
  rectangle, sizes = [], []
  for number, group in enumerate(place.groups):
    outer, inner = group[0], int(np.prod([shape[a] for a in group[1:]]))
    start, stop = (edge * inner for edge in spans[outer])
    if number == len(place.groups) - 1 and place.parts > 1:
      whole = shape[outer] * inner
      start, stop = start + place.part * whole, stop + place.part * whole
    rectangle.append(slice(start, stop))
    sizes += [spans[outer][1] - spans[outer][0], *(shape[a] for a in group[1:])]
  values = read(tuple(rectangle)).reshape(sizes)
  ours = [axis for group in place.groups for axis in group]
  values = values.transpose(np.argsort(ours))
  if place.interleaved:
    values = np.concatenate([values[..., 0::2], values[..., 1::2]], axis=-1)
  inner_spans = tuple(
    slice(*span)
    if axis in {a for g in place.groups for a in g[1:]}
    else slice(None)
    for axis, span in enumerate(spans)
  )
  return values[inner_spans]


def to_published(values: np.ndarray, place: Stored) -> np.ndarray:
  """One of our arrays as its part of a published tensor.

  Args:
    values: axes that the name stands for left out.
    place: where it goes.
  """
  if place.interleaved:
    low, high = np.split(values, 2, axis=-1)
    values = np.stack([low, high], axis=-1).reshape(values.shape)
  shape = [
    int(np.prod([values.shape[axis] for axis in group]))
    for group in place.groups
  ]
  ours = [axis for group in place.groups for axis in group]
  return np.ascontiguousarray(values.transpose(ours).reshape(shape))
