"""The work that every engine does: one model, one set of weights, requests.

numpy and safetensors only, and nothing of the package: the environments of
the peers import this file from its own folder.
"""

import json
import math
import os
import pathlib
from typing import NamedTuple

import numpy as np
from safetensors.numpy import save_file

LAYERS = 4
WIDTH = 256
MLP_WIDTH = 768
HEADS = 4
KV_HEADS = 2
HEAD_WIDTH = 64
VOCAB = 1024
ROPE_BASE = 1_000_000.0  # Tunix rotates by this base, whatever is asked for
NORM_EPS = 1e-6
WEIGHT_STD = 0.02

PROMPT = 32  # tokens of a prompt, where all are alike
COMPLETION = 128  # new tokens, where all are alike
SEQUENCES = 256
GROUP = 8
LEARNING_RATE = 1e-6

LONG_TAIL_REQUESTS = 1024
LONG_TAIL_PROMPTS = (8, 64)
LONG_TAIL_MEAN = 64
LONG_TAIL_SIGMA = 1.0
LONG_TAIL_MOST = 512

# Ids below FIRST_TOKEN are in no prompt, so a peer that finds padding by its
# id finds it. END is not in the vocabulary: nothing ends before its budget.
PAD = 0
FIRST_TOKEN = 3
END = VOCAB


class Requests(NamedTuple):
  """Prompts, in order of arrival, and the number of new tokens each wants."""

  prompts: list[np.ndarray]
  lengths: np.ndarray

  @property
  def tokens(self) -> int:
    """New tokens that are asked for."""
    return int(self.lengths.sum())


def _prompts(rng: np.random.Generator, lengths) -> list[np.ndarray]:
  return [rng.integers(FIRST_TOKEN, VOCAB, n).astype(np.int32) for n in lengths]


def sampling() -> Requests:
  """256 prompts of 32 tokens; each wants exactly 128 new ones.

  >>> sampling().tokens
  32768
  """
  rng = np.random.default_rng(1)
  return Requests(
    _prompts(rng, [PROMPT] * SEQUENCES), np.full(SEQUENCES, COMPLETION)
  )


def long_tail() -> Requests:
  """1,024 requests of log-normal lengths, mean 64 before the cut at 512.

  >>> requests = long_tail()
  >>> int(requests.lengths.min()), int(requests.lengths.max())
  (1, 512)
  """
  rng = np.random.default_rng(2)
  low, high = LONG_TAIL_PROMPTS
  prompts = _prompts(rng, rng.integers(low, high + 1, LONG_TAIL_REQUESTS))
  mu = math.log(LONG_TAIL_MEAN) - LONG_TAIL_SIGMA**2 / 2
  drawn = rng.lognormal(mu, LONG_TAIL_SIGMA, LONG_TAIL_REQUESTS)
  lengths = np.clip(np.rint(drawn), 1, LONG_TAIL_MOST).astype(int)
  return Requests(prompts, lengths)


def step() -> Requests:
  """32 prompts of 32 tokens, one a group; each completion has 128 tokens."""
  rng = np.random.default_rng(3)
  groups = SEQUENCES // GROUP
  return Requests(_prompts(rng, [PROMPT] * groups), np.full(groups, COMPLETION))


def reward(completion: np.ndarray) -> float:
  """Share of even tokens: no group of 128-token completions is constant.

  >>> reward(np.array([2, 3, 4, 6]))
  0.75
  """
  return float(np.mean(np.asarray(completion) % 2 == 0))


def batches(requests: Requests, size: int) -> list[Requests]:
  """The requests in order of arrival, `size` at a time.

  What a system without continuous batching does: each batch runs to the
  longest length in it.
  """
  return [
    Requests(
      requests.prompts[first : first + size],
      requests.lengths[first : first + size],
    )
    for first in range(0, len(requests.prompts), size)
  ]


def left_padded(prompts: list[np.ndarray]) -> np.ndarray:
  """Prompts as one array, padded on the left to the longest.

  >>> left_padded([np.array([5]), np.array([6, 7])]).tolist()
  [[0, 5], [6, 7]]
  """
  width = max(len(prompt) for prompt in prompts)
  padded = np.full((len(prompts), width), PAD, np.int32)
  for row, prompt in zip(padded, prompts, strict=True):
    row[width - len(prompt) :] = prompt
  return padded


def weights() -> dict[str, np.ndarray]:
  """Random float32 weights under the names of a published Qwen3.

  Shapes are those of a checkpoint: `[out, in]`.
  """
  rng = np.random.default_rng(0)

  def normal(*shape: int) -> np.ndarray:
    return (WEIGHT_STD * rng.standard_normal(shape)).astype(np.float32)

  def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)

  found = {
    "model.embed_tokens.weight": normal(VOCAB, WIDTH),
    "model.norm.weight": ones(WIDTH),
  }
  for layer in range(LAYERS):
    prefix = f"model.layers.{layer}."
    found |= {
      prefix + "input_layernorm.weight": ones(WIDTH),
      prefix + "post_attention_layernorm.weight": ones(WIDTH),
      prefix + "self_attn.q_norm.weight": ones(HEAD_WIDTH),
      prefix + "self_attn.k_norm.weight": ones(HEAD_WIDTH),
      prefix + "self_attn.q_proj.weight": normal(HEADS * HEAD_WIDTH, WIDTH),
      prefix + "self_attn.k_proj.weight": normal(KV_HEADS * HEAD_WIDTH, WIDTH),
      prefix + "self_attn.v_proj.weight": normal(KV_HEADS * HEAD_WIDTH, WIDTH),
      prefix + "self_attn.o_proj.weight": normal(WIDTH, HEADS * HEAD_WIDTH),
      prefix + "mlp.gate_proj.weight": normal(MLP_WIDTH, WIDTH),
      prefix + "mlp.up_proj.weight": normal(MLP_WIDTH, WIDTH),
      prefix + "mlp.down_proj.weight": normal(WIDTH, MLP_WIDTH),
    }
  return found


def checkpoint_config() -> dict[str, object]:
  """The model's `config.json` in the published form of Qwen3."""
  return {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "head_dim": HEAD_WIDTH,
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "initializer_range": WEIGHT_STD,
    "intermediate_size": MLP_WIDTH,
    "max_position_embeddings": 2048,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": NORM_EPS,
    "rope_theta": ROPE_BASE,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "use_sliding_window": False,
    "vocab_size": VOCAB,
  }


def write_checkpoint(folder: str | os.PathLike[str]) -> None:
  """Writes the model as a checkpoint that every engine reads.

  Args:
    folder: made if missing; gets `config.json` and `model.safetensors`.
  """
  place = pathlib.Path(folder)
  place.mkdir(parents=True, exist_ok=True)
  text = json.dumps(checkpoint_config(), indent=2)
  (place / "config.json").write_text(text + "\n", encoding="utf-8")
  save_file(weights(), place / "model.safetensors", metadata={"format": "pt"})
