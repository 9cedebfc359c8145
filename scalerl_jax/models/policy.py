"""A decoder-only transformer policy: RMSNorm, RoPE, grouped-query attention.

Parameters are an NNX module, created sharded; layers of one kind are stacked
`[L, ...]` and scanned. Hot loops are `jax.jit` over `nnx.split`'s state.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from scalerl_jax.config import ModelConfig
from scalerl_jax.models import attention, kv_cache, layers, moe, visibility
from scalerl_jax.models.initial import initial_weights
from scalerl_jax.models.kv_cache import KVCache
from scalerl_jax.models.operands import operand
from scalerl_jax.models.places import (
  Places,
  Prepared,
  pick_places,
  places_of,
  table_places,
)
from scalerl_jax.models.plan import Kind, layer_weights, scan_layers
from scalerl_jax.models.sharding import (
  check_experts,
  check_heads,
  constrain,
  make_mesh,
  spec_of,
)

# Below this many layers a scan is unrolled: XLA's CPU loop costs more than
# the code it saves.
UNROLL_LAYERS = 4
# Weights of products whose operands have `model.dot_dtype`.
OPERANDS = ("query", "key", "value", "out", "gate", "up", "down")


class Policy(nnx.Module):
  """π(token | tokens before), with a prompt/completion KV cache.

  Args:
    config: the architecture.
    vocab_size: V, of the tokenizer.
    rngs: `params` stream, for the initial weights.
    mesh: where parameters are created; one device by default.
    values: weights by the plan's names, in place of initial ones; tables may
      have rows beyond V, which are no words.

  Raises:
    ValueError: the mesh's tensor axis does not divide the heads, or its expert
      axis the experts, or its devices lack `config.attention`.
  """

  def __init__(
    self,
    config: ModelConfig,
    *,
    vocab_size: int,
    rngs: nnx.Rngs | None = None,
    mesh: Mesh | None = None,
    values: dict[str, Array] | None = None,
  ):
    mesh = make_mesh() if mesh is None else mesh
    check_heads(config.num_heads, config.num_kv_heads, mesh.shape["tensor"])
    check_experts(config.num_experts, mesh.shape["expert"])
    attention.check_kernel(config, mesh.devices.flat[0].platform)
    self.config = config
    self.vocab_size = vocab_size
    self.head_dtype = "float32"
    if values is None:
      rngs = nnx.Rngs(0) if rngs is None else rngs
      values = initial_weights(config, vocab_size, rngs.params(), mesh)
    with jax.set_mesh(mesh):
      params = {
        name: nnx.Param(value, out_sharding=spec_of(value))
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
      logits = layers.bfloat16_head(hidden, table[...])
    else:
      logits = layers.float32_head(hidden, table[...])
    # Rows beyond V fill up the tensor axis: no words, and no gradient.
    padded = table.shape[0] != self.vocab_size
    return logits[..., : self.vocab_size] if padded else logits

  def hidden(
    self,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
  ) -> Float[Array, "B T D"]:
    """Normalised hidden states before the head."""
    return self._forward(tokens, positions, segment_ids, False)[0]

  def hidden_of_groups(
    self,
    prompts: Int[Array, "P Tp"],
    prompt_length: Int[Array, " P"],
    completions: Int[Array, "P G Tc"],
  ) -> tuple[Float[Array, "P Tp D"], Float[Array, "P G Tc D"]]:
    """`hidden` of rows of prompt and completion, a prompt once for its group.

    Args:
      prompts: right-padded.
      prompt_length: tokens of each; completions go on from there.
      completions: right-padded.
    """
    count, width = prompts.shape
    group, length = completions.shape[1:]
    shape = {"prompt": width, "group": group, "length": length}
    tokens = jnp.concatenate([prompts, completions.reshape(count, -1)], axis=1)
    positions = visibility.group_positions(prompt_length, **shape)
    attend = visibility.within_groups(prompt_length, **shape, **self._seen)
    places = table_places(self.config, positions, width + length)
    hidden = self._rows(tokens, places, attend, False)[0]
    written = hidden[:, width:].reshape(count, group, length, -1)
    return hidden[:, :width], written

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

  def prepare(self, positions: int) -> Prepared:
    """What all decode steps share, made once before a loop of them.

    Args:
      positions: that are rotated, from 0.
    """
    split = None
    if self.unrolled:
      stack, depth = self._stack(), self.config.num_layers
      held = [layer_weights(self.config, stack, i)[0] for i in range(depth)]
      split = tuple(
        {name: self._operand(name, layer[name]) for name in layer}
        for layer in held
      )
    table = places_of(self.config, jnp.arange(positions, dtype=jnp.int32))
    return Prepared(split, table)

  def decode(
    self,
    tokens: Int[Array, " S"],
    positions: Int[Array, " S"],
    cache: KVCache,
    prepared: Prepared | None = None,
  ) -> tuple[Float[Array, "S D"], KVCache]:
    """One token more in each slot: hidden states before the head, new cache.

    Args:
      tokens: the newest token of each slot.
      positions: its position, prompt included.
      cache: holds what came before; the token's own key and value are written
        into the column of its clock.
      prepared: of at least as many positions; made on the spot by default.
    """
    config = self.config
    x = self._embed(tokens)
    if prepared is None:
      split, places = None, places_of(config, positions)
    else:
      split = prepared.layers
      places = pick_places(prepared.places, positions)
    mask = near = kv_cache.visible(cache)
    if config.attention_chunk:
      chunk = kv_cache.same_chunk(cache, positions, config.attention_chunk)
      near = jax.tree.map(jnp.minimum, mask, chunk)

    def block(
      carry: tuple, weights: dict[str, Array], layer: Any, kind: Kind
    ) -> tuple:
      x, cache = carry

      def attend(query: Array, key: Array, value: Array) -> tuple[Array, Any]:
        written = kv_cache.write(cache, layer, key, value)
        seen = near if kind.rotates else mask
        return kv_cache.attend_cached(query, written, layer, seen), written

      return self._block(x, weights, kind, places, attend), None

    carry = (x, cache)
    if self.unrolled:
      for layer in range(config.num_layers):
        weights, kind = layer_weights(config, self._stack(), layer)
        weights = weights if split is None else split[layer]
        carry, _ = block(carry, weights, layer, kind)
    else:
      carry, _ = scan_layers(config, block, carry, self._stack())
    x, cache = carry
    return self._final(x), kv_cache.advance(cache)

  def empty_cache(
    self,
    *,
    prompts: int,
    slots: int,
    prompt_tokens: int,
    completion_tokens: int,
    group_size: int = 1,
    shards: int = 1,
    dtype: str = "",
  ) -> KVCache:
    """A cache of this policy's shape, and of the body's dtype by default."""
    return kv_cache.empty_cache(
      layers=self.config.num_layers,
      unrolled=self.unrolled,
      group_size=group_size,
      shards=shards,
      prompts=prompts,
      slots=slots,
      kv_heads=self.config.num_kv_heads,
      head_width=self.config.head_width,
      prompt_tokens=prompt_tokens,
      completion_tokens=completion_tokens,
      dtype=jnp.dtype(dtype or self.dtype),
    )

  @property
  def unrolled(self) -> bool:
    """Whether layers are few enough to be unrolled instead of scanned."""
    return self.config.num_layers <= UNROLL_LAYERS

  @property
  def _dot_dtype(self) -> Any:
    """Dtype of the operands of the body's products."""
    return jnp.dtype(self.config.dot_dtype or self.config.dtype)

  @property
  def _seen(self) -> dict[str, Any]:
    """How whole rows attend."""
    config = self.config
    return {"chunk": config.attention_chunk, "kernel": config.attention}

  def _operand(self, name: str, weight: Array) -> Array:
    """A weight as products read it; routers, biases, norms are float32."""
    if name in OPERANDS:
      return operand(weight, self._dot_dtype)
    if name.startswith(("expert_", "shared_")):
      return weight.astype(self.dtype)
    return weight

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
    kind: Kind,
    places: Places,
    attend: Callable[[Array, Array, Array], tuple[Array, Any]],
  ) -> tuple[Array, Any]:
    """One pre-norm layer; `attend` says which keys and values are seen."""
    config = self.config
    epsilon = config.norm_epsilon
    h = layers.rms_norm(x, weights["attention_norm"], epsilon)

    def project(name: str, heads: int) -> Array:
      flat = layers.matmul(h, weights[name], self._dot_dtype)
      out = flat.reshape(*h.shape[:-1], heads, config.head_width)
      if config.attention_bias:
        bias = weights[f"{name}_bias"].astype(x.dtype)
        out += jnp.expand_dims(bias, tuple(range(h.ndim - 1)))
      return out

    def turn(name: str, heads: int) -> Array:
      out = project(name, heads)
      if config.qk_norm == "scaled":
        out = layers.rms_norm(out, weights[f"{name}_norm"], epsilon)
      if kind.rotates:
        out = layers.rotate(out, places.cos, places.sin)
        if config.qk_norm == "unscaled":
          ones = jnp.ones((config.head_width,), jnp.float32)
          out = layers.rms_norm(out, ones, epsilon)
      return out

    query = turn("query", config.num_heads)
    if places.temperature is not None and not kind.rotates:
      query *= places.temperature[..., None, None]  # float32
      query = query.astype(x.dtype)
    key = turn("key", config.num_kv_heads)
    value = project("value", config.num_kv_heads)
    mixed, extra = attend(query, key, value)
    mixed = mixed.astype(x.dtype).reshape(*x.shape[:-1], -1)
    out = weights["out"].reshape(-1, config.width)
    x = x + layers.matmul(mixed, out, self._dot_dtype)
    h = layers.rms_norm(x, weights["mlp_norm"], epsilon)
    if kind.sparse:
      return x + moe.mixture(h, weights, config), extra
    mlp = (weights["gate"], weights["up"], weights["down"])
    x = x + layers.swiglu(h, *mlp, self._dot_dtype)
    return x, extra

  def _forward(
    self,
    tokens: Array,
    positions: Array | None,
    segment_ids: Array | None,
    keep_kv: bool,
  ) -> tuple[Array, Any]:
    """Whole rows; with `keep_kv` also keys and values `[L, B, T, K, Dh]`."""
    if segment_ids is None:
      segment_ids = jnp.ones(tokens.shape, jnp.int32)
    if positions is None:
      positions = layers.segment_positions(segment_ids)
      places = table_places(self.config, positions, tokens.shape[1])
    else:
      places = places_of(self.config, positions)
    attend = visibility.among_rows(segment_ids, positions, **self._seen)
    return self._rows(tokens, places, attend, keep_kv)

  def _rows(
    self,
    tokens: Array,
    places: Places,
    attend: visibility.Attend,
    keep_kv: bool,
  ) -> tuple[Array, Any]:
    """All layers over rows `[B, T]`; `attend` says who sees whom."""
    config = self.config
    x = constrain(self._embed(tokens), ("batch", None, None))

    def block(
      x: Array, weights: dict[str, Array], layer: Any, kind: Kind
    ) -> tuple:
      del layer

      def mix(query: Array, key: Array, value: Array) -> tuple[Array, Any]:
        mixed = attend(kind.rotates, query, key, value)
        return mixed, (key, value) if keep_kv else None

      x, kv = self._block(x, weights, kind, places, mix)
      return constrain(x, ("batch", None, None)), kv

    if config.remat == "block" and not keep_kv:
      # Inside a loop nothing can be merged with the first computation.
      block = jax.checkpoint(
        block, prevent_cse=self.unrolled, static_argnums=(3,)
      )
    x, kv = scan_layers(config, block, x, self._stack(), unroll=self.unrolled)
    return self._final(x), kv
