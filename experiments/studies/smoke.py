"""Any variant as a run of seconds: its choices, at the smallest sizes."""

import dataclasses
import math

from scalerl_jax.config import Config

# Compiling is most of a tiny run, and needs no good code.
XLA_FLAGS = (
  "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
_STEPS = 6


def shrink(config: Config) -> Config:
  """`config` on chains modulo 2, with a policy of a few hundred parameters.

  What variants differ in stays different: sizes are divided, not set. Seven
  evaluations are as many as a fit needs, and no more.

  >>> shrink(Config()).run.steps
  6
  """
  group_size = max(config.batch.group_size // 4, 2)
  prompts = max(config.batch.prompts // 8, 1)
  return dataclasses.replace(
    config,
    run=dataclasses.replace(config.run, steps=_STEPS),
    task=dataclasses.replace(
      config.task,
      train_prompts=24,
      heldout_prompts=8,
      modulus=2,
      min_operations=2,
      max_operations=3,
    ),
    # A policy of so many steps is right now and then, so that groups are mixed
    # and updates are made.
    supervised=dataclasses.replace(
      config.supervised,
      steps=60,
      batch_size=32,
      learning_rate=2e-2,
      error_alpha=0.2,
      guess_share=0.25,
    ),
    model=dataclasses.replace(
      config.model,
      width=max(config.model.width // 4, 8),
      num_layers=1,
      num_heads=max(config.model.num_heads // 2, 1),
      num_kv_heads=max(config.model.num_kv_heads // 2, 1),
      head_width=8,
      mlp_width=max(config.model.mlp_width // 8, 8),
    ),
    sampler=dataclasses.replace(
      config.sampler,
      slots=16,
      chunk=3,
      max_prompt_tokens=5,
      max_completion_tokens=max(config.sampler.max_completion_tokens // 2, 4),
    ),
    length=dataclasses.replace(
      config.length,
      min_thinking_tokens=2,
      max_thinking_tokens=3,
      answer_tokens=2,
    ),
    batch=dataclasses.replace(
      config.batch,
      prompts=prompts,
      group_size=group_size,
      micro_batch=math.gcd(8, prompts * group_size),
    ),
    optimizer=dataclasses.replace(
      config.optimizer,
      learning_rate=10 * config.optimizer.learning_rate,
      warmup_steps=0,
    ),
    pipeline=dataclasses.replace(
      config.pipeline,
      max_staleness=min(config.pipeline.max_staleness, 2),
      updates_per_phase=min(config.pipeline.updates_per_phase, 2),
      chunks_per_step=1,
    ),
    evaluation=dataclasses.replace(config.evaluation, every=1, samples=4),
    checkpoint=dataclasses.replace(config.checkpoint, every=_STEPS),
  )
