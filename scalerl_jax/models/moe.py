"""Mixture of experts: each token goes through the experts its router chose.

Products are grouped by expert (`jax.lax.ragged_dot`) and no token is dropped.
On a mesh each device has its own experts and weights stay where they are.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from scalerl_jax.config import ModelConfig
from scalerl_jax.models import layers
from scalerl_jax.models.operands import FLOAT32
from scalerl_jax.models.sharding import partition_spec

WEIGHTS = ("expert_gate", "expert_up", "expert_down")


def route(
  logits: Float[Array, "N E"], *, router: str, count: int
) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
  """The k experts of each token and what each of them weighs.

  Args:
    logits: of the router, float32.
    router: "softmax": softmax over all E, of which the chosen keep their
      share; "softmax_chosen": over the chosen, sum 1; "sigmoid": each its own.
    count: k, experts a token.

  Example:
    >>> weights, chosen = route(
    ...   jnp.log(jnp.array([[1.0, 4.0, 3.0]])), router="softmax", count=2
    ... )
    >>> chosen.tolist(), weights.tolist()
    ([[1, 2]], [[0.5, 0.375]])

  Reference: Shazeer et al., 2017, arXiv 1701.06538; softmax before the choice
  as in Qwen3 (2025, arXiv 2505.09388), sigmoid as in Llama 4.
  """
  top, chosen = jax.lax.top_k(logits, count)
  if router == "sigmoid":
    weights = jax.nn.sigmoid(top)
  elif router == "softmax_chosen":
    weights = jax.nn.softmax(top, axis=-1)
  else:
    weights = jnp.exp(top - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
  return weights, chosen


def grouped_matmul(
  rows: Float[Array, "M I"],
  weights: Float[Array, "E I O"],
  sizes: Int[Array, " E"],
) -> Float[Array, "M O"]:
  """Rows times the weights of their expert, in the rows' dtype.

  Args:
    rows: sorted by expert.
    weights: of all experts.
    sizes: rows of each expert; what is beyond their sum has no expert.
  """
  out = jax.lax.ragged_dot(rows, weights.astype(rows.dtype), sizes, **FLOAT32)
  return out.astype(rows.dtype)


def experts(
  rows: Float[Array, "N k D"],
  chosen: Int[Array, "N k"],
  gate: Float[Array, "E D F"],
  up: Float[Array, "E D F"],
  down: Float[Array, "E F D"],
) -> Float[Array, "N k D"]:
  """Each row through its expert's gated MLP; 0 where the expert is not here.

  Args:
    rows: a token once for each of its experts.
    chosen: the expert's number among the E here; any other is elsewhere.
    gate: of the experts here.
    up: likewise.
    down: likewise.
  """
  count = gate.shape[0]
  flat = chosen.reshape(-1)
  here = (flat >= 0) & (flat < count)
  owner = jnp.where(here, flat, count)
  order = jnp.argsort(owner, stable=True)
  numbers = jnp.arange(count, dtype=owner.dtype)
  sizes = (owner[:, None] == numbers[None]).sum(axis=0, dtype=jnp.int32)

  def pick(values: Array, index: Array) -> Array:
    # Permutations: their gradients are gathers too, the same at every run.
    return values.at[index].get(unique_indices=True, mode="promise_in_bounds")

  sorted_rows = pick(rows.reshape(-1, rows.shape[-1]), order)
  hidden = jax.nn.silu(grouped_matmul(sorted_rows, gate, sizes))
  hidden *= grouped_matmul(sorted_rows, up, sizes)
  out = pick(grouped_matmul(hidden, down, sizes), jnp.argsort(order))
  # What a grouped product leaves in rows of no group is not defined.
  return jnp.where(here[:, None], out, 0).reshape(rows.shape)


def mixture(
  x: Float[Array, "*B D"], weights: dict[str, Array], config: ModelConfig
) -> Float[Array, "*B D"]:
  """Σ_k w_k · expert_k(x), and the shared expert's MLP where there is one.

  A sigmoid router scales what goes into its experts, not what comes out.

  Args:
    x: normalised hidden states.
    weights: of the layer.
    config: the architecture.
  """
  flat = x.reshape(-1, x.shape[-1])
  logits = layers.matmul(flat.astype(jnp.float32), weights["router"])
  shares, chosen = route(
    logits, router=config.router, count=config.experts_per_token
  )
  out = _on_mesh(flat, shares, chosen, weights, config).reshape(x.shape)
  if config.shared_expert:
    out += layers.swiglu(
      x, weights["shared_gate"], weights["shared_up"], weights["shared_down"]
    )
  return out


def _on_mesh(
  x: Array,
  shares: Array,
  chosen: Array,
  weights: dict[str, Array],
  config: ModelConfig,
) -> Array:
  """The experts' sum for tokens `[N, D]`, each device with its own experts.

  Left to the compiler, a grouped product gathers all experts on every device.
  Here tokens stay on their batch devices, and the sums of the devices that
  share experts or their widths are added up.
  """
  mesh = jax.sharding.get_abstract_mesh()
  alone = mesh.empty or mesh.size == 1

  def local(x: Array, shares: Array, chosen: Array, *mlp: Array) -> Array:
    rows = jnp.broadcast_to(x[:, None], (*chosen.shape, x.shape[-1]))
    scale = shares[..., None].astype(x.dtype)
    if config.router == "sigmoid":
      out = experts(rows * scale, chosen, *mlp)
    else:
      out = experts(rows, chosen, *mlp) * scale
    return out.sum(axis=1)

  mlp = [weights[name] for name in WEIGHTS]
  if alone:
    return local(x, shares, chosen, *mlp)
  tokens = partition_spec(("batch", None), x.shape, mesh)
  split = partition_spec(("mlp",), (config.expert_width,), mesh)[0]
  summed = ("expert",) if split is None else ("expert", "tensor")

  def shared(x: Array, shares: Array, chosen: Array, *mlp: Array) -> Array:
    # Said, not left to be found out: gradients of tokens came out without
    # their sum over devices (jax 0.10.2).
    x, shares, chosen = (
      jax.lax.pcast(value, summed, to="varying")
      for value in (x, shares, chosen)
    )
    if tokens[0] is not None:
      mlp = tuple(jax.lax.pcast(w, tokens[0], to="varying") for w in mlp)
    chosen = chosen - jax.lax.axis_index("expert") * mlp[0].shape[0]
    return jax.lax.psum(local(x, shares, chosen, *mlp), summed)

  inward = PartitionSpec("expert", None, split)
  return jax.shard_map(
    shared,
    in_specs=(
      *(tokens, tokens, tokens),
      *(inward, inward, PartitionSpec("expert", split, None)),
    ),
    out_specs=tokens,
  )(x, shares, chosen, *mlp)
