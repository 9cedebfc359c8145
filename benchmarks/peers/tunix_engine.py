"""google-tunix: its sampler, and a step of its GRPO learner.

    python tunix_engine.py --checkpoint=DIR --dtype=float32

Settings that matter, all chosen for Tunix: the KV cache is as long as prompt
and completion and no longer; everything is compiled before it is timed; every
batch of the long tail has a cache of its own length; beta is 0, so that no
reference policy is computed.
"""
# pyright: reportMissingImports=false

import argparse
import importlib.metadata
import time

import engine
import jax
import jax.numpy as jnp
import numpy as np
import optax
import workloads
from flax import nnx
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params as qwen3_params
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

# Prompts a micro-batch; each stands for a group of 8.
ROLLOUT_MICRO_BATCH = 32
TRAIN_MICRO_BATCH = 4  # of 2, 4, 8, 16 and 32


class Numbers:
  """A tokenizer of texts such as "17 4 1001": the ids themselves."""

  def encode(self, text: str) -> list[int]:
    """Ids of a text."""
    return [int(word) for word in text.split()]

  def decode(self, ids: list[int]) -> str:
    """Text of ids."""
    return " ".join(map(str, ids))

  def bos_id(self) -> None:
    """No token begins a prompt."""

  def eos_id(self) -> int:
    """An id that is never drawn."""
    return workloads.END

  def pad_id(self) -> int:
    """In no prompt."""
    return workloads.PAD


def texts(prompts: list[np.ndarray]) -> list[str]:
  """Prompts as the texts that `Numbers` reads."""
  return [Numbers().decode(prompt.tolist()) for prompt in prompts]


def load(checkpoint: str, dtype, mesh=None) -> qwen3.Qwen3:
  """The checkpoint as Tunix's own Qwen3."""
  config = qwen3.ModelConfig(
    num_layers=workloads.LAYERS,
    vocab_size=workloads.VOCAB,
    embed_dim=workloads.WIDTH,
    hidden_dim=workloads.MLP_WIDTH,
    num_heads=workloads.HEADS,
    head_dim=workloads.HEAD_WIDTH,
    num_kv_heads=workloads.KV_HEADS,
    rope_theta=int(workloads.ROPE_BASE),
    norm_eps=workloads.NORM_EPS,
    use_tied_embedding=True,
    dtype=dtype,
    param_dtype=dtype,
  )
  return qwen3_params.create_model_from_safe_tensors(
    checkpoint, config, mesh=mesh, dtype=dtype
  )


class Sampling:
  """A batch of requests at its exact shape, run to its longest length."""

  def __init__(self, model: qwen3.Qwen3, requests: workloads.Requests):
    self._requests = requests
    self._texts = texts(requests.prompts)
    self._prompt = max(map(len, requests.prompts))
    self._most = int(requests.lengths.max())
    self._sampler = Sampler(
      model,
      Numbers(),
      CacheConfig(
        cache_size=self._prompt + self._most,
        num_layers=workloads.LAYERS,
        num_kv_heads=workloads.KV_HEADS,
        head_dim=workloads.HEAD_WIDTH,
      ),
    )

  def __call__(self, seed: int) -> None:
    """Samples every sequence of the batch, with log-probs."""
    found = self._sampler(
      self._texts,
      max_generation_steps=self._most,
      max_prompt_length=self._prompt,
      temperature=1.0,
      top_p=1.0,
      seed=seed,
      return_logprobs=True,
    )
    assert {len(tokens) for tokens in found.tokens} == {self._most}
    assert found.logprobs is not None


def sampled(model: qwen3.Qwen3, requests: workloads.Requests):
  """A workload of the protocol: batches of 256, one after the other."""
  ready = [
    Sampling(model, batch)
    for batch in workloads.batches(requests, workloads.SEQUENCES)
  ]

  def run(repeat: int) -> engine.Answer:
    start = time.perf_counter()
    for number, batch in enumerate(ready):
      batch(1000 * repeat + number)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens": requests.tokens, "extra": {}}

  return run


def reward(prompts, completions, **_) -> list[float]:
  """The workloads' reward, of texts."""
  return [
    workloads.reward(np.array(Numbers().encode(text))) for text in completions
  ]


def stepped(checkpoint: str, dtype):
  """A workload of the protocol: rollouts, rewards and one GRPO update."""
  requests = workloads.step()
  mesh = jax.make_mesh(
    (1, 1),
    ("fsdp", "tp"),
    devices=jax.devices()[:1],
    axis_types=(jax.sharding.AxisType.Auto,) * 2,
  )
  model = load(checkpoint, dtype, mesh)
  cluster = rl_cluster.RLCluster(
    actor=model,
    tokenizer=Numbers(),
    cluster_config=rl_cluster.ClusterConfig(
      role_to_mesh={
        rl_cluster.Role.ACTOR: mesh,
        rl_cluster.Role.ROLLOUT: mesh,
        rl_cluster.Role.REFERENCE: mesh,
      },
      training_config=rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.adamw(workloads.LEARNING_RATE),
        eval_every_n_steps=1_000_000,
        max_steps=1_000_000,
        mini_batch_size=len(requests.prompts),
        train_micro_batch_size=TRAIN_MICRO_BATCH,
        rollout_micro_batch_size=ROLLOUT_MICRO_BATCH,
        compute_logps_micro_batch_size=ROLLOUT_MICRO_BATCH,
        pbar_description=None,
      ),
      rollout_config=RolloutConfig(
        max_tokens_to_generate=workloads.COMPLETION,
        max_prompt_length=workloads.PROMPT,
        kv_cache_size=workloads.PROMPT + workloads.COMPLETION,
        temperature=1.0,
        top_p=1.0,
        return_logprobs=True,
        # No seed: the sampler donates the key it is given, so that a second
        # step would find it deleted.
      ),
    ),
  )
  learner = GRPOLearner(
    cluster,
    GRPOConfig(num_generations=workloads.GROUP, num_iterations=1, beta=0.0),
    reward_fns=reward,
  )

  def loop(wait) -> None:
    def batches():
      while True:
        # An update may still run when the next batch is asked for.
        jax.block_until_ready(nnx.state(cluster.actor_trainer.model))
        wait()
        yield {"prompts": np.array(texts(requests.prompts))}

    learner.train(batches())

  turns = engine.Turns(loop)
  tokens = workloads.GROUP * requests.tokens

  def run(_: int) -> engine.Answer:
    return {"seconds": turns.step(), "tokens": tokens, "extra": {}}

  return run


def main() -> None:
  """Serves the workloads that were asked for."""
  parser = argparse.ArgumentParser()
  parser.add_argument("--checkpoint", required=True)
  parser.add_argument("--dtype", default="float32")
  parser.add_argument("--workloads", default="sampling,long_tail,step")
  options = parser.parse_args()
  dtype = jnp.dtype(options.dtype)
  made = {}
  for name in options.workloads.split(","):
    if name == "step":
      made[name] = stepped(options.checkpoint, dtype)
    else:
      requests = getattr(workloads, name)()
      made[name] = sampled(load(options.checkpoint, dtype), requests)
  engine.serve(
    made,
    {
      name: importlib.metadata.version(name)
      for name in ("google-tunix", "jax", "flax")
    },
  )


if __name__ == "__main__":
  main()
