"""FLOPs and bytes in closed form: what was asked for, and what devices did.

A multiply-add counts as 2. Matrix products and attention are counted; norms,
softmax, rotations and the optimiser are not (a few percent of a small model,
nothing of a large one).
"""

import math

from scalerl_jax.config import BatchConfig, ModelConfig, SamplerConfig
from scalerl_jax.models.attention import pairs
from scalerl_jax.models.generator import generator_model
from scalerl_jax.pipeline.events import Totals
from scalerl_jax.run.memory import parameter_count

# Forward once; backward twice: gradients of the inputs and of the weights.
TRAINING_PASSES = 3


def forward_flops(
  model: ModelConfig,
  *,
  vocab_size: int,
  tokens: float,
  context: float,
  head_tokens: float | None = None,
) -> float:
  """FLOPs of a forward pass.

  2·tokens·L·(2·D·H·Dh + 2·D·K·Dh + 3·D·F + 2·H·Dh·context) + 2·head_tokens·D·V;
  on a layer with experts D·E + 3·D·Fe·(experts a token + 1 if one is shared) in
  place of 3·D·F. Count in `context` every key that a query is multiplied with,
  masked ones too: attention over whole rows of few tokens computes all T for
  each, and no less than 9/16 of it in long ones (`models.attention.pairs`).

  Args:
    model: the architecture.
    vocab_size: V.
    tokens: positions processed, all rows together.
    context: mean keys a position, computed and not merely visible.
    head_tokens: positions that get logits; None for all.

  Example:
    >>> small = ModelConfig(
    ...   width=2,
    ...   num_layers=1,
    ...   num_heads=1,
    ...   num_kv_heads=1,
    ...   head_width=2,
    ...   mlp_width=3,
    ... )
    >>> forward_flops(small, vocab_size=5, tokens=1, context=1)
    96.0

  Reference:
    Kaplan et al., 2020, arXiv 2001.08361, table 1; here with grouped-query
    attention and a gated MLP.
  """
  heads = model.num_heads * model.head_width
  kv_heads = model.num_kv_heads * model.head_width
  attention = 2 * model.width * (heads + kv_heads) + 2 * heads * context
  mlp = 3 * model.width * model.mlp_width
  # Chosen experts only, as a grouped product computes on an accelerator; a
  # CPU's goes through all of them.
  expert = 3 * model.width * model.expert_width
  mixture = model.width * model.num_experts + expert * (
    model.experts_per_token + model.shared_expert
  )
  sparse = sum(model.sparse)
  dense = model.num_layers - sparse
  body = tokens * (
    model.num_layers * attention + dense * mlp + sparse * mixture
  )
  head = (tokens if head_tokens is None else head_tokens) * model.width
  return 2.0 * (body + head * vocab_size)


def prefill_flops(
  model: ModelConfig, *, vocab_size: int, prompts: float, prompt_tokens: int
) -> float:
  """FLOPs of prefilling prompts, each once for its whole group.

  Args:
    model: the architecture.
    vocab_size: V.
    prompts: how many.
    prompt_tokens: positions of each, padding included; the last one gets
      logits, from which the first tokens are drawn.
  """
  return forward_flops(
    model,
    vocab_size=vocab_size,
    tokens=prompts * prompt_tokens,
    context=pairs(prompt_tokens) / prompt_tokens,
    head_tokens=prompts,
  )


def generation_flops(
  model: ModelConfig,
  *,
  vocab_size: int,
  prompts: float,
  prompt_tokens: int,
  completions: float,
  completion_tokens: float,
  context: float,
) -> float:
  """FLOPs of generating completions: prefill, then a pass for each token.

  The first token of a completion is drawn by the prefill and its last is not
  fed back, so n tokens cost n − 1 passes.

  Args:
    model: the architecture.
    vocab_size: V.
    prompts: prefilled once each.
    prompt_tokens: positions of each prompt, padding included.
    completions: how many.
    completion_tokens: of all completions together.
    context: keys a decoded token is multiplied with, masked ones too.
  """
  return prefill_flops(
    model, vocab_size=vocab_size, prompts=prompts, prompt_tokens=prompt_tokens
  ) + forward_flops(
    model,
    vocab_size=vocab_size,
    tokens=completion_tokens - completions,
    context=context,
  )


def learning_flops(
  model: ModelConfig,
  *,
  vocab_size: int,
  tokens: float,
  keys: float,
  logits: float,
) -> float:
  """FLOPs of forward and backward: 3 × forward.

  Args:
    model: the architecture.
    vocab_size: V.
    tokens: positions computed, padding included.
    keys: that all of them together were multiplied with, masked ones too.
    logits: positions that got logits.
  """
  return TRAINING_PASSES * forward_flops(
    model,
    vocab_size=vocab_size,
    tokens=tokens,
    context=keys / max(tokens, 1),
    head_tokens=logits,
  )


def training_flops(
  model: ModelConfig, *, vocab_size: int, rows: float, row_tokens: int
) -> float:
  """`learning_flops` of rows.

  Args:
    model: the architecture.
    vocab_size: V.
    rows: completions, a row each.
    row_tokens: positions of a row, padding included; all but the last get
      logits.
  """
  return learning_flops(
    model,
    vocab_size=vocab_size,
    tokens=rows * row_tokens,
    keys=rows * pairs(row_tokens),
    logits=rows * (row_tokens - 1),
  )


def decode_bytes(
  model: ModelConfig,
  *,
  vocab_size: int,
  steps: float,
  slots: float,
  columns: float,
  kv_dtype: str = "",
) -> float:
  """Least bytes that decode steps move between memory and the device.

  steps·b·(weights + 2·S·L·K·Dh·(columns + 1)): the weights once for all slots,
  the keys and values of all columns that are computed, and those of the new
  token. b is 4, or 2 where the body is bfloat16. Of an embedding table that
  is not the head too, the rows of S tokens; of experts, those that S tokens
  can reach. Activations, and copies that a layout needs, are left out: a share
  of a bandwidth must not be above 1 by what was counted.

  Args:
    model: the architecture.
    vocab_size: V.
    steps: decode steps.
    slots: S, completions that a step writes to.
    columns: of the cache that a step reads for a slot, masked ones too; those
      of a prompt are read once for its group.
    kv_dtype: of keys and values; empty: the body's.

  Example:
    >>> small = ModelConfig(
    ...   width=2,
    ...   num_layers=1,
    ...   num_heads=1,
    ...   num_kv_heads=1,
    ...   head_width=2,
    ...   mlp_width=3,
    ... )
    >>> decode_bytes(small, vocab_size=5, steps=1, slots=10, columns=3)
    840.0
  """
  item = 2 if model.dtype == "bfloat16" else 4
  weights = parameter_count(model, vocab_size)
  if not model.tied_head:
    weights -= max(vocab_size - slots, 0) * model.width
  reached = min(model.num_experts, slots * model.experts_per_token)
  expert = 3 * model.width * model.expert_width
  weights -= sum(model.sparse) * (model.num_experts - reached) * expert
  column = 2 * model.num_layers * model.num_kv_heads * model.head_width
  kept = 2 if (kv_dtype or model.dtype) == "bfloat16" else 4
  kv = kept * slots * column * (columns + 1)
  return float(steps * (item * weights + kv))


class Compute:
  """A run's FLOPs from its counters alone: no clock, no sampling.

  *Full* is the work that the recipe asks for: all completions of all batches
  generated and trained on, whatever a filter left out, and nothing generated
  ahead. *Spent* is what the devices computed: all slots at each decode step,
  occupied or not, all prompts prefilled so far, and the micro-batches that the
  filter left, of rows as wide as they were cut. Both count padding. The full
  work is that of rows of the full width, each with its prompt, so that layouts
  of a batch (its packing, width buckets, shared prompts) can be compared.
  Evaluation is in neither, and so is what a backward pass computes once more to
  save memory.

  Args:
    model: the architecture.
    sampler: slots and budgets.
    batch: completions a step.
    vocab_size: V, of the tokenizer.
  """

  def __init__(
    self,
    model: ModelConfig,
    sampler: SamplerConfig,
    batch: BatchConfig,
    *,
    vocab_size: int,
  ):
    self._model, self._vocab_size = model, vocab_size
    self._sampler, self._batch = sampler, batch
    # Prompt and completion columns: of a row, and of a slot's cache.
    self._row_tokens = sampler.max_prompt_tokens + sampler.max_completion_tokens

  def full(
    self,
    step: int,
    trained_tokens: int,
    *,
    discarded_groups: int = 0,
    discarded_tokens: int = 0,
  ) -> float:
    """FLOPs of the work asked for in these many steps.

    Args:
      step: updates, skipped ones included.
      trained_tokens: completion tokens of all their batches.
      discarded_groups: generated and replaced, as dynamic sampling asks.
      discarded_tokens: completion tokens of these.
    """
    rows = step * self._batch.completions
    discarded = discarded_groups * self._batch.group_size
    return generation_flops(
      self._model,
      vocab_size=self._vocab_size,
      prompts=step * self._batch.prompts + discarded_groups,
      prompt_tokens=self._sampler.max_prompt_tokens,
      completions=rows + discarded,
      completion_tokens=trained_tokens + discarded_tokens,
      context=self._row_tokens,
    ) + training_flops(
      self._model,
      vocab_size=self._vocab_size,
      rows=rows,
      row_tokens=self._row_tokens,
    )

  def spent_on_generation(self, totals: Totals) -> float:
    """FLOPs that the generator mesh computed."""
    prefilled, decoded = totals.prefilled_tokens, totals.decoded_slots
    return forward_flops(
      self._model,
      vocab_size=self._vocab_size,
      tokens=prefilled,
      context=totals.prefilled_keys / max(prefilled, 1),
      head_tokens=totals.prefilled_rows,
    ) + forward_flops(
      self._model,
      vocab_size=self._vocab_size,
      tokens=decoded,
      context=totals.decoded_keys / max(decoded, 1),
    )

  def decoded_bytes(self, totals: Totals) -> float:
    """Least bytes that the decode steps of the generator mesh moved."""
    steps = max(totals.decode_steps, 1)
    slots = totals.decoded_slots / steps
    return decode_bytes(
      generator_model(self._model, self._sampler),
      vocab_size=self._vocab_size,
      steps=totals.decode_steps,
      slots=slots,
      columns=totals.decoded_columns / max(totals.decoded_slots, 1),
      kv_dtype=self._sampler.kv_dtype,
    )

  def spent_on_training(self, totals: Totals) -> float:
    """FLOPs that the trainer mesh computed."""
    return learning_flops(
      self._model,
      vocab_size=self._vocab_size,
      tokens=totals.computed_tokens,
      keys=totals.computed_keys,
      logits=totals.computed_logits,
    )

  def spent(self, totals: Totals) -> float:
    """FLOPs that the devices computed, generation and training together."""
    return self.spent_on_generation(totals) + self.spent_on_training(totals)


def check_share(name: str, value: float) -> float:
  """`value` if it is a share, so that no figure above 100 % is ever told.

  Args:
    name: of the figure, for the message.
    value: in [0, 1].

  Raises:
    ValueError: below 0, above 1 or NaN.

  Example:
    >>> check_share("MFU", 0.43)
    0.43
  """
  if math.isnan(value) or not 0.0 <= value <= 1.0:
    raise ValueError(
      f"{name} must be a share in [0, 1], got {value:.6g}; what it divides was"
      " counted or timed wrongly"
    )
  return value
