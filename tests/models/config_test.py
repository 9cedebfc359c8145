"""Published configs, old keys and new ones, and what is refused."""

import dataclasses
import json

import pytest

from scalerl_jax.config import ModelConfig
from scalerl_jax.models.config import family, read_config, write_config
from tests.models.parts import CHECKPOINTS, NAMES


def _published(name, **changes):
  found = json.loads((CHECKPOINTS / name / "config.json").read_text())
  return {**found, **changes}


def _without(name, *keys, **changes):
  found = _published(name, **changes)
  return {key: value for key, value in found.items() if key not in keys}


def test_new_keys_are_read():
  model, vocab_size, prefix = read_config(_published("llama3"))
  assert (vocab_size, prefix) == (97, "")
  assert model == ModelConfig(
    width=48,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_width=8,
    mlp_width=80,
    rope_theta=5e5,
    norm_epsilon=1e-5,
    tied_head=False,
    rope_factor=8.0,
    rope_low_frequency=1.0,
    rope_high_frequency=4.0,
    rope_context=64,
  )


@pytest.mark.parametrize("kind", ["rope_type", "type"])
def test_old_keys_say_the_same_as_new_ones(kind):
  new = _published("llama3")
  rope = dict(new["rope_parameters"])
  theta = rope.pop("rope_theta")
  rope[kind] = rope.pop("rope_type")
  old = _without(
    "llama3", "rope_parameters", rope_theta=theta, rope_scaling=rope
  )
  assert read_config(old) == read_config(new)
  old = _without("qwen3_moe", "num_local_experts", num_experts=8)
  assert read_config(old) == read_config(_published("qwen3_moe"))
  old = _without("qwen2", "rope_parameters", rope_theta=1e6, rope_scaling=None)
  assert read_config(old) == read_config(_published("qwen2"))


def test_what_a_config_leaves_out_has_the_familys_default():
  model = read_config(
    _without(
      "llama_tied",
      *("head_dim", "num_key_value_heads", "rope_parameters", "rms_norm_eps"),
      "tie_word_embeddings",
    )
  ).model
  assert (model.head_width, model.num_kv_heads) == (16, 3)
  assert (model.rope_theta, model.norm_epsilon) == (1e4, 1e-6)
  assert not model.tied_head
  left_out = ("no_rope_layers", "layer_types", "moe_layers", "use_qk_norm")
  for step, dense in ((1, ""), (2, "0,2")):
    found = _without("llama4", *left_out, interleave_moe_layer_step=step)
    model = read_config(found).model
    assert model.no_rope_layers == "3"
    assert model.qk_norm == "unscaled"
    assert model.dense_layers == dense


@pytest.mark.parametrize(
  ("changes", "dense"),
  [
    ({}, ""),
    ({"decoder_sparse_step": 2}, "0,2"),
    ({"mlp_only_layers": [1]}, "1"),
    ({"mlp_only_layers": [1], "decoder_sparse_step": 3}, "0,1,3"),
  ],
)
def test_sparse_layers_of_qwen3_moe(changes, dense):
  found = _published("qwen3_moe", num_hidden_layers=4, **changes)
  assert read_config(found).model.dense_layers == dense


def test_shares_of_qwen3_moe_are_renormalised_or_not():
  for chosen, router in ((True, "softmax_chosen"), (False, "softmax")):
    found = _published("qwen3_moe", norm_topk_prob=chosen)
    assert read_config(found).model.router == router


def test_parts_of_llama4_are_read():
  model = read_config(_published("llama4")).model
  assert (model.attention_chunk, model.query_temperature) == (16, 0.1)
  assert (model.query_temperature_floor, model.router) == (16, "sigmoid")
  assert (model.mlp_width, model.expert_width) == (80, 40)
  off = _published(
    "llama4", attn_temperature_tuning=False, attention_chunk_size=None
  )
  model = read_config(off).model
  assert (model.attention_chunk, model.query_temperature) == (0, 0.0)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read_as_the_same(name):
  found = read_config(_published(name))
  written = json.loads(json.dumps(write_config(*found[:2])))
  assert read_config(written) == found
  for key in ("model_type", "architectures", "num_local_experts"):
    assert written.get(key) == _published(name).get(key)
  # Readers of old keys and of new ones alike.
  old = {k: v for k, v in written.items() if k != "rope_parameters"}
  assert read_config(old) == found
  new = {k: v for k, v in written.items() if not k.startswith("rope_s")}
  del new["rope_theta"]
  assert read_config(new) == found


@pytest.mark.parametrize(
  ("name", "changes", "told"),
  [
    ("llama3", {"model_type": "mamba"}, r"model_type .*got 'mamba'"),
    ("llama3", {"hidden_act": "gelu"}, "hidden_act must be 'silu'.*'gelu'"),
    ("llama3", {"mlp_bias": True}, "mlp_bias must be False"),
    ("llama3", {"attention_bias": True}, "attention_bias must be False"),
    ("qwen3", {"attention_bias": True}, "attention_bias must be False"),
    ("llama3", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama3", {"hidden_size": 0}, "hidden_size must be a whole number"),
    ("llama3", {"vocab_size": None}, "config.json must hold vocab_size"),
    ("llama3", {"rope_parameters": {"rope_type": "yarn"}}, "got 'yarn'"),
    (
      "llama3",
      {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
      "missing: low_freq_factor, high_freq_factor, original_max",
    ),
    ("qwen2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor .*0.5"),
    (
      "qwen2",
      {"layer_types": ["full_attention", "sliding_attention"]},
      "sliding windows",
    ),
    (
      "qwen3_moe",
      {"use_sliding_window": True, "sliding_window": 7},
      "sliding_window 7 in use",
    ),
    ("llama4", {"layer_types": ["full_attention"] * 4}, "where they rotate"),
    ("llama4", {"no_rope_layers": [1, 0]}, "checkpoint's 4 layers"),
  ],
)
def test_what_is_not_computed_is_refused_in_one_sentence(name, changes, told):
  with pytest.raises(ValueError, match=told):
    read_config(_published(name, **changes))


def test_a_window_that_no_layer_uses_is_no_window():
  old = _without(
    "qwen2", "layer_types", use_sliding_window=True, sliding_window=7
  )
  assert read_config(old) == read_config(_published("qwen2"))
  with pytest.raises(ValueError, match="sliding windows"):
    read_config({**old, "max_window_layers": 1})
  unused = _published("qwen3_moe", sliding_window=7)
  assert read_config(unused) == read_config(_published("qwen3_moe"))


def test_family_is_told_by_the_parts():
  for name in NAMES:
    published = _published(name)
    assert family(read_config(published).model) == published["model_type"]
  odd = {
    "router": {"router": "sigmoid", "num_experts": 3, "expert_width": 5},
    "chunk": {"attention_chunk": 5},
    "bias": {"attention_bias": True, "qk_norm": "scaled"},
    "plain": {"num_experts": 3, "expert_width": 5},
  }
  for changes in odd.values():
    with pytest.raises(ValueError, match="no published family"):
      family(dataclasses.replace(ModelConfig(), **changes))
