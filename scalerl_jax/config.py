"""Every choice of a run, as frozen dataclasses: one section per consumer.

An experiment file returns a `Config` from `get_config()`; variants differ by
one `dataclasses.replace`. No function below `run/` receives the whole of it.
"""

import dataclasses
import hashlib
import json
import math
from typing import Any

AGGREGATIONS = (
  "sample_average",
  "prompt_average",
  "token_average",
  "constant",
)
NORMALIZATIONS = ("prompt_level", "batch_level", "none")
LOSSES = ("cispo", "clipped_surrogate", "gspo", "reinforce")
ZERO_VARIANCE = ("drop", "keep", "refill")
ALGORITHMS = ("pipeline_rl", "ppo_off_policy")
SCHEDULES = ("logical", "wall")
DTYPES = ("float32", "bfloat16")
TASKS = (
  "chain_arithmetic",
  "chain_logic",
  "jsonl",
  "parquet",
  "tfds",
  "reasoning_gym",
  "mixture",
)
CHAINS = frozenset(
  TASKS[:2]
)  # they have vocabularies and verifiers of their own
FILES = frozenset(TASKS[2:5])  # they read task.path
VERIFIERS = ("own", "exact", "stated", "math", "code")
LONG_PROMPTS = ("refuse", "drop")
QK_NORMS = ("none", "scaled", "unscaled")
ROUTERS = ("softmax", "softmax_chosen", "sigmoid")
REMATS = ("none", "block")
ATTENTIONS = ("einsum", "xla", "cudnn")
# Of a model: how it is computed, not what it is.
COMPUTED = frozenset({"dtype", "dot_dtype", "attention", "remat"})
ORDERS = ("uniform", "easy_to_hard")
HISTORIES = ("cumulative", "last_visit")
LENGTH_CONTROLS = ("none", "interruption", "penalty")
TRUNCATED = ("wrong", "masked")
MAX_SEED = 2**32  # a larger one would give the random numbers of a smaller
COMPUTE_AXES = (
  "step",
  "trained_tokens",
  "generated_tokens",
  "flops_full",
  "flops_spent",
  "device_seconds",
  "wall_seconds",
)


def _check(condition: bool, name: str, rule: str, value: Any, mend: str = ""):
  if not condition:
    mend = f"; {mend}" if mend else ""
    raise ValueError(f"{name} must be {rule}, got {value!r}{mend}")


def _check_types(section: str, values: Any) -> None:
  """Each field of a section has the type of its default, and is finite."""
  for field in dataclasses.fields(values):
    value, kind = getattr(values, field.name), type(field.default)
    name = f"{section}.{field.name}"
    widened = kind is float and type(value) is int
    _check(
      type(value) is kind or widened, name, f"of type {kind.__name__}", value
    )
    if field.name == "seed":
      _check(0 <= value < MAX_SEED, name, "in 0 .. 2³²−1", value)


def _own_dtype(name: str, value: str, default: str) -> None:
  """A dtype, or empty for that of something else."""
  allowed = f"one of {', '.join(DTYPES)}, or empty for {default}"
  _check(value in ("", *DTYPES), name, allowed, value)


def _choice(name: str, value: str, choices: tuple[str, ...]) -> None:
  told = ", ".join(choice or "'' (empty)" for choice in choices)
  _check(value in choices, name, f"one of {told}", value)


def _positive(section: str, values: dict[str, float]) -> None:
  for name, value in values.items():
    rule = "above 0 and finite"
    _check(0 < value < math.inf, f"{section}.{name}", rule, value)


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """How long, from which seed, and where forecasts look."""

  seed: int = 0  # RL randomness: prompt order, sampling
  steps: int = 400  # optimiser steps
  forecast_axis: str = "flops_full"  # compute axis of the forecast
  forecast_level: float = 0.9  # probability held by the forecast band
  # Stops, with the state saved, where the rest of the run gains less than this
  # pass rate with at least this probability; a gain of 0 never stops.
  early_stop_gain: float = 0.0
  early_stop_confidence: float = 0.95
  wandb_project: str = ""  # metrics go to Weights & Biases too; empty: not
  trace_steps: int = 20  # first steps whose timeline is kept; 0: none

  def __post_init__(self):
    _check_types("run", self)
    _positive("run", {"steps": self.steps})
    _check(
      self.trace_steps >= 0,
      "run.trace_steps",
      "at least 0, 0 for no timeline",
      self.trace_steps,
    )
    _choice("run.forecast_axis", self.forecast_axis, COMPUTE_AXES)
    _check(
      0.0 < self.forecast_level < 1.0,
      "run.forecast_level",
      "inside (0, 1)",
      self.forecast_level,
    )
    _check(
      0.0 <= self.early_stop_gain < 1.0,
      "run.early_stop_gain",
      "in [0, 1), 0 to run to the end",
      self.early_stop_gain,
    )
    _check(
      0.5 <= self.early_stop_confidence < 1.0,
      "run.early_stop_confidence",
      "in [0.5, 1)",
      self.early_stop_confidence,
    )


@dataclasses.dataclass(frozen=True)
class TaskConfig:
  """Where prompts come from and what counts as correct."""

  name: str = "chain_arithmetic"
  seed: int = 0  # draws the prompts and the flawed teacher; not run.seed
  train_prompts: int = 4000
  heldout_prompts: int = 768
  modulus: int = 16  # chain_arithmetic: values are 0 .. modulus-1
  min_operations: int = 2
  max_operations: int = 12
  path: str = ""  # jsonl, parquet: the file; tfds: a prepared dataset's folder
  prompt_column: str = "prompt"  # files: where a record has its question
  answer_column: str = "answer"
  split: str = "train"  # tfds: of the dataset
  dataset: str = ""  # reasoning_gym: its name, as in "basic_arithmetic"
  parameters: str = ""  # reasoning_gym: "max_terms=3, operators=['+', '-']"
  instruction: str = ""  # questions: what stands behind each of them
  # Questions: exact text, the answer that a text comes to, math-verify, or
  # Python whose tests are the answer; own is exact, or the dataset's of a gym.
  verifier: str = "own"
  verifier_workers: int = 2  # processes for what could hang
  verifier_seconds: float = 5.0  # of a judgement; then it is wrong
  verifier_megabytes: int = 4096  # address space of a worker
  thinking_end: str = "</think>"  # questions: verifiers see what is behind it
  long_prompts: str = "refuse"  # questions beyond sampler.max_prompt_tokens
  mixture: str = ""  # mixture: "chain_arithmetic:2,chain_logic:1"

  def __post_init__(self):
    _check_types("task", self)
    _choice("task.name", self.name, TASKS)
    _positive(
      "task",
      {
        "train_prompts": self.train_prompts,
        "heldout_prompts": self.heldout_prompts,
        "verifier_workers": self.verifier_workers,
        "verifier_seconds": self.verifier_seconds,
        "verifier_megabytes": self.verifier_megabytes,
        "min_operations": self.min_operations,
      },
    )
    _check(
      2 <= self.modulus <= 16,
      "task.modulus",
      "in 2..16 (a value is one hexadecimal digit)",
      self.modulus,
    )
    _check(
      self.min_operations <= self.max_operations,
      "task.min_operations",
      f"at most task.max_operations ({self.max_operations})",
      self.min_operations,
    )
    _check(
      (self.name == "mixture") == bool(self.mixture),
      "task.mixture",
      "tasks with their weights, as in 'chain_arithmetic:3,chain_logic:1',"
      " when task.name is 'mixture', and empty otherwise",
      self.mixture,
    )
    files = sorted(FILES & set(self.weights))
    _check(
      bool(files) == bool(self.path),
      "task.path",
      f"a file when one of {', '.join(sorted(FILES))} is a task, and empty"
      " otherwise",
      self.path,
    )
    _check(
      len(files) <= 1,
      "task.mixture",
      "of one task with a file at most (there is one task.path)",
      self.mixture,
    )
    for name in ("prompt_column", "answer_column", "split"):
      _check(bool(getattr(self, name)), f"task.{name}", "a name", "")
    _check(
      ("reasoning_gym" in self.weights) == bool(self.dataset),
      "task.dataset",
      "the name of a dataset when 'reasoning_gym' is a task, and empty"
      " otherwise",
      self.dataset,
    )
    _check(
      bool(self.dataset) or not self.parameters,
      "task.parameters",
      "empty where 'reasoning_gym' is no task",
      self.parameters,
    )
    _choice("task.verifier", self.verifier, VERIFIERS)
    _choice("task.long_prompts", self.long_prompts, LONG_PROMPTS)
    _check(bool(self.thinking_end), "task.thinking_end", "a text", "")

  @property
  def weights(self) -> dict[str, float]:
    """Share of the prompts that each task gives, by its name; they sum to 1.

    >>> TaskConfig(
    ...   name="mixture", mixture="chain_arithmetic:3,chain_logic:1"
    ... ).weights
    {'chain_arithmetic': 0.75, 'chain_logic': 0.25}
    """
    if self.name != "mixture":
      return {self.name: 1.0}
    weights: dict[str, float] = {}
    for part in self.mixture.split(","):
      name, _, text = part.strip().partition(":")
      _choice("a task of task.mixture", name, TASKS[:-1])
      _check(name not in weights, "a task of task.mixture", "named once", name)
      try:
        weights[name] = float(text)
      except ValueError:
        weights[name] = math.nan
      rule = "a number above 0 behind each task, as in 'chain_logic:1'"
      good = 0 < weights[name] < math.inf
      _check(good, "a weight of task.mixture", rule, part.strip())
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


@dataclasses.dataclass(frozen=True)
class SupervisedConfig:
  """The warm start: supervised training on a flawed teacher."""

  steps: int = 700
  batch_size: int = 96  # texts
  learning_rate: float = 4e-3  # peak; cosine to 0
  warmup_fraction: float = 0.05
  seed: int = 0
  # The teacher: each (operation, a, b) is wrong with its own probability,
  # drawn from Beta(error_alpha, error_beta).
  error_alpha: float = 0.45
  error_beta: float = 0.8
  guess_share: float = 0.15  # answers at once, without a chain
  stop_early_share: float = 0.20  # answers before the chain has ended

  def __post_init__(self):
    _check_types("supervised", self)
    _positive(
      "supervised",
      {
        "batch_size": self.batch_size,
        "learning_rate": self.learning_rate,
        "error_alpha": self.error_alpha,
        "error_beta": self.error_beta,
      },
    )
    _check(self.steps >= 0, "supervised.steps", "0 or more", self.steps)
    _check(
      0.0 <= self.warmup_fraction < 1.0,
      "supervised.warmup_fraction",
      "in [0, 1)",
      self.warmup_fraction,
    )
    for name in ("guess_share", "stop_early_share"):
      value = getattr(self, name)
      _check(0.0 <= value <= 1.0, f"supervised.{name}", "in [0, 1]", value)
    _check(
      self.guess_share + self.stop_early_share <= 1.0,
      "supervised.guess_share + supervised.stop_early_share",
      "at most 1",
      self.guess_share + self.stop_early_share,
    )


def _layers(name: str, text: str, depth: int) -> tuple[int, ...]:
  """Layer numbers written as in "3,7,11", in order and each once."""
  rule = f"layers 0 .. {depth - 1} in order, as in '0,2', or empty"
  parts = [part.strip() for part in text.split(",")] if text else []
  _check(all(part.isdecimal() for part in parts), name, rule, text)
  numbers = tuple(int(part) for part in parts)
  _check(list(numbers) == sorted({*numbers}), name, rule, text)
  _check(not numbers or numbers[-1] < depth, name, rule, text)
  return numbers


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A decoder-only transformer; the vocabulary comes from the tokenizer.

  The parts of published families (Llama 3 and 4, Qwen2 and 3) are fields that
  are off by default. With `checkpoint`, all but `dtype`, `dot_dtype`,
  `attention` and `remat` comes from its files.
  """

  width: int = 64
  num_layers: int = 2
  num_heads: int = 4
  num_kv_heads: int = 4
  head_width: int = 16
  mlp_width: int = 160
  rope_theta: float = 10_000.0
  norm_epsilon: float = 1e-6
  tied_head: bool = True  # the head reads the embedding table
  dtype: str = "float32"  # of the body; the head's is each side's choice
  dot_dtype: str = ""  # of the operands of its products; "": as dtype
  # What whole rows are mixed by: our products, or JAX's library function as
  # XLA's operations or as NVIDIA's cuDNN. Decoding has its own.
  attention: str = "einsum"
  attention_bias: bool = False  # of query, key and value
  # scaled: an RMS norm with weights before the rotation; unscaled: one without
  # after it, on layers that rotate.
  qk_norm: str = "none"
  rope_factor: float = 1.0  # slow rotations are so much slower; 1: off
  rope_low_frequency: float = 1.0  # turns within rope_context below which
  rope_high_frequency: float = 4.0  # all of that, and above which nothing
  rope_context: int = 8192  # tokens; of the first training
  no_rope_layers: str = ""  # "3,7": these do not rotate and see everything
  attention_chunk: int = 0  # tokens; others see their own chunk only; 0: off
  query_temperature: float = 0.0  # no_rope_layers: 1 + so much · log of
  query_temperature_floor: int = 8192  # whole stretches of this length
  num_experts: int = 0  # 0: every MLP is dense
  experts_per_token: int = 1
  expert_width: int = 0
  shared_expert: bool = False  # another expert that every token goes through
  dense_layers: str = ""  # "0,2": these have an MLP of mlp_width
  router: str = "softmax"  # over all experts, or the chosen; or of the input
  remat: str = "none"  # block: a layer's activations are computed again
  checkpoint: str = ""  # a published policy: its folder or its name on the hub

  def __post_init__(self):
    _check_types("model", self)
    _positive(
      "model",
      {
        "width": self.width,
        "num_layers": self.num_layers,
        "num_heads": self.num_heads,
        "num_kv_heads": self.num_kv_heads,
        "head_width": self.head_width,
        "mlp_width": self.mlp_width,
        "rope_theta": self.rope_theta,
        "norm_epsilon": self.norm_epsilon,
        "rope_low_frequency": self.rope_low_frequency,
        "rope_context": self.rope_context,
        "query_temperature_floor": self.query_temperature_floor,
        "experts_per_token": self.experts_per_token,
      },
    )
    _check(
      self.num_heads % self.num_kv_heads == 0,
      "model.num_heads",
      f"a multiple of model.num_kv_heads ({self.num_kv_heads})",
      self.num_heads,
    )
    _check(
      self.head_width % 2 == 0,
      "model.head_width",
      "even (rotary embeddings turn pairs)",
      self.head_width,
    )
    _choice("model.dtype", self.dtype, DTYPES)
    _own_dtype("model.dot_dtype", self.dot_dtype, "model.dtype")
    _choice("model.qk_norm", self.qk_norm, QK_NORMS)
    _choice("model.router", self.router, ROUTERS)
    _choice("model.remat", self.remat, REMATS)
    _choice("model.attention", self.attention, ATTENTIONS)
    _check(
      self.attention != "cudnn" or self.dtype == "bfloat16",
      "model.dtype",
      "bfloat16 with model.attention 'cudnn', which takes no float32",
      self.dtype,
    )
    _check(
      1.0 <= self.rope_factor < math.inf,
      "model.rope_factor",
      "1 (off) or more and finite",
      self.rope_factor,
    )
    _check(
      self.rope_low_frequency <= self.rope_high_frequency < math.inf,
      "model.rope_high_frequency",
      f"at least model.rope_low_frequency ({self.rope_low_frequency})",
      self.rope_high_frequency,
    )
    for name in ("attention_chunk", "query_temperature", "num_experts"):
      value = getattr(self, name)
      _check(0 <= value < math.inf, f"model.{name}", "0 (off) or more", value)
    _layers("model.no_rope_layers", self.no_rope_layers, self.num_layers)
    dense = _layers("model.dense_layers", self.dense_layers, self.num_layers)
    if self.num_experts:
      _positive("model", {"expert_width": self.expert_width})
      _check(
        self.experts_per_token <= self.num_experts,
        "model.experts_per_token",
        f"at most model.num_experts ({self.num_experts})",
        self.experts_per_token,
      )
      _check(
        len(dense) < self.num_layers,
        "model.dense_layers",
        f"fewer than all {self.num_layers} layers when there are experts",
        self.dense_layers,
      )
    else:
      for name in ("expert_width", "shared_expert", "dense_layers"):
        value = getattr(self, name)
        rule = "left at its default without experts (model.num_experts 0)"
        _check(not value, f"model.{name}", rule, value)
    if self.checkpoint:
      self._check_checkpoint()

  def _check_checkpoint(self) -> None:
    """Nothing else says what the architecture is."""
    changed = [
      field.name
      for field in dataclasses.fields(self)
      if field.name not in ("checkpoint", *COMPUTED)
      and getattr(self, field.name) != field.default
    ]
    _check(
      not changed,
      "model." + ", model.".join(changed),
      f"left at the default with model.checkpoint ({self.checkpoint!r}), whose"
      " own architecture is used",
      ", ".join(str(getattr(self, name)) for name in changed),
    )

  @property
  def rotates(self) -> tuple[bool, ...]:
    """Which layers have rotary embeddings.

    >>> ModelConfig(no_rope_layers="1").rotates
    (True, False)
    """
    plain = _layers(
      "model.no_rope_layers", self.no_rope_layers, self.num_layers
    )
    return tuple(n not in plain for n in range(self.num_layers))

  @property
  def sparse(self) -> tuple[bool, ...]:
    """Which layers have experts.

    >>> ModelConfig(num_experts=3, expert_width=5, dense_layers="0").sparse
    (False, True)
    """
    dense = _layers("model.dense_layers", self.dense_layers, self.num_layers)
    return tuple(
      self.num_experts > 0 and n not in dense for n in range(self.num_layers)
    )


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
  """Slots, budgets and the distribution that is really sampled from."""

  slots: int = 512
  chunk: int = 4  # decode steps between two looks of the host
  max_prompt_tokens: int = 14
  max_completion_tokens: int = 15
  temperature: float = 1.0
  top_k: int = 0  # 0: off
  top_p: float = 1.0  # 1: off
  # Of the body on this side, of its KV, and of the weights that are published
  # to it; empty: as model.dtype.
  dtype: str = ""
  head_dtype: str = "float32"  # of the head on this side (the paper's FP32)
  kv_dtype: str = ""  # of the KV cache; "": as the body

  def __post_init__(self):
    _check_types("sampler", self)
    _positive(
      "sampler",
      {
        "slots": self.slots,
        "chunk": self.chunk,
        "max_prompt_tokens": self.max_prompt_tokens,
        "max_completion_tokens": self.max_completion_tokens,
        "temperature": self.temperature,
      },
    )
    _own_dtype("sampler.dtype", self.dtype, "model.dtype")
    _own_dtype("sampler.kv_dtype", self.kv_dtype, "the body's")
    _choice("sampler.head_dtype", self.head_dtype, DTYPES)
    _check(self.top_k >= 0, "sampler.top_k", "0 (off) or more", self.top_k)
    _check(0.0 < self.top_p <= 1.0, "sampler.top_p", "in (0, 1]", self.top_p)


@dataclasses.dataclass(frozen=True)
class LengthConfig:
  """How the length of completions is held in check; off by default.

  Interruption forces `phrase` after a number of thinking tokens that is drawn
  for each completion, then leaves `answer_tokens`. The penalty lowers the
  rewards of right completions within `penalty_cache` tokens of the budget.
  """

  control: str = "none"
  min_thinking_tokens: int = 10  # interruption: the draw is from min .. max,
  max_thinking_tokens: int = 12  # both ends included
  answer_tokens: int = 2  # interruption: after the phrase, end token included
  phrase: str = "="  # interruption: what is forced; ends with thinking_end
  thinking_end: str = "="  # what the policy writes when it has thought enough
  penalty_cache: int = 2  # penalty: L_cache; L_max is the completion budget
  truncated: str = "wrong"  # out of budget: "wrong" is reward −1

  def __post_init__(self):
    _check_types("length", self)
    _choice("length.control", self.control, LENGTH_CONTROLS)
    _choice("length.truncated", self.truncated, TRUNCATED)
    _positive(
      "length",
      {
        "min_thinking_tokens": self.min_thinking_tokens,
        "answer_tokens": self.answer_tokens,
        "penalty_cache": self.penalty_cache,
      },
    )
    _check(
      self.max_thinking_tokens >= self.min_thinking_tokens,
      "length.max_thinking_tokens",
      f"at least length.min_thinking_tokens ({self.min_thinking_tokens})",
      self.max_thinking_tokens,
    )
    _check(
      bool(self.thinking_end),
      "length.thinking_end",
      "a text",
      self.thinking_end,
    )
    _check(
      self.phrase.endswith(self.thinking_end),
      "length.phrase",
      f"a text that ends with length.thinking_end ({self.thinking_end!r})",
      self.phrase,
    )


@dataclasses.dataclass(frozen=True)
class CurriculumConfig:
  """Which prompts are given out, and in which order."""

  order: str = "uniform"  # within an epoch; easy_to_hard by Prompt.difficulty
  no_positive_resampling: bool = False  # retire what the policy can do
  retire_at: float = 0.9  # pass rate of a prompt from which it is retired
  min_visits: int = 1  # groups of a prompt that must have been judged before
  history: str = "cumulative"  # which visits the pass rate is over

  def __post_init__(self):
    _check_types("curriculum", self)
    _choice("curriculum.order", self.order, ORDERS)
    _choice("curriculum.history", self.history, HISTORIES)
    _check(
      0.0 < self.retire_at <= 1.0,
      "curriculum.retire_at",
      "in (0, 1]",
      self.retire_at,
    )
    _positive("curriculum", {"min_visits": self.min_visits})


@dataclasses.dataclass(frozen=True)
class BatchConfig:
  """One gradient step: prompts x group_size completions."""

  prompts: int = 48
  group_size: int = 16
  micro_batch: int = 64  # full rows a forward and backward pass; its budget
  width_buckets: int = 1  # widths that rows are cut to; narrow ones: more rows
  packing: int = 0  # tokens of a row that completions share; 0: a row each
  share_prompts: bool = False  # a prompt is computed once for its group

  def __post_init__(self):
    _check_types("batch", self)
    _positive(
      "batch",
      {
        "prompts": self.prompts,
        "group_size": self.group_size,
        "micro_batch": self.micro_batch,
        "width_buckets": self.width_buckets,
      },
    )
    _check(
      self.completions % self.micro_batch == 0,
      "batch.micro_batch",
      f"a divisor of the {self.completions} completions of a step"
      " (batch.prompts x batch.group_size)",
      self.micro_batch,
    )
    _check(self.packing >= 0, "batch.packing", "0 or more", self.packing)
    _check(
      self.width_buckets == 1 or not self.packing,
      "batch.width_buckets",
      f"1 with batch.packing ({self.packing}), whose rows are full already",
      self.width_buckets,
    )
    if self.share_prompts:
      _check(
        not self.packing,
        "batch.share_prompts",
        f"off with batch.packing ({self.packing}), whose rows hold a prompt for"
        " each completion",
        self.share_prompts,
      )
      _check(
        self.micro_batch % self.group_size == 0,
        "batch.micro_batch",
        "a multiple of batch.group_size with batch.share_prompts, whole groups"
        f" of {self.group_size}",
        self.micro_batch,
      )

  @property
  def completions(self) -> int:
    """B = P·G, completions in one gradient step."""
    return self.prompts * self.group_size


@dataclasses.dataclass(frozen=True)
class LossConfig:
  """The off-policy loss and its denominators; ScaleRL's by default."""

  name: str = "cispo"
  clip_max: float = 4.0  # cispo: absolute cap of the ratio (paper: 4, 5 or 8)
  clip_low: float = 0.2  # clipped_surrogate, gspo: offset below 1
  clip_high: float = 0.26  # clipped_surrogate, gspo: offset above 1
  aggregation: str = "prompt_average"
  normalization: str = "batch_level"
  zero_variance: str = "drop"
  refill_limit: int = 4  # refill: batches of groups replaced for each batch
  head_dtype: str = "float32"  # of the head on this side (the paper's FP32)
  logprob_chunk: int = 0  # tokens that have logits at a time; 0: all at once

  def __post_init__(self):
    _check_types("loss", self)
    _choice("loss.name", self.name, LOSSES)
    clips = {"clip_max": self.clip_max, "clip_high": self.clip_high}
    _positive("loss", clips)
    _check(
      0.0 < self.clip_low <= 1.0, "loss.clip_low", "in (0, 1]", self.clip_low
    )
    _choice("loss.aggregation", self.aggregation, AGGREGATIONS)
    _choice("loss.normalization", self.normalization, NORMALIZATIONS)
    _choice("loss.zero_variance", self.zero_variance, ZERO_VARIANCE)
    _choice("loss.head_dtype", self.head_dtype, DTYPES)
    _positive("loss", {"refill_limit": self.refill_limit})
    _check(
      self.logprob_chunk >= 0,
      "loss.logprob_chunk",
      "0 (all tokens at once) or more",
      self.logprob_chunk,
    )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """AdamW at a constant rate after a linear warm-up, as in the paper."""

  learning_rate: float = 3e-4
  warmup_steps: int = 5
  beta1: float = 0.9
  beta2: float = 0.95
  epsilon: float = 1e-15  # small gradients underflow with the usual 1e-8
  weight_decay: float = 0.01
  clip_norm: float = 1.0

  def __post_init__(self):
    _check_types("optimizer", self)
    _positive(
      "optimizer",
      {
        "learning_rate": self.learning_rate,
        "epsilon": self.epsilon,
        "clip_norm": self.clip_norm,
      },
    )
    _check(
      self.warmup_steps >= 0,
      "optimizer.warmup_steps",
      "0 or more",
      self.warmup_steps,
    )
    _check(
      0 <= self.weight_decay < math.inf,
      "optimizer.weight_decay",
      "0 or more and finite",
      self.weight_decay,
    )
    for name in ("beta1", "beta2"):
      value = getattr(self, name)
      _check(0.0 <= value < 1.0, f"optimizer.{name}", "in [0, 1)", value)


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
  """How far apart sampler and learner may run, and on what."""

  algorithm: str = "pipeline_rl"  # or ppo_off_policy: phases alternate
  max_staleness: int = 8  # pipeline_rl: k; 0 is synchronous and on-policy
  updates_per_phase: int = 8  # ppo_off_policy: k; 1 is on-policy
  schedule: str = "logical"  # logical: counters decide; wall: readiness does
  chunks_per_step: int = 2  # logical: an update is published so much later
  generator_devices: int = 0  # 0: one on a CPU, half of an accelerator's
  tensor: int = 1  # devices that share each weight matrix, on both meshes
  fsdp: int = 1  # devices that share parameters and optimiser, trainer mesh
  expert: int = 1  # devices that share the experts of a layer, on both meshes

  def __post_init__(self):
    _check_types("pipeline", self)
    _choice("pipeline.algorithm", self.algorithm, ALGORITHMS)
    _check(
      self.max_staleness >= 0,
      "pipeline.max_staleness",
      "0 or more",
      self.max_staleness,
    )
    _choice("pipeline.schedule", self.schedule, SCHEDULES)
    _positive(
      "pipeline",
      {
        "chunks_per_step": self.chunks_per_step,
        "updates_per_phase": self.updates_per_phase,
        "tensor": self.tensor,
        "fsdp": self.fsdp,
        "expert": self.expert,
      },
    )
    _check(
      self.generator_devices >= 0,
      "pipeline.generator_devices",
      "0 (automatic) or more",
      self.generator_devices,
    )


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
  """mean@n on held-out prompts, at a fixed cadence, with its own keys."""

  every: int = 10  # steps
  samples: int = 4  # completions a held-out prompt: the n of mean@n
  seed: int = 1_000_003
  path: str = ""  # --evaluate: a JSONL of questions, not the held-out sets

  def __post_init__(self):
    _check_types("evaluation", self)
    _positive("evaluation", {"every": self.every, "samples": self.samples})


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """When the whole RunState is saved, and how many are kept."""

  every: int = 100  # steps; also at every clean stop
  keep: int = 2

  def __post_init__(self):
    _check_types("checkpoint", self)
    _positive("checkpoint", {"every": self.every, "keep": self.keep})


@dataclasses.dataclass(frozen=True)
class Config:
  """A whole run. Checks between sections are here, its own in each."""

  run: RunConfig = RunConfig()
  task: TaskConfig = TaskConfig()
  supervised: SupervisedConfig = SupervisedConfig()
  model: ModelConfig = ModelConfig()
  sampler: SamplerConfig = SamplerConfig()
  length: LengthConfig = LengthConfig()
  curriculum: CurriculumConfig = CurriculumConfig()
  batch: BatchConfig = BatchConfig()
  loss: LossConfig = LossConfig()
  optimizer: OptimizerConfig = OptimizerConfig()
  pipeline: PipelineConfig = PipelineConfig()
  evaluation: EvaluationConfig = EvaluationConfig()
  checkpoint: CheckpointConfig = CheckpointConfig()

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value, kind = getattr(self, field.name), type(field.default)
      _check(isinstance(value, kind), field.name, f"a {kind.__name__}", value)
    _check(
      self.sampler.slots >= self.batch.group_size,
      "sampler.slots",
      f"at least batch.group_size ({self.batch.group_size}): the completions"
      " of a prompt start together",
      self.sampler.slots,
    )
    _check(
      self.sampler.slots >= self.evaluation.samples,
      "sampler.slots",
      f"at least evaluation.samples ({self.evaluation.samples})",
      self.sampler.slots,
    )
    budget = self.sampler.max_completion_tokens
    row = self.sampler.max_prompt_tokens + budget
    _check(
      not self.batch.packing or self.batch.packing >= row,
      "batch.packing",
      f"0 (a row a completion) or at least {row} tokens"
      " (sampler.max_prompt_tokens + sampler.max_completion_tokens)",
      self.batch.packing,
    )
    if self.length.control == "interruption":
      # The phrase is a token or more: how many, the tokenizer will say.
      needed = self.length.max_thinking_tokens + 1 + self.length.answer_tokens
      _check(
        needed <= budget,
        "length.max_thinking_tokens + phrase + length.answer_tokens",
        f"at most sampler.max_completion_tokens ({budget})",
        needed,
        "lower the thinking budget or raise the completion budget",
      )
      _check(
        self.task.thinking_end == self.length.thinking_end
        or not set(self.task.weights) - CHAINS,
        "task.thinking_end",
        f"length.thinking_end ({self.length.thinking_end!r}), with which"
        " thinking is interrupted",
        self.task.thinking_end,
      )
    if self.length.control == "penalty":
      _check(
        self.length.penalty_cache <= budget,
        "length.penalty_cache",
        f"at most sampler.max_completion_tokens ({budget})",
        self.length.penalty_cache,
      )
    if self.model.checkpoint:
      _check(
        self.supervised.steps == 0,
        "supervised.steps",
        f"0 with model.checkpoint ({self.model.checkpoint!r}), which is the"
        " base policy",
        self.supervised.steps,
      )
    if CHAINS & set(self.task.weights):
      prompt = self.task.max_operations + 2
      _check(
        self.sampler.max_prompt_tokens >= prompt,
        "sampler.max_prompt_tokens",
        f"at least {prompt}: prompts of task.max_operations"
        f" {self.task.max_operations} are longer than this budget",
        self.sampler.max_prompt_tokens,
      )


def to_dict(config: Any) -> dict[str, Any]:
  """A config (or a section) as plain JSON-ready values."""
  return dataclasses.asdict(config)


def from_dict(values: dict[str, Any]) -> Config:
  """The inverse of `to_dict`; unknown names are refused with the list.

  >>> from_dict(to_dict(Config())) == Config()
  True
  """
  config = Config()
  known = [field.name for field in dataclasses.fields(config)]
  for section, fields in values.items():
    _check(section in known, "a config section", ", ".join(known), section)
    _check(isinstance(fields, dict), section, "a dictionary of fields", fields)
  return override(
    config,
    {
      f"{section}.{field}": value
      for section, fields in values.items()
      for field, value in fields.items()
    },
  )


def fingerprint(*sections: Any) -> str:
  """12 hex digits that name these sections (or any JSON-ready values)."""
  values = [
    to_dict(section) if dataclasses.is_dataclass(section) else section
    for section in sections
  ]
  text = json.dumps(values, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:12]


def override(config: Config, changes: dict[str, Any]) -> Config:
  """`config` with `{"section.field": value}` applied, all checks run again.

  Values given as text (from the command line) are read as the field's type;
  other values must have it.

  Raises:
    ValueError: an unknown section or field (with the list), a wrong type, or
      a value that its section refuses.

  >>> override(Config(), {"run.seed": "3"}).run.seed
  3
  """
  sections: dict[str, dict[str, Any]] = {}
  for name, value in changes.items():
    section, _, field = name.partition(".")
    known = [f.name for f in dataclasses.fields(config)]
    if section not in known:
      raise ValueError(
        f"unknown config section {section!r} in {name!r}; the sections are "
        + ", ".join(known)
      )
    current = getattr(config, section)
    fields = [f.name for f in dataclasses.fields(current)]
    if field not in fields:
      raise ValueError(
        f"unknown config field {name!r}; the fields of {section!r} are "
        + ", ".join(fields)
      )
    kind = type(getattr(current, field))
    sections.setdefault(section, {})[field] = _typed(name, value, kind)
  return dataclasses.replace(
    config,
    **{
      section: dataclasses.replace(getattr(config, section), **fields)
      for section, fields in sections.items()
    },
  )


def _typed(name: str, value: Any, kind: type) -> Any:
  """`value` as `kind`, from text or from a number that loses nothing."""
  refused = ValueError(f"{name} must be of type {kind.__name__}, got {value!r}")
  if kind is bool:
    words = {"true": True, "false": False, True: True, False: False}
    key = value.lower() if isinstance(value, str) else value
    if not isinstance(key, bool | str) or key not in words:
      raise refused
    return words[key]
  if kind is str:
    if not isinstance(value, str):
      raise refused
    return value
  if isinstance(value, bool) or not isinstance(value, str | int | float):
    raise refused
  try:
    number = kind(value)
  except (ValueError, OverflowError) as error:
    raise refused from error
  if kind is int and not isinstance(value, str) and number != value:
    raise refused
  return number
