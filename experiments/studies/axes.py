"""The 16 studies as values: an axis, and a config for each place on it.

The first variant is what the others are compared with: ScaleRL's choice.
Within a study a seed means the same base policy, prompts, evaluation set and
random numbers, wherever the axis leaves them alone.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from experiments import quickstart
from scalerl_jax.config import Config, override


@dataclasses.dataclass(frozen=True)
class Study:
  """One axis.

  Attributes:
    axis: fields in which variants may differ, `section.field`; empty for whole
      recipes.
    variants: a config each, by name; the first is the reference.
    compute: axes that curves are fitted against, columns of `curve.csv`.
    cores: of one run; two give sampler and learner a device each, so that
      device-seconds hold their waiting for each other.
    note: what a reader of the table must know.
  """

  axis: tuple[str, ...]
  variants: dict[str, Config]
  compute: tuple[str, ...] = ("flops_full",)
  cores: int = 1
  note: str = ""


BASE = quickstart.get_config()


def _variants(**changes: dict[str, Any]) -> dict[str, Config]:
  """The laptop's ScaleRL with `{"section.field": value}` changed."""
  return {name: override(BASE, fields) for name, fields in changes.items()}


def _loss_type() -> Study:
  return Study(
    axis=(
      *("loss.name", "loss.clip_low", "loss.clip_high"),
      "loss.aggregation",  # GSPO proper averages over samples
    ),
    variants=_variants(
      cispo={},
      dapo={"loss.name": "clipped_surrogate"},
      gspo={
        "loss.name": "gspo",
        "loss.clip_low": 0.02,
        "loss.clip_high": 0.02,
        "loss.aggregation": "sample_average",
      },
    ),
    note="dapo is the clipped surrogate with .2 and .26; gspo averages over"
    " samples, and its offsets, .02, are for completions of fifteen tokens.",
  )


def _off_policy() -> Study:
  phases = {"pipeline.algorithm": "ppo_off_policy"}
  return Study(
    axis=("pipeline.algorithm", "pipeline.updates_per_phase"),
    variants=_variants(
      pipeline_rl_8={},
      ppo_off_policy_8=phases,  # 8 is the default of updates_per_phase
      ppo_off_policy_1=phases | {"pipeline.updates_per_phase": 1},
    ),
    compute=("device_seconds", "step"),
    cores=2,
    note="against steps the algorithms are expected to be alike; what they"
    " differ in is the time that sampler and learner wait for each other, which"
    " device-seconds hold (and other load on the machine, too).",
  )


def _aggregation() -> Study:
  names = ("prompt_average", "sample_average", "token_average", "constant")
  return Study(
    axis=("loss.aggregation",),
    variants=_variants(**{name: {"loss.aggregation": name} for name in names}),
  )


def _normalization() -> Study:
  names = ("batch_level", "prompt_level", "none")
  return Study(
    axis=("loss.normalization",),
    variants=_variants(
      **{name: {"loss.normalization": name} for name in names}
    ),
  )


def _precision() -> Study:
  sampler = {"sampler.head_dtype": "bfloat16"}
  learner = {"loss.head_dtype": "bfloat16"}
  return Study(
    axis=("sampler.head_dtype", "loss.head_dtype"),
    variants=_variants(
      both=dict[str, Any](),
      sampler_only=learner,
      learner_only=sampler,
      none=sampler | learner,
    ),
    note="names say which side has the FP32 head; at 0.10 M parameters and"
    " fifteen tokens a coarser head was not seen to matter.",
  )


def _zero_variance() -> Study:
  names = ("drop", "keep", "refill")
  return Study(
    axis=("loss.zero_variance",),
    variants=_variants(
      **{name: {"loss.zero_variance": name} for name in names}
    ),
    note="flops_full charges the backward pass of zero-variance prompts in"
    " every variant, and the groups that refill replaced; flops_spent is what"
    " was computed.",
    compute=("flops_full", "flops_spent"),
  )


def _curriculum() -> Study:
  return Study(
    axis=("curriculum.order", "curriculum.no_positive_resampling"),
    variants=_variants(
      no_positive_resampling={"curriculum.no_positive_resampling": True},
      uniform={},
      easy_to_hard={"curriculum.order": "easy_to_hard"},
    ),
    note="400 steps are 4.8 epochs of the 4,000 prompts.",
  )


def _length_control() -> Study:
  names = ("interruption", "none", "penalty")
  return Study(
    axis=("length.control",),
    variants=_variants(**{name: {"length.control": name} for name in names}),
  )


def _batch_size() -> Study:
  # As many completions in all, and as many evaluations.
  def batch(prompts: int) -> dict[str, Any]:
    steps = 400 * 48 // prompts
    return {
      "batch.prompts": prompts,
      "run.steps": steps,
      "evaluation.every": steps // 40,
    }

  return Study(
    axis=("batch.prompts", "run.steps", "evaluation.every"),
    variants=_variants(
      prompts_48=batch(48), prompts_16=batch(16), prompts_96=batch(96)
    ),
    note="as many completions in all: 400 steps of 48 prompts, 1,200 of 16, 200"
    " of 96.",
  )


def _group_size() -> Study:
  return Study(
    axis=("batch.group_size", "batch.prompts"),
    variants=_variants(
      group_16={},
      group_8={"batch.group_size": 8, "batch.prompts": 96},
      group_32={"batch.group_size": 32, "batch.prompts": 24},
    ),
    note="768 completions a step in every variant.",
  )


def _generation_length() -> Study:
  return Study(
    axis=("sampler.max_completion_tokens",),
    variants=_variants(
      **{
        f"tokens_{n}": {"sampler.max_completion_tokens": n} for n in (15, 12, 9)
      }
    ),
    note="a chain of n operations needs n + 3 tokens when every step is"
    " written: a budget of 12 or 9 is too short for the longest.",
  )


def _model_size() -> Study:
  def size(heads: int) -> dict[str, Any]:
    return {
      "model.width": 16 * heads,
      "model.num_heads": heads,
      "model.num_kv_heads": heads,
      "model.mlp_width": 40 * heads,
    }

  return Study(
    axis=(
      *("model.width", "model.num_heads", "model.num_kv_heads"),
      "model.mlp_width",
    ),
    variants=_variants(width_64=size(4), width_32=size(2), width_96=size(6)),
    note="each size has a base policy of its own, from the same supervised"
    " texts: R_0 differs.",
  )


def _multitask() -> Study:
  return Study(
    axis=("task.name", "task.mixture"),
    variants=_variants(
      chain_arithmetic={},
      chain_logic={"task.name": "chain_logic"},
      mixture={
        "task.name": "mixture",
        "task.mixture": "chain_arithmetic:1,chain_logic:1",
      },
    ),
    note="each has a base policy of its own; the mixture sees half as many"
    " prompts of a task a step, and compute is that of the whole run.",
  )


def _recipes() -> Study:
  from experiments.recipes import RECIPES

  return Study(
    axis=(),
    variants=dict(RECIPES),
    note="qwen25_dapo and minimax have 80 prompts a step, the others 48.",
  )


def _leave_one_out() -> Study:
  from experiments.recipes import LEAVE_ONE_OUT, RECIPES

  return Study(
    axis=(), variants={"scalerl": RECIPES["scalerl"]} | LEAVE_ONE_OUT
  )


def _learning_rate() -> Study:
  rates = {"rate_3e-4": 3e-4, "rate_1e-4": 1e-4, "rate_1e-3": 1e-3}
  return Study(
    axis=("optimizer.learning_rate",),
    variants=_variants(
      **{
        name: {"optimizer.learning_rate": rate} for name, rate in rates.items()
      }
    ),
  )


_STUDIES: dict[str, Callable[[], Study]] = {
  "loss_type": _loss_type,
  "off_policy": _off_policy,
  "aggregation": _aggregation,
  "normalization": _normalization,
  "precision": _precision,
  "zero_variance": _zero_variance,
  "curriculum": _curriculum,
  "length_control": _length_control,
  "batch_size": _batch_size,
  "group_size": _group_size,
  "generation_length": _generation_length,
  "model_size": _model_size,
  "multitask": _multitask,
  "recipes": _recipes,
  "leave_one_out": _leave_one_out,
  "learning_rate": _learning_rate,
}
NAMES = tuple(_STUDIES)


def load_study(name: str) -> Study:
  """The study of this name.

  Raises:
    ValueError: no such study; the sentence lists those there are.

  >>> load_study("normalization").axis
  ('loss.normalization',)
  """
  if name not in _STUDIES:
    raise ValueError(f"--study must be one of {', '.join(NAMES)}, got {name!r}")
  return _STUDIES[name]()


def with_seed(config: Config, seed: int) -> Config:
  """The variant's run of one seed; everything else stays.

  >>> with_seed(BASE, 2) == override(BASE, {"run.seed": 2})
  True
  """
  return override(config, {"run.seed": seed})
