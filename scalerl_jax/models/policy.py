"""A decoder-only transformer policy: RMSNorm, RoPE, grouped-query attention.

Parameters are an NNX module, created sharded; layers of one kind are stacked
`[L, ...]` and scanned. Hot loops are `jax.jit` over `nnx.split`'s state.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

from scalerl_jax.config import ModelConfig
from scalerl_jax.models import kv_cache, layers
from scalerl_jax.models.kv_cache import KVCache, OpenCache
from scalerl_jax.models.sharding import (
  check_heads,
  constrain,
  make_mesh,
  partition_spec,
)

# Below this many layers a scan is unrolled: XLA's CPU loop costs more than
# the code it saves.
UNROLL_LAYERS = 4


def parameter_plan(
  config: ModelConfig, vocab_size: int
) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...], float]]:
  """Shape, logical axes and initial standard deviation of each parameter.

  A deviation of 0 means ones, as norms start. Layers are stacked `[L, ...]`.
  """
  depth, width, mlp = config.num_layers, config.width, config.mlp_width
  head_width = config.head_width
  mixed = config.num_heads * head_width
  inward = width**-0.5
  # Outputs into the residual stream start smaller, the deeper the model.
  residual = (2.0 * depth) ** -0.5

  def heads(count: int, name: str) -> tuple:
    shape = (depth, width, count, head_width)
    return shape, ("layers", "embed", name, None), inward

  table = (vocab_size, width), ("vocab", "embed"), inward
  norm = (depth, width), ("layers", "embed"), 0.0
  up = (depth, width, mlp), ("layers", "embed", "mlp"), inward
  plan = {
    "embedding": table,
    "final_norm": ((width,), ("embed",), 0.0),
    "attention_norm": norm,
    "query": heads(config.num_heads, "heads"),
    "key": heads(config.num_kv_heads, "kv_heads"),
    "value": heads(config.num_kv_heads, "kv_heads"),
    "out": (
      (depth, config.num_heads, head_width, width),
      ("layers", "heads", None, "embed"),
      residual * mixed**-0.5,
    ),
    "mlp_norm": norm,
    "gate": up,
    "up": up,
    "down": (
      (depth, mlp, width),
      ("layers", "mlp", "embed"),
      residual * mlp**-0.5,
    ),
  }
  return plan if config.tied_head else {**plan, "output": table}


class Policy(nnx.Module):
  """π(token | tokens before), with a prompt/completion KV cache.

  Args:
    config: the architecture.
    vocab_size: V, of the tokenizer.
    rngs: `params` stream, for the initial weights.
    mesh: where parameters are created; one device by default.

  Raises:
    ValueError: the mesh's tensor axis does not divide the heads.
  """

  def __init__(
    self,
    config: ModelConfig,
    *,
    vocab_size: int,
    rngs: nnx.Rngs,
    mesh: Mesh | None = None,
  ):
    mesh = make_mesh() if mesh is None else mesh
    check_heads(config.num_heads, config.num_kv_heads, mesh.shape["tensor"])
    self.config = config
    self.vocab_size = vocab_size
    self.head_dtype = "float32"
    plan = parameter_plan(config, vocab_size)
    specs = {
      name: partition_spec(axes, shape, mesh)
      for name, (shape, axes, _) in plan.items()
    }

    def create(key: Array) -> dict[str, Array]:
      keys = jax.random.split(key, len(plan))
      return {
        name: scale * jax.random.normal(keys[i], shape, jnp.float32)
        if scale
        else jnp.ones(shape, jnp.float32)
        for i, (name, (shape, _, scale)) in enumerate(plan.items())
      }

    shardings = {n: NamedSharding(mesh, spec) for n, spec in specs.items()}
    # One program, with out_shardings: no device ever holds a whole array.
    values = jax.jit(create, out_shardings=shardings)(rngs.params())
    with jax.set_mesh(mesh):
      params = {
        name: nnx.Param(value, out_sharding=specs[name])
        for name, value in values.items()
      }
    self.embedding = params.pop("embedding")
    if not config.tied_head:
      self.output = params.pop("output")
    self.final_norm = params.pop("final_norm")
    self.layers = nnx.Dict(params)

  @property
  def dtype(self) -> Any:
    """Dtype of the body; logits are float32 whatever it is."""
    return jnp.dtype(self.config.dtype)

  def __call__(
    self,
    tokens: Int[Array, "B T"],
    *,
    positions: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
  ) -> Float[Array, "B T V"]:
    """Logits of the token after each position, float32.

    Args:
      tokens: ids; int32 or int64.
      positions: rotary positions; within the segment by default.
      segment_ids: 0 on padding; tokens see only their own segment. All one
        segment by default.
    """
    return self.head(self.hidden(tokens, positions, segment_ids))

  def head(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """The FP32 head; the one function that sampler and learner share.

    With `with_head_dtype(..., "bfloat16")` it is what the paper's ablation
    compares with.
    """
    table = self.embedding if self.config.tied_head else self.output
    if self.head_dtype == "bfloat16":
      return layers.bfloat16_head(hidden, table[...])
    return layers.float32_head(hidden, table[...])

  def hidden(
    self,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
  ) -> Float[Array, "B T D"]:
    """Normalised hidden states before the head."""
    return self._forward(tokens, positions, segment_ids, False)[0]

  def prefill(
    self,
    tokens: Int[Array, "P Tp"],
    segment_ids: Int[Array, "P Tp"],
  ) -> tuple[
    Float[Array, "P Tp D"],
    Float[Array, "L P K Dh Tp"],
    Float[Array, "L P K Tp Dh"],
  ]:
    """Hidden states of right-padded prompts with their cache parts."""
    hidden, (key, value) = self._forward(tokens, None, segment_ids, True)
    return (
      hidden,
      jnp.transpose(key, (0, 1, 3, 4, 2)),
      jnp.transpose(value, (0, 1, 3, 2, 4)),
    )

  def decode(
    self,
    tokens: Int[Array, " S"],
    positions: Int[Array, " S"],
    cache: KVCache,
  ) -> tuple[Float[Array, "S D"], KVCache]:
    """One token more in each slot: hidden states before the head, new cache.

    Args:
      tokens: the newest token of each slot.
      positions: its position, prompt included.
      cache: holds what came before; the token's own key and value are written
        into the cursor's column.
    """
    opened = kv_cache.open_cache(cache, unrolled=self.unrolled)
    hidden, opened = self.decode_opened(tokens, positions, opened)
    return hidden, kv_cache.close_cache(cache, opened)

  def decode_opened(
    self,
    tokens: Int[Array, " S"],
    positions: Int[Array, " S"],
    cache: OpenCache,
  ) -> tuple[Float[Array, "S D"], OpenCache]:
    """`decode` on a cache that a loop has opened once for many steps."""
    config = self.config
    x = self._embed(tokens)
    cos, sin = layers.rope_angles(
      positions, config.head_width, config.rope_theta
    )
    mask = kv_cache.visible(cache)

    def block(carry: tuple, scanned: tuple) -> tuple:
      x, cache = carry
      layer, weights = scanned

      def attend(query: Array, key: Array, value: Array) -> tuple[Array, Any]:
        written = kv_cache.write(cache, layer, key, value)
        return kv_cache.attend_cached(query, written, layer, mask), written

      return self._block(x, weights, cos, sin, attend), None

    carry = (x, cache)
    if self.unrolled:
      for layer in range(config.num_layers):
        weights = {name: stack[layer] for name, stack in self._stack().items()}
        carry, _ = block(carry, (layer, weights))
    else:
      index = jnp.arange(config.num_layers, dtype=jnp.int32)
      carry, _ = jax.lax.scan(block, carry, (index, self._stack()))
    x, cache = carry
    return self._final(x), kv_cache.advance(cache)

  def empty_cache(
    self,
    *,
    prompts: int,
    slots: int,
    prompt_tokens: int,
    completion_tokens: int,
  ) -> KVCache:
    """A cache of this policy's shape and dtype."""
    return kv_cache.empty_cache(
      layers=self.config.num_layers,
      prompts=prompts,
      slots=slots,
      kv_heads=self.config.num_kv_heads,
      head_width=self.config.head_width,
      prompt_tokens=prompt_tokens,
      completion_tokens=completion_tokens,
      dtype=self.dtype,
    )

  @property
  def unrolled(self) -> bool:
    """Whether layers are few enough to be unrolled instead of scanned."""
    return self.config.num_layers <= UNROLL_LAYERS

  def _stack(self) -> dict[str, Array]:
    return {name: weight[...] for name, weight in self.layers.items()}

  def _embed(self, tokens: Array) -> Array:
    return jnp.take(self.embedding[...], tokens, axis=0).astype(self.dtype)

  def _final(self, x: Array) -> Array:
    return layers.rms_norm(x, self.final_norm[...], self.config.norm_epsilon)

  def _block(
    self,
    x: Array,
    weights: dict[str, Array],
    cos: Array,
    sin: Array,
    attend: Callable[[Array, Array, Array], tuple[Array, Any]],
  ) -> tuple[Array, Any]:
    """One pre-norm layer; `attend` says which keys and values are seen."""
    config = self.config
    epsilon = config.norm_epsilon
    h = layers.rms_norm(x, weights["attention_norm"], epsilon)

    def project(name: str, heads: int) -> Array:
      flat = layers.matmul(h, weights[name])
      return flat.reshape(*h.shape[:-1], heads, config.head_width)

    query = layers.rotate(project("query", config.num_heads), cos, sin)
    key = layers.rotate(project("key", config.num_kv_heads), cos, sin)
    value = project("value", config.num_kv_heads)
    mixed, extra = attend(query, key, value)
    mixed = mixed.astype(x.dtype).reshape(*x.shape[:-1], -1)
    out = weights["out"].reshape(-1, config.width)
    x = x + layers.matmul(mixed, out)
    h = layers.rms_norm(x, weights["mlp_norm"], epsilon)
    x = x + layers.swiglu(h, weights["gate"], weights["up"], weights["down"])
    return x, extra

  def _forward(
    self,
    tokens: Array,
    positions: Array | None,
    segment_ids: Array | None,
    keep_kv: bool,
  ) -> tuple[Array, Any]:
    """Whole rows; with `keep_kv` also keys and values `[L, B, T, K, Dh]`."""
    config = self.config
    if segment_ids is None:
      segment_ids = jnp.ones(tokens.shape, jnp.int32)
    if positions is None:
      positions = layers.segment_positions(segment_ids)
    mask = layers.attention_mask(segment_ids)
    cos, sin = layers.rope_angles(
      positions, config.head_width, config.rope_theta
    )
    x = constrain(self._embed(tokens), ("batch", None, None))

    def block(x: Array, weights: dict[str, Array]) -> tuple:
      def attend(query: Array, key: Array, value: Array) -> tuple[Array, Any]:
        mixed = layers.attend(query, key, value, mask)
        return mixed, (key, value) if keep_kv else None

      x, kv = self._block(x, weights, cos, sin, attend)
      return constrain(x, ("batch", None, None)), kv

    x, kv = jax.lax.scan(block, x, self._stack(), unroll=self.unrolled)
    return self._final(x), kv


def with_head_dtype(
  policy: nnx.GraphDef, params: nnx.State, dtype: str
) -> nnx.GraphDef:
  """The same policy with its head in another dtype, for one side of the run.

  Args:
    policy: graph definition (`nnx.split`).
    params: its parameters, for their structure only.
    dtype: "float32" or "bfloat16".
  """
  merged: Policy = nnx.merge(policy, params)
  merged.head_dtype = dtype
  return nnx.split(merged)[0]
