"""Which parameters a policy has, and how its layers are scanned.

Parameters of one kind are stacked: attention and norms over all layers, the
MLP over dense layers, experts over sparse ones.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from scalerl_jax.config import ModelConfig

# Stacks that do not have all layers.
DENSE = ("gate", "up", "down")
SPARSE = (
  *("router", "expert_gate", "expert_up", "expert_down"),
  *("shared_gate", "shared_up", "shared_down"),
)


class Parameter(NamedTuple):
  """Shape, logical axes and how the initial values are drawn."""

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  deviation: float  # 0: all of them are `mean`
  mean: float = 0.0


class Kind(NamedTuple):
  """What one layer computes that another may not."""

  rotates: bool  # and sees its chunk only, where there are chunks
  sparse: bool  # experts in place of the MLP


class Segment(NamedTuple):
  """Layers `first .. first + len(kinds)·repeats − 1`, a repeated pattern."""

  first: int
  kinds: tuple[Kind, ...]
  repeats: int


def parameter_plan(
  config: ModelConfig, vocab_size: int
) -> dict[str, Parameter]:
  """Each parameter of a policy by its name; layers are stacked `[L, ...]`."""
  depth, width, mlp = config.num_layers, config.width, config.mlp_width
  heads, kv_heads = config.num_heads, config.num_kv_heads
  head_width = config.head_width
  inward = width**-0.5
  # Outputs into the residual stream start smaller, the deeper the model.
  residual = (2.0 * depth) ** -0.5

  def projection(count: int, name: str) -> Parameter:
    shape = (depth, width, count, head_width)
    return Parameter(shape, ("layers", "embed", name, None), inward)

  def bias(count: int, name: str) -> Parameter:
    return Parameter((depth, count, head_width), ("layers", name, None), 0.0)

  table = Parameter((vocab_size, width), ("vocab", "embed"), inward)
  norm = Parameter((depth, width), ("layers", "embed"), 0.0, 1.0)
  plan = {
    "embedding": table,
    "final_norm": Parameter((width,), ("embed",), 0.0, 1.0),
    "attention_norm": norm,
    "query": projection(heads, "heads"),
    "key": projection(kv_heads, "kv_heads"),
    "value": projection(kv_heads, "kv_heads"),
    "out": Parameter(
      (depth, heads, head_width, width),
      ("layers", "heads", None, "embed"),
      residual * (heads * head_width) ** -0.5,
    ),
    "mlp_norm": norm,
  }
  dense = depth - sum(config.sparse)
  if dense:
    plan |= _mlp("", dense, width, mlp, residual)
  if dense < depth:
    plan |= _experts(config, residual)
  if config.attention_bias:
    plan["query_bias"] = bias(heads, "heads")
    plan["key_bias"] = bias(kv_heads, "kv_heads")
    plan["value_bias"] = bias(kv_heads, "kv_heads")
  if config.qk_norm == "scaled":
    scale = Parameter((depth, head_width), ("layers", None), 0.0, 1.0)
    plan |= {"query_norm": scale, "key_norm": scale}
  return plan if config.tied_head else {**plan, "output": table}


def _mlp(
  prefix: str, depth: int, width: int, mlp: int, residual: float
) -> dict[str, Parameter]:
  up = Parameter((depth, width, mlp), ("layers", "embed", "mlp"), width**-0.5)
  down = Parameter(
    (depth, mlp, width), ("layers", "mlp", "embed"), residual * mlp**-0.5
  )
  return {f"{prefix}gate": up, f"{prefix}up": up, f"{prefix}down": down}


def _experts(config: ModelConfig, residual: float) -> dict[str, Parameter]:
  depth, width = sum(config.sparse), config.width
  count, mlp = config.num_experts, config.expert_width
  router = (depth, width, count), ("layers", "embed", None)
  plan = {"router": Parameter(*router, width**-0.5)}
  for name, part in _mlp("expert_", depth, width, mlp, residual).items():
    plan[name] = part._replace(
      shape=(depth, count, *part.shape[1:]),
      axes=("layers", "expert", *part.axes[1:]),
    )
  if config.shared_expert:
    plan |= _mlp("shared_", depth, width, mlp, residual)
  return plan


def stack_layers(config: ModelConfig, name: str) -> tuple[int, ...]:
  """The layers that the stack of this name holds, in order.

  >>> config = ModelConfig(num_experts=3, expert_width=5, dense_layers="0")
  >>> stack_layers(config, "router"), stack_layers(config, "query")
  ((1,), (0, 1))
  """
  return tuple(
    layer
    for layer, sparse in enumerate(config.sparse)
    if name not in (DENSE if sparse else SPARSE)
  )


def segments(config: ModelConfig) -> tuple[Segment, ...]:
  """All layers as runs of repeated patterns, the longest first come first.

  >>> [(s.first, len(s.kinds), s.repeats) for s in segments(ModelConfig())]
  [(0, 1, 2)]
  """
  kinds = tuple(map(Kind, config.rotates, config.sparse))
  found, first = [], 0
  while first < len(kinds):
    best = Segment(first, kinds[first : first + 1], 1)
    for period in range(1, (len(kinds) - first) // 2 + 1):
      pattern = kinds[first : first + period]
      repeats = 1
      while kinds[first + period * repeats :][:period] == pattern:
        repeats += 1
      if repeats > 1 and repeats * period > len(best.kinds) * best.repeats:
        best = Segment(first, pattern, repeats)
    found.append(best)
    first += len(best.kinds) * best.repeats
  return tuple(found)


def scan_layers(
  config: ModelConfig,
  block: Callable[[Any, dict[str, Array], Any, Kind], tuple[Any, Any]],
  carry: Any,
  stack: dict[str, Array],
  *,
  unroll: bool = False,
) -> tuple[Any, Any]:
  """Runs all layers in order: a scan over each segment's repeats.

  Args:
    config: the architecture.
    block: (carry, weights, layer, kind) -> (carry, out); the layer's number is
      traced, its kind static.
    carry: before the first layer.
    stack: weights by name, stacked as in `parameter_plan`.
    unroll: inline the scans.

  Returns:
    The last carry, and the outs of all layers stacked `[L, ...]`.
  """
  outs = []
  for segment in segments(config):
    weights = _of_segment(config, segment, stack)
    period = len(segment.kinds)
    # The layer's place in each of the stacks of one period.
    places = [
      {
        name: sum(_holds(name, kind) for kind in segment.kinds[:offset])
        for name in weights
        if _holds(name, segment.kinds[offset])
      }
      for offset in range(period)
    ]

    def body(carry: Any, scanned: tuple, kinds=segment.kinds, places=places):
      first, weights = scanned
      held = []
      for offset, kind in enumerate(kinds):
        mine = {
          name: weights[name] if len(kinds) == 1 else weights[name][place]
          for name, place in places[offset].items()
        }
        carry, out = block(carry, mine, first + offset, kind)
        held.append(out)
      return carry, held[0] if len(kinds) == 1 else tuple(held)

    stop = segment.first + period * segment.repeats
    first = jnp.arange(segment.first, stop, period, dtype=jnp.int32)
    carry, out = jax.lax.scan(body, carry, (first, weights), unroll=unroll)
    if period > 1:
      out = jax.tree.map(
        lambda *xs: jnp.stack(xs, axis=1).reshape(-1, *xs[0].shape[1:]), *out
      )
    outs.append(out)
  if len(outs) > 1:
    return carry, jax.tree.map(lambda *xs: jnp.concatenate(xs), *outs)
  return carry, outs[0]


def layer_weights(
  config: ModelConfig, stack: dict[str, Array], layer: int
) -> tuple[dict[str, Array], Kind]:
  """The weights of one layer, and its kind."""
  kind = Kind(config.rotates[layer], config.sparse[layer])
  mine = {
    name: weights[stack_layers(config, name).index(layer)]
    for name, weights in stack.items()
    if _holds(name, kind)
  }
  return mine, kind


def _holds(name: str, kind: Kind) -> bool:
  """Whether a layer of this kind has weights of this name."""
  return name not in (DENSE if kind.sparse else SPARSE)


def _of_segment(
  config: ModelConfig, segment: Segment, stack: dict[str, Array]
) -> dict[str, Array]:
  """Weights `[repeats, ...]`, or `[repeats, of a period, ...]`."""
  period = len(segment.kinds)
  stop = segment.first + period * segment.repeats
  mine = {}
  for name, weights in stack.items():
    layers = stack_layers(config, name)
    inside = [n for n in layers if segment.first <= n < stop]
    if not inside:
      continue
    if len(inside) < len(layers):
      start = layers.index(inside[0])
      weights = weights[start : start + len(inside)]
    if period > 1:
      weights = weights.reshape(segment.repeats, -1, *weights.shape[1:])
    mine[name] = weights
  return mine
