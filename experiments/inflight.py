"""In-flight weight updates, held against a slow reference decode.

Trains the quickstart's recipe for some steps under the logical schedule with
chunks of 3 tokens and a publication after every chunk, keeps every finished
rollout and every published version, and decodes each rollout again, one at a
time, switching weights at the recorded positions and keeping the cache.

Command:  python -m experiments.inflight --workdir=runs/inflight
Time:     about 1 minute on two CPU cores
Reaches:  5,120 rollouts, .81 of them with several versions, largest gap 3.0e-5
Promises: at least half of the rollouts carry two or more policy versions, and
          the largest difference of a token's log-prob is at most 1e-4 nats.
"""

import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Sequence

from absl import app, flags, logging

from scalerl_jax.config import Config
from scalerl_jax.run.host import prepare_cpu


def get_config() -> Config:
  """ScaleRL on a laptop with weights that change under every completion."""
  base = Config()
  return dataclasses.replace(
    base,
    run=dataclasses.replace(base.run, steps=40),
    sampler=dataclasses.replace(base.sampler, chunk=3),
    # A step that moves the weights visibly, so that a wrong switch shows.
    optimizer=dataclasses.replace(
      base.optimizer, learning_rate=3e-3, warmup_steps=0
    ),
    batch=dataclasses.replace(base.batch, prompts=8, micro_batch=32),
    pipeline=dataclasses.replace(base.pipeline, chunks_per_step=1),
    evaluation=dataclasses.replace(base.evaluation, every=40),
  )


def reference_logps(policies: Sequence, rollout, row: int, warp: dict) -> list:
  """Log-probs of one completion, a token at a time, weights as recorded.

  Args:
    policies: graph definition and parameters of each version.
    rollout: a finished group.
    row: the completion.
    warp: keywords of `warp_logits`.
  """
  import jax.numpy as jnp

  warp_key = tuple(sorted(warp.items()))
  first, step = _programs(warp_key)
  prompt = rollout.prompt[: rollout.prompt_length][None]
  tokens, versions = rollout.tokens[row], rollout.versions[row]
  budget = rollout.tokens.shape[1]
  # The group's prompt was prefilled when its first token was drawn.
  logp, cache = first(*policies[versions[0]], prompt, tokens[:1], budget)
  found = [logp]
  for t in range(1, int(rollout.length[row])):
    position = jnp.array([prompt.shape[1] + t - 1], jnp.int32)
    logp, cache = step(
      *policies[versions[t]], tokens[t - 1 : t], position, cache, tokens[t:][:1]
    )
    found.append(logp)
  return [float(logp[0]) for logp in found]


@functools.cache
def _programs(warp: tuple) -> tuple:
  """The two programs of the reference: prompt and first token; one token."""
  import jax
  import jax.numpy as jnp
  from flax import nnx

  from scalerl_jax.objectives.logprobs import token_logps, warp_logits

  def scored(policy, hidden, token):
    return token_logps(warp_logits(policy.head(hidden), **dict(warp)), token)

  @functools.partial(jax.jit, static_argnums=(0, 4))
  def first(graph, params, prompt, token, budget):
    policy = nnx.merge(graph, params)
    hidden, key, value = policy.prefill(prompt, jnp.ones_like(prompt))
    length = prompt.shape[1]
    cache = policy.empty_cache(
      prompts=1, slots=1, prompt_tokens=length, completion_tokens=budget
    )
    cache = dataclasses.replace(
      cache,
      prompt_k=tuple(key) if policy.unrolled else key,
      prompt_v=tuple(value) if policy.unrolled else value,
      prompt_length=jnp.array([length], jnp.int32),
    )
    return scored(policy, hidden[:, -1], token), cache

  @functools.partial(jax.jit, static_argnums=0)
  def step(graph, params, last, position, cache, token):
    policy = nnx.merge(graph, params)
    hidden, cache = policy.decode(last, position, cache)
    return scored(policy, hidden, token), cache

  return first, step


def check(workdir: pathlib.Path) -> dict[str, float]:
  """Trains, decodes again, and returns what was found."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  from scalerl_jax.run.train import Run
  from scalerl_jax.sampling.sampler import warp_settings

  if workdir.exists():
    raise ValueError(f"--workdir must be a new folder, {str(workdir)!r} exists")
  config = get_config()
  run = Run(config, str(workdir))
  published, rollouts = {}, []

  class Recorder:
    """The run's transport, remembering what crosses it."""

    def __init__(self, inner):
      self.inner = inner

    def publish(self, version, params):
      self.inner.publish(version, params)
      published[version] = jax.tree.map(jnp.copy, self.inner.fetch()[1])

    def fetch(self):
      return self.inner.fetch()

    def put(self, scored):
      rollouts.append(scored.rollout)
      self.inner.put(scored)

    def get(self):
      return self.inner.get()

  run.train(wrap_transport=Recorder)
  graph = run.learner.settings.policy
  policies = [(graph, published[v]) for v in range(len(published))]
  warp = warp_settings(config.sampler)
  several, gap = [], 0.0
  for rollout in rollouts:
    for row in range(config.batch.group_size):
      length = rollout.length[row]
      several.append(len(set(rollout.versions[row, :length].tolist())) > 1)
      again = np.array(reference_logps(policies, rollout, row, warp))
      recorded = rollout.behavior_logps[row, :length]
      gap = max(gap, float(np.abs(again - recorded).max()))
  return {
    "rollouts": len(several),
    "several_versions": float(np.mean(several)),
    "max_logp_gap": gap,
  }


def main(argv: list[str]) -> None:
  """Prints one JSON line; exits 1 when a promise is not kept."""
  del argv
  logging.set_verbosity(logging.WARNING)
  try:
    found = check(pathlib.Path(flags.FLAGS.workdir))
  except ValueError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
  print(json.dumps(found))
  if found["several_versions"] < 0.5 or found["max_logp_gap"] > 1e-4:
    sys.exit(1)


if __name__ == "__main__":
  prepare_cpu()
  flags.DEFINE_string("workdir", None, "a new folder.", required=True)
  app.run(main)
