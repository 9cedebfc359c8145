"""Recipes against a table of their choices, written from the paper."""

import pathlib

import pytest

from experiments import recipes
from scalerl_jax import config as config_lib
from scalerl_jax.config import Config
from scalerl_jax.flags import load_config

FILE = pathlib.Path(recipes.__file__)

# What each recipe chooses (arXiv 2510.13786: the base and its ablations, the
# final recipe, the recipes of others in the appendix). `None`: the recipe has
# no use for the field, and the laptop's default stands there.
ROWS = (
  "loss.name",
  "loss.clip_max",
  "loss.clip_low",
  "loss.clip_high",
  "loss.aggregation",
  "loss.normalization",
  "loss.zero_variance",
  "loss.head_dtype",
  "sampler.head_dtype",
  "pipeline.algorithm",
  "pipeline.max_staleness",
  "pipeline.updates_per_phase",
  "batch.prompts",
  "batch.group_size",
  "length.control",
  "length.min_thinking_tokens",
  "length.max_thinking_tokens",
  "length.answer_tokens",
  "length.phrase",
  "length.truncated",
  "curriculum.no_positive_resampling",
  "curriculum.retire_at",
  "curriculum.min_visits",
  "curriculum.history",
  "curriculum.order",
)
INTERRUPTED = ("interruption", 10, 12, 2, "=", "wrong")
UNIFORM = (False, None, None, None, "uniform")
RETIRED = (True, 0.9, 1, "cumulative", "uniform")
PPO_8 = ("ppo_off_policy", None, 8)
PIPELINE_8 = ("pipeline_rl", 8, None)
CISPO = ("cispo", 4.0, None, None)
FP32, BF16 = "float32", "bfloat16"


def _surrogate(low, high):
  return ("clipped_surrogate", None, low, high)


def _row(loss, weights, head, algorithm, batch, curriculum):
  values = (
    *(*loss, *weights, head, head, *algorithm, *batch),
    *(*INTERRUPTED, *curriculum),
  )
  return dict(zip(ROWS, values, strict=True))


CHOICES = {
  "scalerl": _row(
    CISPO,
    ("prompt_average", "batch_level", "drop"),
    FP32,
    PIPELINE_8,
    (48, 16),
    RETIRED,
  ),
  "base": _row(
    _surrogate(0.2, 0.26),
    ("sample_average", "prompt_level", "keep"),
    BF16,
    PPO_8,
    (48, 16),
    UNIFORM,
  ),
  "deepseek_grpo": _row(
    _surrogate(0.2, 0.2),
    ("sample_average", "prompt_level", "keep"),
    BF16,
    PPO_8,
    (48, 16),
    UNIFORM,
  ),
  "qwen25_dapo": _row(
    _surrogate(0.2, 0.26),
    ("prompt_average", "prompt_level", "drop"),
    BF16,
    PPO_8,
    (80, 16),
    UNIFORM,
  ),
  "magistral": _row(
    _surrogate(0.2, 0.26),
    ("prompt_average", "batch_level", "drop"),
    BF16,
    PIPELINE_8,
    (48, 16),
    UNIFORM,
  ),
  "minimax": _row(
    CISPO,
    ("prompt_average", "prompt_level", "drop"),
    FP32,
    PPO_8,
    (80, 16),
    UNIFORM,
  ),
}
LEFT_OUT = {
  "prompt_level": {"loss.normalization": "prompt_level"},
  "length_penalty": {"length.control": "penalty"},
  "zero_variance_kept": {"loss.zero_variance": "keep"},
  "ppo_off_policy_8": {"pipeline.algorithm": "ppo_off_policy"},
  "bfloat16_head": {
    "loss.head_dtype": "bfloat16",
    "sampler.head_dtype": "bfloat16",
  },
  "sample_average": {"loss.aggregation": "sample_average"},
  "dapo_loss": {"loss.name": "clipped_surrogate"},
  "uniform_sampling": {"curriculum.no_positive_resampling": False},
}


def _flat(config):
  return {
    f"{section}.{field}": value
    for section, fields in config_lib.to_dict(config).items()
    for field, value in fields.items()
  }


def test_every_recipe_is_in_the_table():
  assert list(recipes.RECIPES) == list(CHOICES)
  assert list(recipes.LEAVE_ONE_OUT) == list(LEFT_OUT)
  assert not set(recipes.RECIPES) & set(recipes.LEAVE_ONE_OUT)


@pytest.mark.parametrize("name", CHOICES)
def test_a_recipe_has_its_choices_and_the_laptops_otherwise(name):
  actual, laptop = _flat(recipes.recipe(name)), _flat(Config())
  expected = laptop | {
    field: value for field, value in CHOICES[name].items() if value is not None
  }
  assert actual == expected


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_leave_one_out_differs_in_its_own_choice_alone(name):
  scalerl, changed = _flat(recipes.SCALERL), _flat(recipes.recipe(name))
  differences = {
    field: changed[field]
    for field in scalerl
    if changed[field] != scalerl[field]
  }
  assert differences == LEFT_OUT[name]


def test_choices_that_stay_in_the_defaults_are_the_papers():
  # PPO-off-policy-8, DAPO's offsets and the penalty's seventh of the budget.
  assert recipes.recipe("ppo_off_policy_8").pipeline.updates_per_phase == 8
  loss = recipes.recipe("dapo_loss").loss
  assert (loss.clip_low, loss.clip_high) == (0.2, 0.26)
  penalty = recipes.recipe("length_penalty")
  share = penalty.length.penalty_cache / penalty.sampler.max_completion_tokens
  assert share == pytest.approx(2 / 14, abs=0.01)


def test_no_two_recipes_are_the_same_run():
  every = [*recipes.RECIPES.values(), *recipes.LEAVE_ONE_OUT.values()]
  assert len({config_lib.fingerprint(config) for config in every}) == 14


def test_the_command_line_trains_scalerl():
  assert load_config(str(FILE), []) == recipes.RECIPES["scalerl"]


def test_the_two_lines_of_the_docstring_choose_another(tmp_path):
  lines = [
    line.strip()
    for line in recipes.__doc__.splitlines()
    if line.strip().startswith(("from experiments", "get_config ="))
  ]
  assert len(lines) == 2
  path = tmp_path / "mine.py"
  path.write_text("\n".join(lines))
  assert load_config(str(path), []) == recipes.RECIPES["minimax"]


def test_an_unknown_recipe_is_refused_with_the_list():
  with pytest.raises(ValueError, match="got 'dapo'") as refused:
    recipes.recipe("dapo")
  for name in (*CHOICES, *LEFT_OUT):
    assert name in str(refused.value)
