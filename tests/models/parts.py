"""Small published checkpoints, and a policy read in both of its ways."""

import contextlib
import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

CHECKPOINTS = pathlib.Path(__file__).parents[1] / "fixtures/checkpoints"
NAMES = (
  *("llama3", "llama_tied", "qwen2", "qwen3", "qwen3_moe", "llama4"),
  *("qwen3_moe_sparse", "llama4_interleaved"),
)
PROMPT = 8  # tokens that are prefilled


@functools.cache
def reference(name):
  """Rows `[4, 40]`: two with known log-probs, the greedy one, padded, twice."""
  known = load_file(CHECKPOINTS / name / "reference.safetensors")
  greedy = json.loads((CHECKPOINTS / name / "greedy.json").read_text())
  rows = np.zeros((4, 40), np.int32)
  rows[:2] = known["input_ids"]
  assert len(greedy["prompt"]) == PROMPT
  both = greedy["prompt"] + greedy["greedy"]
  rows[2:, : len(both)] = both
  return rows, known["token_logprobs"], greedy["greedy"]


def on(mesh):
  """The mesh as the context, or no context at all."""
  return jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext()


@functools.partial(jax.jit, static_argnums=0)
def both_ways(graph, params, rows):
  """Log-probs `[B, T, V]` of the full forward, and from PROMPT on of prefill
  and decode, token by token through a ring that goes round.
  """
  policy = nnx.merge(graph, params)
  count, length = rows.shape
  ids = jnp.arange(count, dtype=jnp.int32)
  prompts = rows[:, :PROMPT]
  hidden, key, value = policy.prefill(prompts, jnp.ones_like(prompts))
  cache = policy.empty_cache(
    prompts=count,
    slots=count,
    prompt_tokens=PROMPT,
    completion_tokens=length - PROMPT,
  )
  cache = dataclasses.replace(
    cache,
    prompt_k=tuple(key) if policy.unrolled else key,
    prompt_v=tuple(value) if policy.unrolled else value,
    prompt_length=jnp.full((count,), PROMPT, jnp.int32),
    members=ids[:, None],
    group=ids,
    clock=jnp.int32(5),
  )
  prepared = policy.prepare(length)

  def step(cache, scanned):
    tokens, position = scanned
    positions = jnp.broadcast_to(position, tokens.shape)
    hidden, cache = policy.decode(tokens, positions, cache, prepared)
    return cache, policy.head(hidden)

  positions = jnp.arange(PROMPT, length, dtype=jnp.int32)
  _, later = jax.lax.scan(step, cache, (rows[:, PROMPT:].T, positions))
  first = policy.head(hidden[:, -1:])
  cached = jnp.concatenate([first, later.transpose(1, 0, 2)], axis=1)
  return jax.nn.log_softmax(policy(rows)), jax.nn.log_softmax(cached)


def check_reference(policy, name, mesh=None):
  """Log-probs within 1e-4 and greedy tokens equal, both ways."""
  rows, known, greedy = reference(name)
  graph, params = nnx.split(policy)
  with on(mesh):
    full, cached = map(np.asarray, both_ways(graph, params, rows))
  at = np.arange(rows.shape[1] - 1)
  for row, expected in zip((0, 1), known, strict=True):
    token = rows[row, 1:]
    np.testing.assert_allclose(full[row, at, token], expected, atol=1e-4)
    np.testing.assert_allclose(
      cached[row, at[: 1 - PROMPT], token[PROMPT - 1 :]],
      expected[PROMPT - 1 :],
      atol=1e-4,
    )
  count = len(greedy)
  # Each token is the best after all before it, so greedy decoding gives these.
  assert full[2, PROMPT - 1 :].argmax(-1)[:count].tolist() == greedy
  assert cached[2].argmax(-1)[:count].tolist() == greedy
