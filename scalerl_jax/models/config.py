"""A published `config.json` as a `ModelConfig`, and back.

Keys of transformers 4 (`rope_theta`, `rope_scaling`, `num_experts`) and 5
(`rope_parameters`, `num_local_experts`). What cannot be computed is refused.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from scalerl_jax.config import ModelConfig

# model_type -> architecture that is written.
ARCHITECTURES = {
  "llama": "LlamaForCausalLM",
  "qwen2": "Qwen2ForCausalLM",
  "qwen3": "Qwen3ForCausalLM",
  "qwen3_moe": "Qwen3MoeForCausalLM",
  "llama4_text": "Llama4ForCausalLM",
}


class Published(NamedTuple):
  """What a `config.json` says."""

  model: ModelConfig
  vocab_size: int
  prefix: str  # of the names of the text model's tensors


def read_config(published: dict[str, Any]) -> Published:
  """The architecture that a published `config.json` names.

  Args:
    published: the file's content. Of a model of text and images (Llama 4) the
      text model is read.

  Raises:
    ValueError: an unknown architecture, a missing key, or a feature that this
      policy does not compute.

  Example:
    >>> found = read_config(
    ...   {
    ...     "model_type": "llama",
    ...     "vocab_size": 97,
    ...     "hidden_size": 48,
    ...     "num_hidden_layers": 2,
    ...     "num_attention_heads": 3,
    ...     "intermediate_size": 80,
    ...     "rope_theta": 5e5,
    ...   }
    ... )
    >>> found.model.head_width, found.model.rope_theta, found.vocab_size
    (16, 500000.0, 97)
  """
  prefix = ""
  if isinstance(published.get("text_config"), dict):
    prefix = "language_model."
    outer, published = published, published["text_config"]
    if "tie_word_embeddings" in outer:
      published = {
        "tie_word_embeddings": outer["tie_word_embeddings"],
        **published,
      }
  kind = published.get("model_type")
  if kind not in ARCHITECTURES:
    raise ValueError(
      f"the checkpoint's model_type must be one of {', '.join(ARCHITECTURES)},"
      f" got {kind!r} (architectures {published.get('architectures')!r})"
    )
  _refuse_features(published, kind)
  depth = _number(published, "num_hidden_layers")
  heads = _number(published, "num_attention_heads")
  width = _number(published, "hidden_size")
  fields: dict[str, Any] = {
    "width": width,
    "num_layers": depth,
    "num_heads": heads,
    "num_kv_heads": published.get("num_key_value_heads") or heads,
    "head_width": published.get("head_dim") or width // heads,
    "mlp_width": _number(published, "intermediate_size"),
    "norm_epsilon": float(published.get("rms_norm_eps", 1e-6)),
    "tied_head": bool(published.get("tie_word_embeddings", False)),
    "attention_bias": kind == "qwen2",
    "qk_norm": "scaled" if kind.startswith("qwen3") else "none",
    **_rope(published, 5e5 if kind == "llama4_text" else 1e4),
  }
  if kind == "qwen3_moe":
    fields |= _qwen3_moe(published, depth)
  if kind == "llama4_text":
    fields |= _llama4(published, depth)
  vocab_size = _number(published, "vocab_size")
  return Published(ModelConfig(**fields), vocab_size, prefix)


def _number(published: dict[str, Any], *names: str) -> int:
  """The first of these keys that is there."""
  for name in names:
    value = published.get(name)
    if value is not None:
      if type(value) is not int or value < 1:
        raise ValueError(
          f"the checkpoint's {name} must be a whole number above 0, got"
          f" {value!r}"
        )
      return value
  raise ValueError(
    f"the checkpoint's config.json must hold {' or '.join(names)}; it does not"
  )


def _refuse_features(published: dict[str, Any], kind: str) -> None:
  """What the policy does not compute is refused by name."""
  depth = published.get("num_hidden_layers") or 0
  wanted: list[tuple[str, Any, Any]] = [
    ("hidden_act", published.get("hidden_act", "silu"), "silu"),
    ("mlp_bias", published.get("mlp_bias", False), False),
    ("quantization_config", published.get("quantization_config"), None),
  ]
  if kind != "qwen2":
    bias = published.get("attention_bias", False)
    wanted.append(("attention_bias", bias, False))
  for name, value, allowed in wanted:
    if value != allowed:
      raise ValueError(
        f"the checkpoint's {name} must be {allowed!r} (this policy computes"
        f" nothing else), got {value!r}"
      )
  window = published.get("sliding_window")
  used = bool(window) and bool(published.get("use_sliding_window", False))
  if "layer_types" in published and kind != "qwen3_moe":
    used = "sliding_attention" in (published["layer_types"] or ())
  elif kind != "qwen3_moe":
    used &= published.get("max_window_layers", depth) < depth
  if used:
    raise ValueError(
      "the checkpoint's layers must see all tokens before (sliding windows are"
      f" not computed here), got sliding_window {window!r} in use"
    )


def _rope(published: dict[str, Any], default: float) -> dict[str, Any]:
  """Rotary settings from the new keys or from the old ones."""
  rope = published.get("rope_parameters") or published.get("rope_scaling") or {}
  theta = rope.get("rope_theta", published.get("rope_theta")) or default
  fields: dict[str, Any] = {"rope_theta": float(theta)}
  kind = rope.get("rope_type", rope.get("type", "default"))
  if kind not in ("default", "llama3"):
    raise ValueError(
      f"the checkpoint's rope type must be default or llama3, got {kind!r}"
    )
  partial = rope.get(
    "partial_rotary_factor", published.get("partial_rotary_factor", 1.0)
  )
  if partial not in (None, 1, 1.0):
    raise ValueError(
      "the checkpoint's partial_rotary_factor must be 1 (whole heads are"
      f" turned), got {partial!r}"
    )
  if kind == "default":
    return fields
  names = {
    "rope_factor": "factor",
    "rope_low_frequency": "low_freq_factor",
    "rope_high_frequency": "high_freq_factor",
    "rope_context": "original_max_position_embeddings",
  }
  missing = [name for name in names.values() if name not in rope]
  if missing:
    raise ValueError(
      "the checkpoint's rope settings of type llama3 must hold"
      f" {', '.join(names.values())}; missing: {', '.join(missing)}"
    )
  fields |= {ours: float(rope[name]) for ours, name in names.items()}
  fields["rope_context"] = int(fields["rope_context"])
  return fields


def _qwen3_moe(published: dict[str, Any], depth: int) -> dict[str, Any]:
  step = published.get("decoder_sparse_step", 1)
  plain = published.get("mlp_only_layers") or ()
  dense = [n for n in range(depth) if n in plain or (n + 1) % step]
  chosen = published.get("norm_topk_prob", False)
  return {
    "num_experts": _number(published, "num_local_experts", "num_experts"),
    "experts_per_token": _number(published, "num_experts_per_tok"),
    "expert_width": _number(published, "moe_intermediate_size"),
    "dense_layers": _text(dense),
    "router": "softmax_chosen" if chosen else "softmax",
  }


def _llama4(published: dict[str, Any], depth: int) -> dict[str, Any]:
  every = published.get("no_rope_layer_interval", 4)
  # The published list is 1 where a layer does rotate.
  turns = published.get("no_rope_layers") or [
    int((n + 1) % every != 0) for n in range(depth)
  ]
  types = published.get("layer_types") or [
    "chunked_attention" if turn else "full_attention" for turn in turns
  ]
  chunked = [int(name == "chunked_attention") for name in types]
  if len(turns) != depth or chunked != list(turns):
    raise ValueError(
      f"the checkpoint's {depth} layers must have chunked attention where they"
      " rotate and only there, got no_rope_layers"
      f" {turns!r} and layer_types {types!r}"
    )
  step = published.get("interleave_moe_layer_step", 1)
  sparse = published.get("moe_layers") or range(step - 1, depth, step)
  tuned = published.get("attn_temperature_tuning", True)
  norm = published.get("use_qk_norm", True)
  return {
    "qk_norm": "unscaled" if norm else "none",
    "no_rope_layers": _text(n for n, turn in enumerate(turns) if not turn),
    "attention_chunk": published.get("attention_chunk_size", 8192) or 0,
    "query_temperature": float(published.get("attn_scale", 0.1))
    if tuned
    else 0.0,
    "query_temperature_floor": int(published.get("floor_scale", 8192)),
    "num_experts": _number(published, "num_local_experts", "num_experts"),
    "experts_per_token": _number(published, "num_experts_per_tok"),
    "expert_width": _number(published, "intermediate_size"),
    "mlp_width": _number(published, "intermediate_size_mlp"),
    "shared_expert": True,
    "dense_layers": _text(n for n in range(depth) if n not in sparse),
    "router": "sigmoid",
  }


def _text(layers: Iterable[int]) -> str:
  return ",".join(map(str, layers))


def family(config: ModelConfig) -> str:
  """The published model_type that computes what `config` does.

  Raises:
    ValueError: no published family has this mixture of parts.

  >>> family(ModelConfig()), family(ModelConfig(qk_norm="scaled"))
  ('llama', 'qwen3')
  """
  llama4_only = (
    *("no_rope_layers", "attention_chunk", "query_temperature"),
    "shared_expert",
  )
  ours = {name for name in llama4_only if getattr(config, name)}
  parts = (
    config.attention_bias,
    config.qk_norm,
    config.router if config.num_experts else "",
  )
  if parts[:2] in ((False, "unscaled"), (False, "none")):
    if parts[2] == "sigmoid" and config.shared_expert:
      return "llama4_text"
    if parts == (False, "none", "") and not ours:
      return "llama"
  if not ours and parts == (True, "none", ""):
    return "qwen2"
  if not ours and parts == (False, "scaled", ""):
    return "qwen3"
  if not ours and parts[:2] == (False, "scaled") and "softmax" in parts[2]:
    return "qwen3_moe"
  raise ValueError(
    "no published family has this policy's mixture of parts: attention_bias"
    f" {config.attention_bias}, qk_norm {config.qk_norm!r}, router"
    f" {parts[2]!r}, {', '.join(sorted(ours)) or 'nothing of Llama 4'}"
  )


def write_config(config: ModelConfig, vocab_size: int) -> dict[str, Any]:
  """A `config.json` that transformers, old and new, reads as this policy.

  Args:
    config: the architecture.
    vocab_size: V.

  Raises:
    ValueError: no published family is like it.
  """
  kind = family(config)
  stretched = config.rope_factor != 1.0
  rope: dict[str, Any] = {"rope_type": "llama3" if stretched else "default"}
  if stretched:
    rope |= {
      "factor": config.rope_factor,
      "low_freq_factor": config.rope_low_frequency,
      "high_freq_factor": config.rope_high_frequency,
      "original_max_position_embeddings": config.rope_context,
    }
  written: dict[str, Any] = {
    "architectures": [ARCHITECTURES[kind]],
    "model_type": kind,
    "vocab_size": vocab_size,
    "hidden_size": config.width,
    "num_hidden_layers": config.num_layers,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_width,
    "intermediate_size": config.mlp_width,
    "hidden_act": "silu",
    "rms_norm_eps": config.norm_epsilon,
    "tie_word_embeddings": config.tied_head,
    "rope_theta": config.rope_theta,
    "rope_scaling": rope if stretched else None,
    "rope_parameters": {"rope_theta": config.rope_theta, **rope},
  }
  if kind != "qwen2":
    written["attention_bias"] = False
  if kind == "llama":
    written["mlp_bias"] = False
  if kind.startswith("qwen"):
    written |= {"use_sliding_window": False, "sliding_window": None}
  if config.num_experts:
    written |= {
      "num_local_experts": config.num_experts,
      "num_experts_per_tok": config.experts_per_token,
    }
  sparse = [n for n, mixed in enumerate(config.sparse) if mixed]
  if kind == "qwen3_moe":
    written |= {
      "num_experts": config.num_experts,
      "moe_intermediate_size": config.expert_width,
      "norm_topk_prob": config.router == "softmax_chosen",
      "decoder_sparse_step": 1,
      "mlp_only_layers": [
        n for n in range(config.num_layers) if n not in sparse
      ],
    }
  if kind == "llama4_text":
    written |= {
      "intermediate_size": config.expert_width,
      "intermediate_size_mlp": config.mlp_width,
      "moe_layers": sparse,
      "interleave_moe_layer_step": 1,
      "no_rope_layers": [int(turn) for turn in config.rotates],
      "layer_types": [
        "chunked_attention" if turn else "full_attention"
        for turn in config.rotates
      ],
      "attention_chunk_size": config.attention_chunk or None,
      "use_qk_norm": config.qk_norm == "unscaled",
      "attn_temperature_tuning": config.query_temperature > 0,
      "attn_scale": config.query_temperature,
      "floor_scale": config.query_temperature_floor,
    }
  return written
