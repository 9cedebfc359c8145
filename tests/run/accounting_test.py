import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from scalerl_jax.config import BatchConfig, ModelConfig, SamplerConfig
from scalerl_jax.learning.buckets import Bucket
from scalerl_jax.models import attention
from scalerl_jax.models.policy import UNROLL_LAYERS, Policy
from scalerl_jax.pipeline.loop import Totals
from scalerl_jax.run import accounting
from tests.helpers import products, small_policy

# XLA also counts norms, softmax, rotations and residual sums; measured at this
# shape 1.3 % of the forward pass and 1.4 % of forward and backward.
TOLERANCE = 0.02
MODEL = ModelConfig(
  width=128,
  num_layers=2,
  num_heads=6,
  num_kv_heads=2,
  head_width=32,
  mlp_width=320,
)
SAMPLER = SamplerConfig(slots=11, max_prompt_tokens=5, max_completion_tokens=7)
BATCH = BatchConfig(prompts=3, group_size=2, micro_batch=2)
VOCAB = 131


@pytest.fixture(scope="module")
def policy():
  # XLA reports one layer of a scan: only unrolled layers can be compared.
  assert MODEL.num_layers <= UNROLL_LAYERS
  return nnx.split(Policy(MODEL, vocab_size=VOCAB, rngs=nnx.Rngs(0)))


def xla_flops(function, *arguments):
  return jax.jit(function).lower(*arguments).compile().cost_analysis()["flops"]


def test_forward_is_what_xla_counts(policy):
  graph, params = policy
  tokens = jnp.zeros((3, 40), jnp.int32)
  counted = accounting.forward_flops(
    MODEL, vocab_size=VOCAB, tokens=3 * 40, context=40
  )
  measured = xla_flops(lambda p, t: nnx.merge(graph, p)(t), params, tokens)
  assert counted == pytest.approx(measured, rel=TOLERANCE)
  assert counted < measured


def test_experts_cost_what_dense_layers_of_their_width_do():
  """Two of five and a shared one are as wide as an MLP of three."""
  experts = dataclasses.replace(
    MODEL,
    num_experts=5,
    experts_per_token=2,
    expert_width=MODEL.mlp_width // 2,
    shared_expert=True,
    dense_layers="1",
  )
  dense = dataclasses.replace(MODEL, num_layers=1)
  wide = dataclasses.replace(dense, mlp_width=3 * MODEL.mlp_width // 2)
  size = {"tokens": 7, "context": 3, "head_tokens": 0, "vocab_size": VOCAB}
  router = 2 * 7 * MODEL.width * 5
  assert accounting.forward_flops(experts, **size) == router + sum(
    accounting.forward_flops(each, **size) for each in (dense, wide)
  )


@pytest.mark.parametrize("length", [40, 150])  # attention whole, and in blocks
def test_training_is_what_xla_counts(policy, length):
  graph, params = policy
  tokens = jnp.zeros((3, length), jnp.int32)

  def loss(params, tokens):
    policy = nnx.merge(graph, params)
    return policy.head(policy.hidden(tokens)[:, :-1]).sum()

  counted = accounting.training_flops(
    MODEL, vocab_size=VOCAB, rows=3, row_tokens=length
  )
  measured = xla_flops(jax.value_and_grad(loss), params, tokens)
  assert counted == pytest.approx(measured, rel=TOLERANCE)


def product_flops(traced):
  """Of every product of a traced function: 2 for each multiply-add."""
  flops = 0
  for product in products(traced):
    (contracted, _), _ = product.params["dimension_numbers"]
    left, out = product.invars[0].aval, product.outvars[0].aval
    flops += 2 * out.size * math.prod(left.shape[axis] for axis in contracted)
  return flops


@pytest.mark.parametrize("width", [11, 24])  # one block, two blocks
def test_groups_behind_their_prompts_are_counted_product_by_product(
  monkeypatch, width
):
  monkeypatch.setattr(attention, "BLOCK", 12)
  one_layer = dataclasses.replace(MODEL, num_layers=1)  # a scan is one equation
  policy = small_policy(one_layer, vocab_size=VOCAB)
  bucket = Bucket(width=width, rows=2, group_size=3, prompt=7)
  assert len(attention.blocks(width)) == max(1, width // 12)
  prompts = jnp.zeros((2, 7), jnp.int32)
  completions = jnp.zeros((2, 3, width), jnp.int32)

  def logits(prompts, completions):
    lengths = jnp.array([7, 3])
    hidden = policy.hidden_of_groups(prompts, lengths, completions)[1]
    return policy.head(hidden)

  assert product_flops(jax.make_jaxpr(logits)(prompts, completions)) == (
    accounting.forward_flops(
      one_layer,
      vocab_size=VOCAB,
      tokens=bucket.tokens,
      context=bucket.keys / bucket.tokens,
      head_tokens=bucket.logits,
    )
  )


def test_decode_step_is_what_xla_counts(policy):
  graph, params = policy
  cache = nnx.merge(graph, params).empty_cache(
    prompts=11, slots=11, prompt_tokens=13, completion_tokens=17
  )
  slots = jnp.zeros((11,), jnp.int32)

  def step(params, cache):
    policy = nnx.merge(graph, params)
    return policy.head(policy.decode(slots, slots, cache)[0])

  counted = accounting.forward_flops(
    MODEL, vocab_size=VOCAB, tokens=11, context=13 + 17
  )
  assert counted == pytest.approx(xla_flops(step, params, cache), rel=TOLERANCE)


def forward_by_hand(tokens, keys, head_tokens):
  """Multiply-adds matrix by matrix, two FLOPs each."""
  flops = 0
  for _ in range(MODEL.num_layers):
    flops += tokens * 128 * 6 * 32  # query
    flops += 2 * tokens * 128 * 2 * 32  # key, value
    flops += 2 * tokens * keys * 6 * 32  # scores, mix
    flops += tokens * 6 * 32 * 128  # out
    flops += 3 * tokens * 128 * 320  # gate, up, down
  return 2 * (flops + head_tokens * 128 * VOCAB)


def compute(batch=BATCH):
  return accounting.Compute(MODEL, SAMPLER, batch, vocab_size=VOCAB)


def test_full_is_all_completions_generated_and_trained_on():
  # Two steps of 3 prompts and 6 completions, 50 completion tokens in all.
  generated = forward_by_hand(2 * 3 * 5, 5, 2 * 3)
  generated += forward_by_hand(50 - 12, 12, 50 - 12)
  trained = 3 * forward_by_hand(12 * 12, 12, 12 * 11)
  assert compute().full(2, 50) == generated + trained


def test_full_holds_what_was_generated_to_be_replaced():
  # Two groups of two more were generated, 9 tokens, and not trained on.
  more = forward_by_hand(2 * 5, 5, 2) + forward_by_hand(9 - 4, 12, 9 - 4)
  full = compute().full(2, 50, discarded_groups=2, discarded_tokens=9)
  assert full == compute().full(2, 50) + more


def computed(micro_batches, width=12):
  """What a learner counts of these full micro-batches."""
  rows = micro_batches * BATCH.micro_batch
  return {
    "computed_logits": rows * (width - 1),
    "computed_tokens": rows * width,
    "computed_keys": rows * width**2,
  }


def sampled(steps, rows):
  """Counters of decode steps of 11 slots and 12 keys, and of prompts of 5."""
  return {
    "decode_steps": steps,
    "decoded_slots": steps * 11,
    "decoded_keys": steps * 11 * 12,
    "decoded_columns": steps * 11 * 12,
    "prefilled_rows": rows,
    "prefilled_tokens": rows * 5,
    "prefilled_keys": rows * 5 * 5,
  }


def test_spent_is_what_the_programs_compute():
  totals = Totals(**sampled(9, 4), **computed(4))
  generated = forward_by_hand(20, 5, 4) + forward_by_hand(9 * 11, 12, 9 * 11)
  trained = 3 * forward_by_hand(4 * 2 * 12, 12, 4 * 2 * 11)
  assert compute().spent_on_generation(totals) == generated
  assert compute().spent_on_training(totals) == trained
  assert compute().spent(totals) == generated + trained


def test_rows_cost_their_own_width_and_full_is_what_was_asked_for():
  wide, narrow = computed(4, 31), computed(2, 7)
  rows = {name: wide[name] + narrow[name] for name in wide}
  spent = compute().spent_on_training(Totals(**rows))
  by_hand = forward_by_hand(8 * 31, 31, 8 * 30) + forward_by_hand(28, 7, 24)
  assert spent == pytest.approx(3 * by_hand, rel=1e-12)
  batch = dataclasses.replace(BATCH, packing=31)
  assert compute(batch).full(2, 50) == compute().full(2, 50)


def test_flops_of_parts_add_up():
  # So that differences of counters may be given as well as counters.
  first = Totals(**sampled(3, 2), **computed(1))
  rest = Totals(**sampled(6, 3), **computed(5))
  both = Totals(**sampled(9, 5), **computed(6))
  made = compute()
  assert made.spent(first) + made.spent(rest) == made.spent(both)
  assert made.full(2, 41) + made.full(3, 67) == made.full(5, 108)


def test_only_counters_count():
  # Not the clock, not what was generated ahead, not the filter.
  totals = Totals(**sampled(9, 4), **computed(4))
  later = dataclasses.replace(
    totals, train_seconds=7.0, skipped_steps=3, generated_tokens=11, chunks=2
  )
  assert compute().spent(totals) == compute().spent(later)


def test_training_spent_is_full_when_nothing_is_dropped():
  step, made = 5, compute()
  whole = step * BATCH.completions // BATCH.micro_batch
  spent = made.spent_on_training(Totals(**computed(whole)))
  asked = accounting.training_flops(
    MODEL, vocab_size=VOCAB, rows=step * BATCH.completions, row_tokens=12
  )
  assert spent == asked


def test_shares_pass_and_anything_else_is_refused():
  for share in (0.0, 0.37, 1.0):
    assert accounting.check_share("MFU", share) == share
  for wrong in (1.0001, 7.0, -0.01, float("nan"), float("inf")):
    with pytest.raises(ValueError, match="MFU must be a share"):
      accounting.check_share("MFU", wrong)


# Bytes of decode steps.


def _arrays_of_a_step(model, slots, columns, kv_dtype=""):
  """Bytes that one step touches, from arrays of a policy and its cache."""
  policy = Policy(model, vocab_size=VOCAB, rngs=nnx.Rngs(0))
  weights = sum(x.size for x in jax.tree.leaves(nnx.state(policy)))
  cache = jax.eval_shape(
    lambda: policy.empty_cache(
      prompts=slots,
      slots=slots,
      prompt_tokens=5,
      completion_tokens=columns - 5,
      dtype=kv_dtype,
    )
  )
  parts = jax.tree.leaves((cache.prompt_k, cache.prompt_v, cache.rings))
  read = sum(x.size * x.dtype.itemsize for x in parts)
  return jnp.dtype(model.dtype).itemsize * weights + read + read // columns


@pytest.mark.parametrize(
  ("dtype", "kv"),
  [("float32", ""), ("bfloat16", ""), ("float32", "bfloat16")],
)
def test_bytes_of_a_step_are_those_of_its_arrays(dtype, kv):
  model = dataclasses.replace(MODEL, dtype=dtype)
  told = accounting.decode_bytes(
    model, vocab_size=VOCAB, steps=7, slots=11, columns=12, kv_dtype=kv
  )
  assert told == 7 * _arrays_of_a_step(model, 11, 12, kv)


def test_rows_of_a_table_and_experts_out_of_reach_are_not_moved():
  untied = dataclasses.replace(MODEL, tied_head=False)
  sparse = dataclasses.replace(
    untied, num_experts=13, experts_per_token=2, expert_width=17
  )
  for slots, rows, experts in ((3, 3, 6), (200, VOCAB, 13)):
    whole = _arrays_of_a_step(sparse, slots, 12)
    left_out = (VOCAB - rows) * MODEL.width
    left_out += MODEL.num_layers * (13 - experts) * 3 * MODEL.width * 17
    told = accounting.decode_bytes(
      sparse, vocab_size=VOCAB, steps=1, slots=slots, columns=12
    )
    assert told == whole - 4 * left_out


def test_a_run_moved_the_bytes_of_its_decode_steps():
  compute = accounting.Compute(MODEL, SAMPLER, BATCH, vocab_size=VOCAB)
  wanted = 9 * _arrays_of_a_step(MODEL, 11, 12)
  assert compute.decoded_bytes(Totals(**sampled(9, 0))) == wanted
