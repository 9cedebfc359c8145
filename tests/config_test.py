"""Every refusal of a config, in one sentence; round trips; overrides."""

import ast
import dataclasses
import json
import subprocess
import sys

import pytest

from scalerl_jax import config
from scalerl_jax.config import (
  BatchConfig,
  CheckpointConfig,
  Config,
  CurriculumConfig,
  EvaluationConfig,
  LengthConfig,
  LossConfig,
  ModelConfig,
  OptimizerConfig,
  PipelineConfig,
  RunConfig,
  SamplerConfig,
  SupervisedConfig,
  TaskConfig,
)
from tests.runs import TINY, vary

NAN, INF = float("nan"), float("inf")
LOSSES = ", ".join(config.LOSSES)
SECTIONS = {f.name: type(f.default) for f in dataclasses.fields(Config)}
FIELDS = [
  (section, field.name)
  for section, kind in SECTIONS.items()
  for field in dataclasses.fields(kind)
]
# (section.field, values outside its domain, what else it needs, the rule)
OUTSIDE = [
  ("run.seed", (-1, 2**64), {}, ""),
  ("run.steps", (0, -3), {}, "above 0"),
  ("run.forecast_axis", ("", "flops", "STEP"), {}, "one of step, "),
  ("run.early_stop_gain", (-0.1, 1.0, NAN), {}, "in [0, 1), 0 to run"),
  ("run.trace_steps", (-1,), {}, "at least 0, 0 for no timeline"),
  ("run.early_stop_confidence", (0.4, 1.0, NAN), {}, "in [0.5, 1)"),
  ("run.forecast_level", (0.0, 1.0, 1.5, -0.1, NAN), {}, "inside (0, 1)"),
  (
    "task.name",
    ("", "chess"),
    {},
    "one of chain_arithmetic, chain_logic, jsonl, parquet, tfds, reasoning_gym,"
    " mixture",
  ),
  ("task.seed", (-1, 2**64), {}, ""),
  ("task.train_prompts", (0, -1), {}, "above 0"),
  ("task.heldout_prompts", (0, -1), {}, "above 0"),
  ("task.modulus", (1, 17, -2), {}, "in 2..16"),
  ("task.min_operations", (0, -1), {}, "above 0"),
  ("task.min_operations", (13,), {}, "at most task.max_operations (12)"),
  ("task.path", ("prompts.jsonl",), {}, "empty otherwise"),
  ("task.path", ("",), {"name": "jsonl"}, "when one of jsonl, parquet, tfds"),
  ("task.path", ("",), {"name": "tfds"}, "when one of jsonl, parquet, tfds"),
  ("task.prompt_column", ("",), {}, "a name"),
  ("task.answer_column", ("",), {}, "a name"),
  ("task.split", ("",), {}, "a name"),
  ("task.dataset", ("gcd",), {}, "empty otherwise"),
  ("task.dataset", ("",), {"name": "reasoning_gym"}, "the name of a dataset"),
  ("task.parameters", ("a=1",), {}, "empty where 'reasoning_gym' is no task"),
  ("task.verifier", ("", "judge"), {}, "one of own, exact, stated, math"),
  ("task.verifier_workers", (0, -1), {}, "above 0"),
  ("task.verifier_seconds", (0.0, -1.0, INF, NAN), {}, "above 0 and finite"),
  ("task.verifier_megabytes", (0,), {}, "above 0"),
  ("task.thinking_end", ("",), {}, "a text"),
  ("task.long_prompts", ("", "cut"), {}, "one of refuse, drop"),
  ("task.mixture", ("chain_logic:1",), {}, "empty otherwise"),
  ("task.mixture", ("",), {"name": "mixture"}, "when task.name is 'mixture'"),
  ("supervised.steps", (-1,), {}, "0 or more"),
  ("supervised.batch_size", (0, -1), {}, "above 0"),
  ("supervised.learning_rate", (0.0, -1e-3, NAN, INF), {}, "above 0"),
  ("supervised.warmup_fraction", (-0.1, 1.0, NAN), {}, "in [0, 1)"),
  ("supervised.seed", (-1, 2**64), {}, ""),
  ("supervised.error_alpha", (0.0, -1.0, NAN, INF), {}, "above 0"),
  ("supervised.error_beta", (0.0, -1.0, NAN, INF), {}, "above 0"),
  ("supervised.guess_share", (-0.1, 1.1, NAN), {}, "in [0, 1]"),
  ("supervised.stop_early_share", (-0.1, 1.1, NAN), {}, "in [0, 1]"),
  ("model.width", (0, -1), {}, "above 0"),
  ("model.num_layers", (0, -1), {}, "above 0"),
  ("model.num_heads", (0, -4), {}, "above 0"),
  ("model.num_heads", (3, 6), {}, "a multiple of model.num_kv_heads (4)"),
  ("model.num_kv_heads", (0, -1), {}, "above 0"),
  ("model.head_width", (0, -2), {}, "above 0"),
  ("model.head_width", (7,), {}, "even"),
  ("model.mlp_width", (0, -1), {}, "above 0"),
  ("model.rope_theta", (0.0, -1.0, NAN, INF), {}, "above 0"),
  ("model.norm_epsilon", (0.0, -1.0, NAN, INF), {}, "above 0"),
  ("model.dtype", ("float16", "FLOAT32", ""), {}, "one of float32, bfloat16"),
  ("model.qk_norm", ("", "l2"), {}, "one of none, scaled, unscaled"),
  ("model.rope_factor", (0.5, NAN, INF), {}, "1 (off) or more"),
  ("model.rope_low_frequency", (0.0, -1.0, NAN, INF), {}, "above 0"),
  (
    "model.rope_high_frequency",
    (0.5, NAN, INF),
    {},
    "at least model.rope_low_frequency (1.0)",
  ),
  ("model.rope_context", (0, -1), {}, "above 0"),
  ("model.no_rope_layers", ("2", "1,0", "a", "-1", "0,"), {}, "layers 0 .. 1"),
  ("model.attention_chunk", (-1,), {}, "0 (off) or more"),
  ("model.query_temperature", (-0.1, NAN, INF), {}, "0 (off) or more"),
  ("model.query_temperature_floor", (0, -1), {}, "above 0"),
  ("model.num_experts", (-1,), {}, "0 (off) or more"),
  ("model.experts_per_token", (0, -1), {}, "above 0"),
  (
    "model.experts_per_token",
    (4,),
    {"num_experts": 3, "expert_width": 5},
    "at most model.num_experts (3)",
  ),
  ("model.expert_width", (5,), {}, "left at its default without experts"),
  ("model.expert_width", (0, -1), {"num_experts": 3}, "above 0"),
  ("model.shared_expert", (True,), {}, "left at its default without experts"),
  ("model.dense_layers", ("0",), {}, "left at its default without experts"),
  (
    "model.dense_layers",
    ("0,1",),
    {"num_experts": 3, "expert_width": 5},
    "fewer than all 2 layers",
  ),
  ("model.router", ("top", ""), {}, "one of softmax, softmax_chosen, sigmoid"),
  ("model.remat", ("all", ""), {}, "one of none, block"),
  ("sampler.slots", (0, -1), {}, "above 0"),
  ("sampler.chunk", (0, -1), {}, "above 0"),
  ("sampler.max_prompt_tokens", (0, -1), {}, "above 0"),
  ("sampler.max_completion_tokens", (0, -1), {}, "above 0"),
  ("sampler.temperature", (0.0, -1.0, NAN, INF), {}, "above 0"),
  ("sampler.top_k", (-1,), {}, "0 (off) or more"),
  ("sampler.top_p", (0.0, -0.1, 1.1, NAN), {}, "in (0, 1]"),
  (
    "sampler.dtype",
    ("float16", "FLOAT32", "model"),
    {},
    "one of float32, bfloat16, or empty for model.dtype",
  ),
  (
    "sampler.kv_dtype",
    ("float16", "int8"),
    {},
    "one of float32, bfloat16, or empty for the body's",
  ),
  (
    "model.dot_dtype",
    ("float16", "tf32"),
    {},
    "one of float32, bfloat16, or empty for model.dtype",
  ),
  (
    "model.attention",
    ("flash", "CUDNN", ""),
    {},
    "one of einsum, xla, cudnn",
  ),
  ("sampler.head_dtype", ("float16",), {}, "one of float32, bfloat16"),
  ("length.control", ("stop",), {}, "one of none, interruption, penalty"),
  ("length.min_thinking_tokens", (0, -1), {}, "above 0"),
  ("length.max_thinking_tokens", (9,), {}, "length.min_thinking_tokens (10)"),
  ("length.answer_tokens", (0, -1), {}, "above 0"),
  ("length.phrase", ("", "time is up"), {}, "ends with length.thinking_end"),
  ("length.thinking_end", ("",), {}, "a text"),
  ("length.penalty_cache", (0, -1), {}, "above 0"),
  ("length.truncated", ("dropped",), {}, "one of wrong, masked"),
  ("curriculum.order", ("hard",), {}, "one of uniform, easy_to_hard"),
  ("curriculum.retire_at", (0.0, -0.1, 1.1, NAN), {}, "in (0, 1]"),
  ("curriculum.min_visits", (0, -1), {}, "above 0"),
  ("curriculum.history", ("epoch",), {}, "one of cumulative, last_visit"),
  ("batch.prompts", (0, -1), {}, "above 0"),
  ("batch.group_size", (0, -1), {}, "above 0"),
  ("batch.micro_batch", (0, -1), {}, "above 0"),
  ("batch.micro_batch", (7, 100, 1536), {}, "a divisor of the 768 completions"),
  ("batch.packing", (-1,), {}, "0 or more"),
  ("batch.width_buckets", (0, -1), {}, "above 0"),
  ("batch.width_buckets", (2,), {"packing": 64}, "1 with batch.packing"),
  ("batch.share_prompts", (True,), {"packing": 64}, "off with batch.packing"),
  (
    "batch.micro_batch",
    (24, 8),
    {"share_prompts": True},
    "a multiple of batch.group_size with batch.share_prompts",
  ),
  ("loss.name", ("", "ppo", "CISPO"), {}, f"one of {LOSSES}"),
  ("loss.clip_max", (0.0, -1.0, NAN), {}, "above 0"),
  ("loss.clip_low", (0.0, -0.1, 1.1, NAN), {}, "in (0, 1]"),
  ("loss.clip_high", (0.0, -0.1, NAN), {}, "above 0"),
  ("loss.aggregation", ("mean",), {}, "one of sample_average, "),
  ("loss.normalization", ("std",), {}, "one of prompt_level, "),
  ("loss.zero_variance", ("resample",), {}, "one of drop, keep, refill"),
  ("loss.refill_limit", (0, -1), {}, "above 0"),
  ("loss.head_dtype", ("float16",), {}, "one of float32, bfloat16"),
  ("loss.logprob_chunk", (-1,), {}, "0 (all tokens at once) or more"),
  ("optimizer.learning_rate", (0.0, -1e-3, NAN, INF), {}, "above 0"),
  ("optimizer.warmup_steps", (-1,), {}, "0 or more"),
  ("optimizer.beta1", (-0.1, 1.0, NAN), {}, "in [0, 1)"),
  ("optimizer.beta2", (-0.1, 1.0, NAN), {}, "in [0, 1)"),
  ("optimizer.epsilon", (0.0, -1e-8, NAN, INF), {}, "above 0"),
  ("optimizer.weight_decay", (-0.1, NAN, INF), {}, "0 or more"),
  ("optimizer.clip_norm", (0.0, -1.0, NAN), {}, "above 0"),
  ("pipeline.algorithm", ("ppo",), {}, "one of pipeline_rl, ppo_off_policy"),
  ("pipeline.updates_per_phase", (0, -1), {}, "above 0"),
  ("pipeline.max_staleness", (-1,), {}, "0 or more"),
  ("pipeline.schedule", ("", "async"), {}, "one of logical, wall"),
  ("pipeline.chunks_per_step", (0, -1), {}, "above 0"),
  ("pipeline.generator_devices", (-1,), {}, "0 (automatic) or more"),
  ("pipeline.tensor", (0, -1), {}, "above 0"),
  ("pipeline.fsdp", (0, -1), {}, "above 0"),
  ("pipeline.expert", (0, -1), {}, "above 0"),
  ("evaluation.every", (0, -1), {}, "above 0"),
  ("evaluation.samples", (0, -1), {}, "above 0"),
  ("evaluation.seed", (-1, 2**64), {}, ""),
  ("checkpoint.every", (0, -1), {}, "above 0"),
  ("checkpoint.keep", (0, -1), {}, "above 0"),
]
# Refused together with another field, see the tests of pairs.
ELSEWHERE = {
  "task.max_operations",
  "task.instruction",  # any text
  "model.tied_head",
  "model.attention_bias",
  "model.checkpoint",
  "curriculum.no_positive_resampling",
  "run.wandb_project",  # any text
  "evaluation.path",
}


def _refusal(make):
  """The one sentence with which `make()` is refused."""
  with pytest.raises((TypeError, ValueError)) as caught:
    make()
  text = str(caught.value)
  assert "\n" not in text
  assert "unsupported operand" not in text
  return text


@pytest.mark.parametrize(
  ("name", "value", "others", "rule"),
  [
    pytest.param(name, value, others, rule, id=f"{name}={value}")
    for name, values, others, rule in OUTSIDE
    for value in values
  ],
)
def test_a_value_outside_its_domain_is_refused(name, value, others, rule):
  section, field = name.split(".")
  text = _refusal(lambda: SECTIONS[section](**{field: value}, **others))
  assert text.startswith(f"{name} must be ")
  assert rule in text
  assert f"got {value!r}" in text


def test_no_field_goes_unchecked():
  checked = {name for name, *_ in OUTSIDE} | ELSEWHERE
  assert checked == {f"{section}.{field}" for section, field in FIELDS}


@pytest.mark.parametrize("share", [0.6, 1.0])
def test_shares_of_the_teacher_are_at_most_one_together(share):
  text = _refusal(
    lambda: SupervisedConfig(guess_share=share, stop_early_share=0.5)
  )
  assert "supervised.guess_share + supervised.stop_early_share" in text
  assert "at most 1" in text
  assert repr(share + 0.5) in text


WRONG_TYPES = """
import dataclasses, json
from scalerl_jax.config import Config

WRONG = {
  int: ("3", 1.5, True, None),
  float: ("0.5", True, None, [0.5]),
  str: (3, None, b"cispo"),
  bool: ("no", 0, 1, None),
}
told = {}
for section in dataclasses.fields(Config):
  for field in dataclasses.fields(section.default):
    for value in WRONG[type(field.default)]:
      try:
        type(section.default)(**{field.name: value})
        said = "accepted"
      except (TypeError, ValueError) as error:
        said = str(error)
      told[f"{section.name}.{field.name}={value!r}"] = said
print(json.dumps(told))
"""


def test_a_wrong_type_is_refused_by_its_section():
  # In a process of its own: under pytest, beartype would be there first.
  done = subprocess.run(
    [sys.executable, "-c", WRONG_TYPES],
    capture_output=True,
    text=True,
    check=True,
  )
  told = json.loads(done.stdout)
  assert {name.partition("=")[0] for name in told} == {
    f"{section}.{field}" for section, field in FIELDS
  }
  for name, said in told.items():
    field, _, value = name.partition("=")
    assert said.startswith(f"{field} must be "), (name, said)
    assert value in said


def test_an_int_stands_for_a_float():
  assert OptimizerConfig(clip_norm=2).clip_norm == 2.0


def test_a_section_in_the_place_of_another_is_refused():
  code = (
    "from scalerl_jax.config import Config, TaskConfig\n"
    "try:\n  Config(run=TaskConfig())\n"
    "except (TypeError, ValueError) as error:\n  print(error)\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  (text,) = done.stdout.splitlines()
  for word in ("run", "RunConfig", "TaskConfig"):
    assert word in text


def test_slots_hold_a_whole_group():
  text = _refusal(lambda: vary(Config(), sampler={"slots": 15}))
  assert "sampler.slots" in text
  assert "at least batch.group_size (16)" in text
  assert "got 15" in text
  assert vary(Config(), sampler={"slots": 16}).sampler.slots == 16


def test_a_packed_row_holds_the_longest_completion_with_its_prompt():
  text = _refusal(lambda: vary(Config(), batch={"packing": 28}))
  assert "batch.packing must be 0 (a row a completion) or at least 29" in text
  assert "got 28" in text
  assert vary(Config(), batch={"packing": 29}).batch.packing == 29


def test_slots_hold_the_samples_of_an_evaluation():
  text = _refusal(lambda: vary(Config(), evaluation={"samples": 513}))
  assert "sampler.slots" in text
  assert "at least evaluation.samples (513)" in text
  assert "got 512" in text


def test_prompts_fit_their_budget():
  text = _refusal(lambda: vary(Config(), sampler={"max_prompt_tokens": 13}))
  assert "sampler.max_prompt_tokens" in text
  assert "at least 14" in text
  assert "task.max_operations 12 are longer than this budget" in text
  assert "got 13" in text
  # The budget of a file's prompts is checked against the file.
  jsonl = {"name": "jsonl", "path": "prompts.jsonl"}
  assert vary(Config(), task=jsonl, sampler={"max_prompt_tokens": 13})


def test_a_step_is_a_whole_number_of_micro_batches():
  assert BatchConfig(prompts=3, group_size=5, micro_batch=5).completions == 15
  text = _refusal(lambda: BatchConfig(prompts=3, group_size=5, micro_batch=4))
  assert "15 completions of a step" in text
  assert "batch.prompts x batch.group_size" in text


def test_an_unknown_field_is_refused_with_the_fields_there_are():
  text = _refusal(lambda: config.override(Config(), {"batch.size": 3}))
  assert "'batch.size'" in text
  assert "prompts, group_size, micro_batch" in text


def test_an_unknown_section_is_refused_with_the_sections_there_are():
  for name in ("bath.prompts", "prompts", "", "."):
    text = _refusal(lambda name=name: config.override(Config(), {name: 3}))
    assert repr(name) in text
    assert ", ".join(SECTIONS) in text


@pytest.mark.parametrize("fields", [{}, {"prompts": 3}])
def test_a_dictionary_with_an_unknown_section_is_refused(fields):
  text = _refusal(lambda: config.from_dict({"bath": fields}))
  assert "bath" in text
  assert ", ".join(SECTIONS) in text


@pytest.mark.parametrize("fields", [3, "steps", None, [1]])
def test_a_section_that_is_no_dictionary_is_refused(fields):
  text = _refusal(lambda: config.from_dict({"run": fields}))
  assert "run" in text
  assert repr(fields) in text


def _another(section, field):
  """A config that differs from the default in this field alone."""
  default = getattr(SECTIONS[section](), field)
  choices = {
    "run.forecast_axis": "step",
    "loss.name": "reinforce",
    "loss.aggregation": "constant",
    "loss.normalization": "none",
    "loss.zero_variance": "keep",
    "model.dtype": "bfloat16",
    "model.dot_dtype": "float32",
    "model.qk_norm": "scaled",
    "model.no_rope_layers": "1",
    "model.query_temperature": 0.1,
    "model.router": "sigmoid",
    "model.remat": "block",
    "model.attention": "xla",
    "model.num_kv_heads": 2,
    "model.num_heads": 8,
    "model.head_width": 18,
    "task.modulus": 10,
    "task.instruction": "Think.",
    "task.prompt_column": "problem",
    "task.answer_column": "solution",
    "task.split": "test",
    "task.verifier": "stated",
    "task.thinking_end": "So:",
    "task.long_prompts": "drop",
    "task.max_operations": 11,
    "pipeline.schedule": "wall",
    "pipeline.algorithm": "ppo_off_policy",
    "sampler.dtype": "bfloat16",
    "sampler.kv_dtype": "bfloat16",
    "sampler.head_dtype": "bfloat16",
    "loss.head_dtype": "bfloat16",
    "length.control": "penalty",
    "length.phrase": "enough: =",
    "length.truncated": "masked",
    "curriculum.order": "easy_to_hard",
    "curriculum.retire_at": 0.8,
    "curriculum.history": "last_visit",
    "batch.prompts": 96,
    "batch.group_size": 32,
    "batch.micro_batch": 32,
    "batch.packing": 64,
    "sampler.top_p": 0.9,
    "optimizer.beta1": 0.8,
    "optimizer.beta2": 0.9,
    "run.forecast_level": 0.8,
    "run.early_stop_gain": 0.02,
    "run.early_stop_confidence": 0.9,
    "run.wandb_project": "arithmetic",
    "evaluation.path": "questions.jsonl",
  }
  if isinstance(default, bool):
    value = not default
  elif f"{section}.{field}" in choices:
    value = choices[f"{section}.{field}"]
  elif isinstance(default, float):
    value = default * 1.25
  else:
    value = default + 1
  return value


# Fields that cannot change alone.
TOGETHER = {
  ("task", "name"),
  ("task", "path"),
  ("task", "mixture"),
  ("task", "dataset"),
  ("task", "parameters"),
  ("length", "thinking_end"),
  ("model", "num_experts"),
  ("model", "expert_width"),
  ("model", "shared_expert"),
  ("model", "dense_layers"),
  ("model", "checkpoint"),
}


@pytest.mark.parametrize(
  ("section", "field"),
  [f for f in FIELDS if f not in TOGETHER],
)
def test_a_changed_field_survives_every_form_and_changes_the_name(
  section, field
):
  value = _another(section, field)
  changed = vary(Config(), **{section: {field: value}})
  assert changed != Config()
  # JSON, which is what a workdir holds.
  stored = json.loads(json.dumps(config.to_dict(changed)))
  assert config.from_dict(stored) == changed
  # Text, which is what a command line holds.
  told = config.override(Config(), {f"{section}.{field}": str(value)})
  assert told == changed
  assert type(getattr(getattr(told, section), field)) is type(value)
  # The name of the whole, of the section, and of no other section.
  assert config.fingerprint(changed) != config.fingerprint(Config())
  for name, kind in SECTIONS.items():
    same = config.fingerprint(getattr(changed, name)) == (
      config.fingerprint(kind())
    )
    assert same == (name != section)


def test_a_task_by_name_survives_every_form():
  fields = {"name": "reasoning_gym", "dataset": "gcd", "parameters": "a='b=c'"}
  changed = vary(Config(), task=fields)
  assert config.from_dict(config.to_dict(changed)) == changed
  texts = {f"task.{name}": value for name, value in fields.items()}
  assert config.override(Config(), texts) == changed


def test_experts_survive_every_form():
  fields = {
    "num_experts": 3,
    "expert_width": 5,
    "shared_expert": True,
    "dense_layers": "0",
  }
  changed = vary(Config(), model=fields)
  assert config.from_dict(config.to_dict(changed)) == changed
  texts = {f"model.{name}": str(value) for name, value in fields.items()}
  assert config.override(Config(), texts) == changed


def test_cudnn_takes_no_float32():
  asked = {"attention": "cudnn", "dot_dtype": "bfloat16"}
  assert ModelConfig(dtype="bfloat16", **asked).attention == "cudnn"
  text = _refusal(lambda: ModelConfig(**asked))
  assert "model.dtype must be bfloat16 with model.attention 'cudnn'" in text
  assert "float32" in text


def test_a_checkpoint_has_its_own_architecture():
  kept = {"dtype": "bfloat16", "dot_dtype": "float32", "remat": "block"}
  kept["attention"] = "cudnn"
  assert ModelConfig(checkpoint="a/b", **kept).checkpoint == "a/b"
  text = _refusal(lambda: ModelConfig(checkpoint="a/b", width=48, num_heads=8))
  assert text.startswith("model.width, model.num_heads must be left at the")
  assert "'48, 8'" in text


def test_a_checkpoint_is_the_base_policy():
  changed = vary(Config(), model={"checkpoint": "a/b"}, supervised={"steps": 0})
  assert config.from_dict(config.to_dict(changed)) == changed
  text = _refusal(lambda: vary(Config(), model={"checkpoint": "a/b"}))
  assert "supervised.steps must be 0 with model.checkpoint ('a/b')" in text
  assert "700" in text


def test_a_task_of_a_file_survives_every_form():
  changed = vary(Config(), task={"name": "jsonl", "path": "a=b.jsonl"})
  assert config.from_dict(config.to_dict(changed)) == changed
  # Fields that are refused one by one are checked together.
  texts = {"task.path": "a=b.jsonl", "task.name": "jsonl"}
  assert config.override(Config(), texts) == changed


def test_a_fingerprint_is_twelve_digits_and_the_same_in_every_process():
  name = config.fingerprint(RunConfig(), ["a", 3])
  assert len(name) == 12
  assert int(name, 16) >= 0
  assert name == config.fingerprint(config.to_dict(RunConfig()), ["a", 3])
  assert name != config.fingerprint(["a", 3], RunConfig())
  # Not Python's hash, which differs from process to process.
  assert config.fingerprint([]) == "cf1cbb66a638"


@pytest.mark.parametrize("text", ["true", "True", "TRUE"])
def test_truth_is_read_from_text(text):
  base = vary(Config(), model={"tied_head": False})
  told = config.override(base, {"model.tied_head": text})
  assert told.model.tied_head is True


@pytest.mark.parametrize("text", ["false", "False", "FALSE"])
def test_falsehood_is_read_from_text(text):
  told = config.override(Config(), {"model.tied_head": text})
  assert told.model.tied_head is False


@pytest.mark.parametrize(
  ("name", "value", "kind"),
  [
    ("run.steps", "1.5", "int"),
    ("run.steps", 1.5, "int"),
    ("run.steps", "1e3", "int"),
    ("run.steps", "", "int"),
    ("run.steps", "many", "int"),
    ("run.steps", INF, "int"),
    ("run.steps", NAN, "int"),
    ("run.steps", True, "int"),
    ("run.steps", None, "int"),
    ("run.steps", [3], "int"),
    ("optimizer.learning_rate", "fast", "float"),
    ("optimizer.learning_rate", "", "float"),
    ("optimizer.learning_rate", True, "float"),
    ("optimizer.learning_rate", None, "float"),
    ("model.tied_head", "yes", "bool"),
    ("model.tied_head", "", "bool"),
    ("model.tied_head", 1, "bool"),
    ("model.tied_head", 0.0, "bool"),
    ("model.tied_head", None, "bool"),
    ("loss.name", 3, "str"),
    ("loss.name", None, "str"),
  ],
)
def test_an_override_of_another_type_is_refused(name, value, kind):
  text = _refusal(lambda: config.override(Config(), {name: value}))
  assert name in text
  assert f"of type {kind}" in text
  assert f"got {value!r}" in text


def test_a_whole_float_is_an_int():
  # JSON of other writers has 3.0 where we wrote 3.
  told = config.override(Config(), {"run.steps": 3.0})
  assert told.run.steps == 3
  assert type(told.run.steps) is int


def test_an_override_is_checked_as_its_section_is():
  text = _refusal(lambda: config.override(Config(), {"batch.micro_batch": "7"}))
  assert "batch.micro_batch must be a divisor of the 768" in text


def test_an_override_leaves_the_config_as_it_was():
  told = config.override(TINY, {"run.steps": "3", "run.seed": "5"})
  assert (told.run.steps, told.run.seed) == (3, 5)
  assert told == vary(TINY, run={"steps": 3, "seed": 5})
  assert config.override(TINY, {}) == TINY


def test_a_variant_is_one_visible_replace():
  base = Config()
  variant = dataclasses.replace(
    base, loss=dataclasses.replace(base.loss, aggregation="token_average")
  )
  assert variant.loss == LossConfig(aggregation="token_average")
  assert variant == Config(loss=LossConfig(aggregation="token_average"))
  assert base == Config()
  text = _refusal(lambda: dataclasses.replace(base, sampler=SamplerConfig(8)))
  assert "sampler.slots" in text  # checks between sections run again


def test_nothing_of_a_config_can_be_changed():
  for section in (Config(), *(kind() for kind in SECTIONS.values())):
    field = dataclasses.fields(section)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
      setattr(section, field, None)
  assert len({Config(), Config(), TINY}) == 2  # and it can be a key


def test_a_config_reads_back_from_its_own_text():
  text = repr(TINY)
  assert isinstance(ast.parse(text, mode="eval").body, ast.Call)
  names = {
    kind.__name__: kind
    for kind in (
      Config,
      BatchConfig,
      CheckpointConfig,
      CurriculumConfig,
      EvaluationConfig,
      LengthConfig,
      LossConfig,
      ModelConfig,
      OptimizerConfig,
      PipelineConfig,
      RunConfig,
      SamplerConfig,
      SupervisedConfig,
      TaskConfig,
    )
  }
  assert eval(text, names) == TINY


@pytest.mark.parametrize(
  ("mixture", "rule"),
  [
    ("chess:1", "one of chain_arithmetic, chain_logic, jsonl"),
    ("mixture:1", "one of chain_arithmetic, chain_logic, jsonl"),
    ("chain_logic:1,chain_logic:2", "named once"),
    ("chain_logic", "a number above 0 behind each task"),
    ("chain_logic:0", "a number above 0 behind each task"),
    ("chain_logic:nan", "a number above 0 behind each task"),
    ("chain_logic:1,", "one of chain_arithmetic, chain_logic, jsonl"),
  ],
)
def test_a_mixture_that_cannot_be_read_is_refused(mixture, rule):
  text = _refusal(lambda: TaskConfig(name="mixture", mixture=mixture))
  assert "task.mixture must be" in text
  assert rule in text


def test_a_mixture_has_one_file():
  text = _refusal(
    lambda: TaskConfig(name="mixture", mixture="jsonl:1,tfds:1", path="a")
  )
  assert "of one task with a file at most" in text


def test_an_interruption_fits_the_completion_budget():
  thinking = {"control": "interruption", "max_thinking_tokens": 13}
  text = _refusal(lambda: vary(Config(), length=thinking))
  assert "length.max_thinking_tokens + phrase + length.answer_tokens" in text
  assert "sampler.max_completion_tokens (15), got 16" in text
  thinking["control"] = "none"
  assert vary(Config(), length=thinking).length.max_thinking_tokens == 13


def test_a_penalty_begins_within_the_completion_budget():
  length = {"control": "penalty", "penalty_cache": 16}
  text = _refusal(lambda: vary(Config(), length=length))
  assert "length.penalty_cache" in text
  assert "sampler.max_completion_tokens (15), got 16" in text
