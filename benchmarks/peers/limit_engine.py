"""What this machine can do at this shape: loops written by hand for it alone.

    python -m benchmarks.peers.limit_engine --checkpoint=DIR --dtype=float32

Nothing here is general. Sampling: every sequence has the same length and no
end, prompts are not shared, nothing is recorded but tokens and log-probs, the
whole of it is one program whose cache grows by 32 columns. Update: rows of one
length, each with its prompt (the package computes a prompt once for its group
and may be faster), no mask, no filter, no metrics; forward, backward and AdamW.
A device for each core, a thread each; each holds half of the sequences.
"""

import argparse
import functools
import importlib.metadata
import math
import os
import time

_CORES = len(os.sched_getaffinity(0))
os.environ["XLA_FLAGS"] = (
  f"--xla_force_host_platform_device_count={_CORES}"
  " --xla_cpu_multi_thread_eigen=false"
)

import engine  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import workloads as work  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

HEADS, KV_HEADS, HEAD_WIDTH = work.HEADS, work.KV_HEADS, work.HEAD_WIDTH
REPEAT = HEADS // KV_HEADS
SEGMENT = 32  # columns by which the cache grows; of 16, 32, 64
BLOCK = math.isqrt(work.VOCAB)  # two sums of so many terms find a token
MICRO_BATCH = 16  # rows of a device; of 8, 16, 32, 64
EVERYONE, SHARED = PartitionSpec(), PartitionSpec("data")
MASKED = -1e30


def load(checkpoint: str) -> dict:
  """The checkpoint's weights, products ready to be multiplied from the left."""
  flat = load_file(f"{checkpoint}/model.safetensors")

  def layer(index: int) -> dict:
    prefix = f"model.layers.{index}."
    return {
      name: np.ascontiguousarray(flat[prefix + key].T)
      for name, key in {
        "q": "self_attn.q_proj.weight",
        "k": "self_attn.k_proj.weight",
        "v": "self_attn.v_proj.weight",
        "o": "self_attn.o_proj.weight",
        "gate": "mlp.gate_proj.weight",
        "up": "mlp.up_proj.weight",
        "down": "mlp.down_proj.weight",
        "norm1": "input_layernorm.weight",
        "norm2": "post_attention_layernorm.weight",
        "q_norm": "self_attn.q_norm.weight",
        "k_norm": "self_attn.k_norm.weight",
      }.items()
    }

  return {
    "table": flat["model.embed_tokens.weight"],
    "norm": flat["model.norm.weight"],
    "layers": [layer(index) for index in range(work.LAYERS)],
  }


def norm(x, scale):
  """RMS norm."""
  mean = jnp.mean(x * x, -1, keepdims=True)
  return x * jax.lax.rsqrt(mean + work.NORM_EPS) * scale


def rotate(x, cos, sin):
  """Rotary embedding of the two halves."""
  low, high = jnp.split(x, 2, -1)
  return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def angles(positions):
  """Cosines and sines of positions."""
  half = HEAD_WIDTH // 2
  turns = positions[..., None] * work.ROPE_BASE ** (-np.arange(half) / half)
  return jnp.cos(turns), jnp.sin(turns)


def make_dot(dtype: str):
  """x @ weight; `bfloat16_dots`: of rounded operands, summed in float32."""
  if dtype == "float32":
    return jnp.dot

  def narrow(a, b):
    return jnp.dot(
      a.astype(jnp.bfloat16),
      b.astype(jnp.bfloat16),
      preferred_element_type=jnp.float32,
    )

  @jax.custom_vjp
  def dot(x, weight):
    return narrow(x, weight)

  dot.defvjp(
    lambda x, weight: (narrow(x, weight), (x, weight)),
    lambda kept, g: (narrow(g, kept[1].T), narrow(kept[0].T, g)),
  )
  return dot


def rows(dot, weights, tokens):
  """Hidden states `[B, T, D]` of whole rows, and keys and values by layer."""
  batch, length = tokens.shape
  cos, sin = (x[:, None] for x in angles(jnp.arange(length)))
  mask = jnp.where(jnp.tril(jnp.ones((length, length), bool)), 0.0, MASKED)
  x = jnp.take(weights["table"], tokens.reshape(-1), axis=0)
  kept = []
  for layer in weights["layers"]:
    h = norm(x, layer["norm1"])

    def heads(name, count, h=h, layer=layer):
      return dot(h, layer[name]).reshape(batch, length, count, HEAD_WIDTH)

    q = rotate(norm(heads("q", HEADS), layer["q_norm"]), cos, sin)
    k = rotate(norm(heads("k", KV_HEADS), layer["k_norm"]), cos, sin)
    v = heads("v", KV_HEADS)
    q = q.reshape(batch, length, KV_HEADS, REPEAT, HEAD_WIDTH)
    scores = jnp.einsum("btkrd,bukd->bkrtu", q * HEAD_WIDTH**-0.5, k) + mask
    out = jnp.einsum("bkrtu,bukd->btkrd", jax.nn.softmax(scores), v)
    x = x + dot(out.reshape(batch * length, -1), layer["o"])
    h = norm(x, layer["norm2"])
    gated = jax.nn.silu(dot(h, layer["gate"])) * dot(h, layer["up"])
    x = x + dot(gated, layer["down"])
    kept.append((k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)))
  return norm(x, weights["norm"]).reshape(batch, length, -1), kept


def draw(weights, hidden, key):
  """A token a row and its log-prob: one uniform number, two sums."""
  logits = jnp.dot(hidden, weights["table"].T)
  top = logits.max(-1, keepdims=True)
  mass = jnp.exp(logits - top).reshape(-1, BLOCK, BLOCK)

  def first_above(terms, target):
    running = jnp.cumsum(terms, -1)
    index = jnp.minimum((running <= target[:, None]).sum(-1), BLOCK - 1)
    before = jnp.take_along_axis(running - terms, index[:, None], 1)[:, 0]
    return index, before

  blocks = mass.sum(-1)
  total = blocks.sum(-1)
  target = jax.random.uniform(key, total.shape) * total
  block, before = first_above(blocks, target)
  inside = jnp.take_along_axis(mass, block[:, None, None], 1)[:, 0]
  within, _ = first_above(inside, target - before)
  token = block * BLOCK + within
  chosen = jnp.take_along_axis(logits, token[:, None], 1)[:, 0]
  return token, chosen - top[:, 0] - jnp.log(total)


def generate(dot, weights, prompts, key):
  """Tokens and log-probs `[N, B]` of every sequence of a device."""
  hidden, cache = rows(dot, weights, prompts)
  key = jax.random.fold_in(key, jax.lax.axis_index("data"))
  batch, first = prompts.shape
  token, logp = draw(weights, hidden[:, -1], key)
  tokens = jnp.zeros((work.COMPLETION, batch), jnp.int32).at[0].set(token)
  logps = jnp.zeros((work.COMPLETION, batch)).at[0].set(logp)

  def step(index, carry):
    token, cache, tokens, logps = carry
    position = first + index
    cos, sin = angles(position)
    x = jnp.take(weights["table"], token, axis=0)
    mask = jnp.where(jnp.arange(cache[0][0].shape[-1]) <= position, 0.0, MASKED)
    written = []
    for layer, (keys, values) in zip(weights["layers"], cache, strict=True):
      h = norm(x, layer["norm1"])

      def heads(name, count, h=h, layer=layer):
        return dot(h, layer[name]).reshape(batch, count, HEAD_WIDTH)

      q = rotate(norm(heads("q", HEADS), layer["q_norm"]), cos, sin)
      k = rotate(norm(heads("k", KV_HEADS), layer["k_norm"]), cos, sin)
      v = heads("v", KV_HEADS)
      keys = jax.lax.dynamic_update_slice(
        keys, k[..., None], (0, 0, 0, position)
      )
      values = jax.lax.dynamic_update_slice(
        values, v[:, :, None], (0, 0, position, 0)
      )
      q = q.reshape(batch, KV_HEADS, REPEAT, HEAD_WIDTH) * HEAD_WIDTH**-0.5
      scores = jnp.einsum("bkrd,bkdt->bkrt", q, keys) + mask
      out = jnp.einsum("bkrt,bktd->bkrd", jax.nn.softmax(scores), values)
      x = x + dot(out.reshape(batch, -1), layer["o"])
      h = norm(x, layer["norm2"])
      gated = jax.nn.silu(dot(h, layer["gate"])) * dot(h, layer["up"])
      x = x + dot(gated, layer["down"])
      written.append((keys, values))
    token, logp = draw(
      weights, norm(x, weights["norm"]), jax.random.fold_in(key, index + 1)
    )
    tokens = jax.lax.dynamic_update_slice(tokens, token[None], (index + 1, 0))
    logps = jax.lax.dynamic_update_slice(logps, logp[None], (index + 1, 0))
    return token, written, tokens, logps

  for start in range(0, work.COMPLETION, SEGMENT):
    wider = ((0, 0),) * 2
    cache = [
      (
        jnp.pad(keys, (*wider, (0, 0), (0, SEGMENT))),
        jnp.pad(values, (*wider, (0, SEGMENT), (0, 0))),
      )
      for keys, values in cache
    ]
    stop = min(start + SEGMENT, work.COMPLETION - 1)
    token, cache, tokens, logps = jax.lax.fori_loop(
      start, stop, step, (token, cache, tokens, logps)
    )
  return tokens, logps


def update(dot, optimizer, weights, state, tokens, behavior_logps, advantages):
  """One AdamW update of the clipped objective over a device's rows."""
  count = len(tokens) // MICRO_BATCH

  def loss(weights, tokens, behavior_logps, advantages):
    hidden, _ = rows(dot, weights, tokens)
    hidden = hidden[:, work.PROMPT - 1 : -1]
    logits = jnp.dot(hidden.reshape(-1, work.WIDTH), weights["table"].T)
    target = tokens[:, work.PROMPT :].reshape(-1, 1)
    chosen = jnp.take_along_axis(logits, target, 1)[:, 0]
    logps = chosen - jax.nn.logsumexp(logits, -1)
    ratio = jnp.exp(logps.reshape(behavior_logps.shape) - behavior_logps)
    ratio = jnp.minimum(ratio, jnp.clip(ratio, 0.8, 1.2))
    return -(ratio * advantages[:, None]).mean() / count

  def add(total, part):
    found = jax.grad(loss)(weights, *part)
    return jax.tree.map(jnp.add, total, found), None

  parts = [
    x.reshape(count, MICRO_BATCH, *x.shape[1:])
    for x in (tokens, behavior_logps, advantages)
  ]
  zeros = jax.tree.map(jnp.zeros_like, weights)
  gradient, _ = jax.lax.scan(add, zeros, tuple(parts))
  gradient = jax.lax.pmean(gradient, "data")
  change, state = optimizer.update(gradient, state, weights)
  return optax.apply_updates(weights, change), state


def main() -> None:
  """Answers the runner."""
  parser = argparse.ArgumentParser()
  parser.add_argument("--checkpoint", required=True)
  parser.add_argument("--dtype", choices=("float32", "bfloat16_dots"))
  parser.add_argument("--workloads", required=True)
  options = parser.parse_args()
  auto = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((_CORES,), ("data",), axis_types=auto)
  dot = make_dot(options.dtype)
  optimizer = optax.adamw(work.LEARNING_RATE)

  def mapped(function, inside, outside, donated=()):
    return jax.jit(
      jax.shard_map(
        function,
        mesh=mesh,
        in_specs=inside,
        out_specs=outside,
        check_vma=False,
      ),
      donate_argnums=donated,
    )

  by_column = PartitionSpec(None, "data")
  sample = mapped(
    functools.partial(generate, dot),
    (EVERYONE, SHARED, EVERYONE),
    (by_column, by_column),
  )
  learn = mapped(
    functools.partial(update, dot, optimizer),
    (EVERYONE, EVERYONE, SHARED, SHARED, SHARED),
    (EVERYONE, EVERYONE),
    donated=(0, 1),
  )
  everywhere = NamedSharding(mesh, EVERYONE)
  weights = jax.device_put(load(options.checkpoint), everywhere)
  alike = np.stack(work.sampling().prompts)
  grouped = np.repeat(np.stack(work.step().prompts), work.GROUP, axis=0)

  def sampling(repeat: int) -> engine.Answer:
    start = time.perf_counter()
    found = sample(weights, alike, jax.random.key(repeat))
    tokens, logps = jax.device_get(found)
    seconds = time.perf_counter() - start
    assert np.isfinite(logps).all()
    return {"seconds": seconds, "tokens": tokens.size, "extra": {}}

  held = [jax.tree.map(jnp.copy, weights)]
  held.append(jax.device_put(optimizer.init(weights), everywhere))

  def step(repeat: int) -> engine.Answer:
    start = time.perf_counter()
    found = sample(held[0], grouped, jax.random.key(repeat))
    tokens, logps = (x.T for x in jax.device_get(found))
    sampled = time.perf_counter()
    rewards = np.array([work.reward(row) for row in tokens])
    rewards = rewards.reshape(-1, work.GROUP)
    advantages = rewards - rewards.mean(1, keepdims=True)
    advantages /= rewards.std()
    batch = np.concatenate([grouped, tokens], axis=1)
    held[:] = learn(
      *held, batch, logps, advantages.reshape(-1).astype(np.float32)
    )
    jax.block_until_ready(held)
    end = time.perf_counter()
    return {
      "seconds": end - start,
      "tokens": tokens.size,
      "extra": {"rollout": sampled - start, "update": end - sampled},
    }

  known = {"sampling": sampling, "step": step}
  engine.serve(
    {name: known[name] for name in options.workloads.split(",")},
    {"jax": importlib.metadata.version("jax")},
  )


if __name__ == "__main__":
  main()
