"""The transformer policy: causal, cached = uncached, sharded = unsharded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scalerl_jax.config import ModelConfig
from scalerl_jax.models import kv_cache
from scalerl_jax.models import policy as policy_room
from scalerl_jax.models.generator import with_head_dtype
from scalerl_jax.models.operands import multiplied_in
from scalerl_jax.models.policy import Policy
from scalerl_jax.models.sharding import make_mesh
from tests.helpers import (
  SHAPE,
  V,
  equations,
  numpy_normal,
  optimised,
  small_policy,
  weights,
)
from tests.reference import transformer as reference

# Grouped and tied, unrolled; one key a query and untied, scanned.
GROUPED = SHAPE
SCANNED = dataclasses.replace(
  SHAPE, num_layers=5, num_kv_heads=4, tied_head=False
)
SHAPES = pytest.mark.parametrize(
  "shape", [GROUPED, SCANNED], ids=["grouped_tied", "scanned_untied"]
)
ONE_LAYER = dataclasses.replace(SHAPE, num_layers=1)
# Tokens of every test, so that a policy is compiled for one shape only.
ROWS, WIDTH = 4, 24
NORMS = ("attention_norm", "mlp_norm")


@nnx.jit
def _logits(policy, tokens, segments):
  return policy(tokens, segment_ids=segments)


@nnx.jit
def _hidden_and_logits(policy, tokens):
  hidden = policy.hidden(tokens)
  return hidden, policy.head(hidden)


@nnx.jit
def _prefill(policy, tokens, segments):
  return policy.prefill(tokens, segments)


@nnx.jit
def _prepare(policy):
  return policy.prepare(WIDTH)


@nnx.jit
def _decode(policy, tokens, positions, cache, prepared):
  hidden, cache = policy.decode(tokens, positions, cache, prepared)
  return jax.nn.log_softmax(policy.head(hidden)), cache


def _tokens(*shape, seed=0):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.integers(0, V, shape), jnp.int32)


def _padded(rows, seed=5):
  """Rows of several lengths at the left of junk, and their segments."""
  tokens = np.array(_tokens(ROWS, WIDTH, seed=seed))
  segments = np.zeros_like(tokens)
  for n, row in enumerate(rows):
    tokens[n, : len(row)], segments[n, : len(row)] = row, 1
  return jnp.asarray(tokens), jnp.asarray(segments)


def test_the_scanned_shape_is_scanned_and_the_other_is_not():
  assert GROUPED.num_layers <= policy_room.UNROLL_LAYERS < SCANNED.num_layers


@SHAPES
def test_logits_equal_the_scalar_transformer(shape):
  policy = small_policy(shape)
  tokens = np.asarray(_tokens(2, 9))
  logits = _logits(policy, *_padded(tokens))
  assert logits.shape == (ROWS, WIDTH, V)
  assert logits.dtype == jnp.float32
  for row, row_tokens in zip(logits[:, :9], tokens, strict=False):
    expected = reference.forward(weights(nnx.state(policy)), shape, row_tokens)
    np.testing.assert_allclose(row, expected, rtol=1e-4, atol=1e-4)


@nnx.jit
def _hidden(policy, tokens, segments):
  return policy.hidden(tokens, None, segments)


@nnx.jit
def _hidden_of_groups(policy, prompts, lengths, completions):
  return policy.hidden_of_groups(prompts, lengths, completions)


CHUNKED = dataclasses.replace(SHAPE, attention_chunk=3, no_rope_layers="1")


@pytest.mark.parametrize(
  "shape",
  [GROUPED, SCANNED, CHUNKED],
  ids=["grouped_tied", "scanned_untied", "chunked"],
)
def test_a_prompt_computed_once_gives_what_rows_of_their_own_give(shape):
  policy = small_policy(shape)
  lengths = np.array([3, 1])
  prompts, completions = _tokens(2, 4), _tokens(2, 3, 6, seed=1)
  asked, written = _hidden_of_groups(
    policy, prompts, jnp.asarray(lengths), completions
  )
  for p, length in enumerate(lengths):
    for g in range(3):
      row = np.concatenate([prompts[p, :length], completions[p, g]])
      expected = _hidden(policy, *_padded([row]))[0, : len(row)]
      actual = np.concatenate([asked[p, :length], written[p, g]])
      np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("chunk", [0, 5])
def test_attention_by_the_library_gives_the_same_states(monkeypatch, chunk):
  ours = small_policy(dataclasses.replace(GROUPED, attention_chunk=chunk))
  theirs = small_policy(
    dataclasses.replace(GROUPED, attention_chunk=chunk, attention="xla")
  )
  library, calls = jax.nn.dot_product_attention, []

  def record(*arrays, **options):
    calls.append(options["implementation"])
    return library(*arrays, **options)

  monkeypatch.setattr(jax.nn, "dot_product_attention", record)
  tokens, segments = _padded(PROMPTS)
  lengths = segments.sum(axis=1)
  completions = _tokens(ROWS, 2, 7, seed=3)

  def states(policy):
    """Of tokens; what padding holds is nobody's."""
    whole = _hidden(policy, tokens, segments)
    asked, written = _hidden_of_groups(policy, tokens, lengths, completions)
    prefilled = _prefill(policy, tokens, segments)[0]
    real = segments > 0
    return whole[real], asked[real], written[: len(PROMPTS)], prefilled[real]

  expected = states(ours)
  assert not calls
  for actual, wanted in zip(states(theirs), expected, strict=True):
    np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5)
  # Rows; prompts and completions of groups; prompts alone. Layers are traced
  # once.
  assert calls == ["xla"] * 4


def test_no_gradient_reaches_a_later_token():
  graph, params = nnx.split(small_policy())
  probe = jnp.asarray(
    np.random.default_rng(1).standard_normal(SHAPE.width), jnp.float32
  )

  tokens = np.random.default_rng(0).permutation(V)[:7].astype(np.int32)

  def outputs(table):
    policy = nnx.merge(graph, params)
    policy.embedding = nnx.Param(table)
    return policy.hidden(jnp.asarray(tokens)[None])[0] @ probe

  table = nnx.merge(graph, params).embedding[...]
  jacobian = np.asarray(jax.jit(jax.jacrev(outputs))(table))  # [T, V, D]
  # Each token stands at one place, so its row of the table is that place.
  reached = np.abs(jacobian[:, tokens]).max(axis=-1)
  for t, row in enumerate(reached):
    assert (row[: t + 1] > 1e-6).all()
    assert (row[t + 1 :] == 0.0).all()


PROMPTS = ([3, 1, 4], [1], [5, 9, 2, 6, 5])
COLUMNS = 8


class Cached:
  """A policy that reads token by token; slots can start again."""

  def __init__(self, shape, *, clock, prepared=False):
    self.policy = small_policy(shape)
    self.prepared = _prepare(self.policy) if prepared else None
    lengths = np.array([len(prompt) for prompt in PROMPTS], np.int32)
    padded = np.zeros((len(PROMPTS), lengths.max()), np.int32)
    for row, prompt in zip(padded, PROMPTS, strict=True):
      row[: len(prompt)] = prompt
    present = np.arange(lengths.max()) < lengths[:, None]
    self.prompt_hidden, key, value = _prefill(
      self.policy, jnp.asarray(padded), jnp.asarray(present, jnp.int32)
    )
    cache = self.policy.empty_cache(
      prompts=len(PROMPTS),
      slots=ROWS,
      group_size=ROWS,
      prompt_tokens=int(lengths.max()),
      completion_tokens=COLUMNS,
    )
    unrolled = self.policy.unrolled
    slots = jnp.arange(ROWS, dtype=jnp.int32)
    (ring,) = cache.rings
    self.cache = dataclasses.replace(
      cache,
      # Whatever a predecessor left: nobody may read it.
      rings=(
        kv_cache.Ring(
          k=jax.tree.map(lambda x: x + 1e3, ring.k),
          v=jax.tree.map(lambda x: x - 1e3, ring.v),
        ),
      ),
      prompt_k=tuple(key) if unrolled else key,
      prompt_v=tuple(value) if unrolled else value,
      prompt_length=jnp.asarray(lengths),
      # Slot n is member n of whatever group it continues.
      members=jnp.broadcast_to(slots, (len(PROMPTS), ROWS)),
      member=slots,
      clock=jnp.int32(clock),
    )
    self.read = [[] for _ in range(ROWS)]

  def start(self, slot, prompt):
    """A slot leaves its sequence and continues another prompt."""
    self.read[slot] = list(PROMPTS[prompt])
    self.cache = dataclasses.replace(
      self.cache,
      group=self.cache.group.at[slot].set(prompt),
      length=self.cache.length.at[slot].set(0),
    )

  def step(self, tokens):
    """One token more in each slot; log-probs after it, `[S, V]`."""
    positions = jnp.asarray([len(row) for row in self.read], jnp.int32)
    for row, token in zip(self.read, tokens, strict=True):
      row.append(int(token))
    logps, self.cache = _decode(
      self.policy, jnp.asarray(tokens), positions, self.cache, self.prepared
    )
    return np.asarray(logps)

  def uncached(self):
    """The same of one forward pass over all that each slot has read."""
    logits = np.asarray(_logits(self.policy, *_padded(self.read)))
    newest = [len(row) - 1 for row in self.read]
    return np.asarray(jax.nn.log_softmax(logits[np.arange(ROWS), newest]))


@SHAPES
def test_cached_decode_equals_the_full_forward(shape):
  # The ring has 8 columns and starts at its sixth, so it wraps.
  cached = Cached(shape, clock=5, prepared=True)
  for slot, prompt in enumerate((1, 0, 1, 2)):
    cached.start(slot, prompt)
  for tokens in np.asarray(_tokens(COLUMNS, ROWS)):
    np.testing.assert_allclose(
      cached.step(tokens), cached.uncached(), rtol=1e-4, atol=1e-4
    )


def test_a_slot_used_again_sees_nothing_of_its_predecessor():
  cached = Cached(GROUPED, clock=0)
  for slot in range(ROWS):
    cached.start(slot, 0)
  # Slots start again at different times, the ring goes round three times.
  for n, tokens in enumerate(np.asarray(_tokens(24, ROWS, seed=1))):
    for slot, every in enumerate((8, 3, 5, 1)):
      if n % every == 0:
        cached.start(slot, (n + slot) % 3)
    np.testing.assert_allclose(
      cached.step(tokens), cached.uncached(), rtol=1e-4, atol=1e-4
    )


def test_prepared_weights_are_rounded_where_the_forward_rounds_them():
  shape = dataclasses.replace(
    SHAPE,
    dot_dtype="bfloat16",
    attention_bias=True,
    qk_norm="scaled",
    num_experts=3,
    expert_width=5,
    shared_expert=True,
    dense_layers="0",
  )
  policy = small_policy(shape)
  found = policy.prepare(9).layers
  products = {"query", "key", "value", "out", "gate", "up", "down"}
  for layer, weights_of_layer in enumerate(found):
    for name, weight in weights_of_layer.items():
      dtype = multiplied_in("bfloat16") if name in products else "float32"
      stack = policy.layers[name][...]
      # The dense layer comes first, so a stack of one is of either.
      whole = stack[layer if len(stack) == 2 else 0]
      assert weight.dtype == dtype, name
      rounded = whole.astype("bfloat16" if name in products else "float32")
      np.testing.assert_array_equal(weight, rounded.astype(dtype), name)
  assert set(found[0]) | set(found[1]) == set(policy.layers)


def test_prefill_gives_the_hidden_states_of_the_forward():
  cached = Cached(GROUPED, clock=0)
  logits = _logits(cached.policy, *_padded(PROMPTS))
  heads = cached.policy.head(cached.prompt_hidden)
  for n, prompt in enumerate(PROMPTS):
    span = slice(len(prompt))
    np.testing.assert_allclose(
      heads[n, span], logits[n, span], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("left", [0, 1, 4, 17])
def test_padding_of_any_content_on_either_side_changes_nothing(left):
  policy = small_policy()
  known = np.array([7, 0, 3, 3, 19, 22, 1], np.int32)
  rows = np.array(_tokens(ROWS, WIDTH, seed=left))
  segments = np.zeros_like(rows)
  span = slice(left, left + len(known))
  rows[:, span], segments[:, span] = known, 1
  logits = _logits(policy, jnp.asarray(rows), jnp.asarray(segments))
  assert np.isfinite(logits).all()
  expected = reference.forward(weights(nnx.state(policy)), GROUPED, known)
  expected = [reference.log_softmax(row) for row in expected]
  for row in jax.nn.log_softmax(logits[:, span]):
    np.testing.assert_allclose(row, expected, rtol=1e-4, atol=1e-4)
    # Other junk, the same bits.
    np.testing.assert_array_equal(row, jax.nn.log_softmax(logits[0, span]))


def test_packed_segments_do_not_see_each_other_value_and_gradient():
  graph, params = nnx.split(small_policy(ONE_LAYER))

  @jax.jit
  def second(params, row, segments):
    logits = nnx.merge(graph, params)(row, segment_ids=segments)
    logps = jax.nn.log_softmax(logits[0, 4:])
    return (logps[:, 5] * jnp.arange(1.0, 7.0)).sum(), logps

  step = jax.jit(jax.value_and_grad(second, has_aux=True))
  row = np.array(_tokens(1, 10, seed=3))
  packed = np.array([[1] * 4 + [2] * 6], np.int32)
  alone = np.where(packed == 2, packed, 0)
  (value, logps), gradient = step(params, row, packed)
  (expected, _), expected_gradient = step(params, row, alone)
  np.testing.assert_allclose(value, expected, rtol=1e-6)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5),
    gradient,
    expected_gradient,
  )
  # Another neighbour, the same bits; another past, other ones.
  row[0, :4] = (row[0, :4] + 1) % V
  (_, same), _ = step(params, row, packed)
  np.testing.assert_array_equal(same, logps)
  (_, other), _ = step(params, row, np.ones_like(packed))
  assert np.abs(np.asarray(other - logps)).max() > 1e-2


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_of_a_bfloat16_body_is_computed_in_float32(tied):
  shape = dataclasses.replace(ONE_LAYER, dtype="bfloat16", tied_head=tied)
  policy = small_policy(shape)
  hidden, logits = _hidden_and_logits(policy, _tokens(ROWS, WIDTH))
  assert hidden.dtype == jnp.bfloat16
  assert logits.dtype == jnp.float32
  table = policy.embedding if tied else policy.output
  exact = np.asarray(hidden, np.float64) @ np.asarray(table[...], np.float64).T
  np.testing.assert_allclose(logits, exact, rtol=1e-5, atol=1e-5)
  # A head of rounded weights would be further away than that.
  rounded = np.asarray(table[...].astype(jnp.bfloat16), np.float64)
  assert np.abs(np.asarray(hidden, np.float64) @ rounded.T - exact).max() > 1e-3
  if tied:
    return
  # The body: computed and cached in bfloat16, as close as its 8 bits are.
  cache = policy.empty_cache(
    prompts=1, slots=1, prompt_tokens=2, completion_tokens=3
  )
  parts = (cache.rings[0].k, cache.prompt_v)
  assert {x.dtype for x in jax.tree.leaves(parts)} == {jnp.dtype("bfloat16")}
  plain = small_policy(dataclasses.replace(shape, dtype="float32"))
  _, expected = _hidden_and_logits(plain, _tokens(ROWS, WIDTH))
  gap = jax.nn.log_softmax(logits) - jax.nn.log_softmax(expected)
  # Measured: 6e-3 on average, 7e-2 for the least probable of 2,208 words.
  assert 1e-4 < np.abs(np.asarray(gap)).mean() < 2e-2


def test_parameters_are_created_sharded_and_logits_are_the_same():
  # Untied with 24 words, so that the table has something for every axis.
  shape = dataclasses.replace(ONE_LAYER, tied_head=False)
  mesh = make_mesh(jax.devices()[:8], fsdp=2, tensor=2)
  sharded = small_policy(shape, vocab_size=24, mesh=mesh)
  plain = small_policy(shape, vocab_size=24)
  pieces = {
    "embedding": (12, 8),
    "output": (12, 8),
    "query": (1, 8, 2, 6),
    "key": (1, 8, 1, 6),
    "value": (1, 8, 1, 6),
    "out": (1, 2, 6, 8),
    "gate": (1, 8, 10),
    "up": (1, 8, 10),
    "down": (1, 10, 8),
    "final_norm": (8,),
    "attention_norm": (1, 8),
    "mlp_norm": (1, 8),
  }
  flat = jax.tree_util.tree_flatten_with_path(
    nnx.to_pure_dict(nnx.state(sharded))
  )[0]
  assert len(flat) == len(pieces)
  for path, array in flat:
    held = {shard.data.shape for shard in array.addressable_shards}
    assert held == {pieces[path[-1].key]}
    assert len(array.addressable_shards) == 8
  tokens = _tokens(4, 5)
  expected = nnx.jit(lambda policy, x: policy(x))(plain, tokens)
  graph, params = nnx.split(sharded)
  with jax.set_mesh(mesh):
    logits = jax.jit(lambda p, x: nnx.merge(graph, p)(x))(params, tokens)
  np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


def test_initial_weights_have_their_scales_and_a_key_each():
  shape = ModelConfig(
    width=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_width=8,
    mlp_width=64,
    tied_head=False,
  )
  with numpy_normal(0) as keys:
    policy = Policy(shape, vocab_size=100, rngs=nnx.Rngs(7))
  inward, residual = 32**-0.5, 6**-0.5
  scales = {
    "query": inward,
    "key": inward,
    "value": inward,
    "gate": inward,
    "up": inward,
    "out": residual * 32**-0.5,
    "down": residual * 64**-0.5,
  }
  drawn = {name: policy.layers[name][...] for name in scales}
  drawn |= {"embedding": policy.embedding[...], "output": policy.output[...]}
  for name, array in drawn.items():
    scale = scales.get(name, inward)
    assert float(jnp.std(array)) == pytest.approx(scale, rel=0.1)
  for norm in (policy.final_norm, *map(policy.layers.get, NORMS)):
    np.testing.assert_array_equal(norm[...], np.ones(norm.shape))
  assert len(keys) == len(drawn)


def test_layers_computed_again_have_the_same_gradient():
  def step(remat):
    policy = small_policy(dataclasses.replace(SCANNED, remat=remat))
    graph, params = nnx.split(policy)
    tokens = _tokens(3, 7)

    def loss(params):
      logps = jax.nn.log_softmax(nnx.merge(graph, params)(tokens))
      return (logps[..., 5] * jnp.arange(1.0, 8.0)[None]).sum()

    return jax.value_and_grad(loss), params

  (kept, params), (again, _) = step("none"), step("block")
  with optimised():
    found, wanted = (jax.jit(each)(params) for each in (again, kept))
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5),
    found,
    wanted,
  )
  counts = [
    sum(e.primitive.name == "logistic" for e in equations(text.jaxpr))
    for text in (jax.make_jaxpr(step)(params) for step in (kept, again))
  ]
  # The gate's activation, forward and once more in the backward pass.
  assert counts[1] > counts[0] > 0


def test_a_mesh_that_would_cut_a_head_is_refused():
  with pytest.raises(ValueError, match=r"must divide the 2 key/value heads"):
    Policy(
      SHAPE,
      vocab_size=V,
      rngs=nnx.Rngs(0),
      mesh=make_mesh(jax.devices()[:4], tensor=4),
    )


def test_ids_of_64_bits_are_accepted():
  graph, params = nnx.split(small_policy(ONE_LAYER))

  def logits(tokens):
    return nnx.merge(graph, params)(tokens)

  ids = np.asarray(_tokens(2, 5))
  expected = jax.jit(logits)(jnp.asarray(ids))
  with jax.enable_x64(True):
    wide = jnp.asarray(ids, jnp.int64)
    assert wide.dtype == jnp.int64
    actual = jax.jit(logits)(wide)
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_positions_are_those_within_the_segment_unless_given():
  @nnx.jit
  def given(policy, tokens, positions, segments):
    return policy(tokens, positions=positions, segment_ids=segments)

  policy, tokens = small_policy(), _tokens(ROWS, WIDTH)
  segments = jnp.asarray(
    np.repeat([1] * 5 + [2] * 9 + [0] * 3 + [3] * 7, ROWS).reshape(-1, ROWS).T
  )
  within = [*range(5), *range(9), *range(3), *range(7)]
  positions = jnp.asarray(np.tile(within, (ROWS, 1)))
  plain = given(policy, tokens, positions, segments)
  expected = _logits(policy, tokens, segments)
  np.testing.assert_allclose(plain, expected, rtol=1e-5, atol=1e-5)
  # The same distances, the same logits; other distances, other ones.
  kept = np.asarray(segments) != 0
  shifted = given(policy, tokens, positions + 7, segments)
  np.testing.assert_allclose(shifted[kept], plain[kept], rtol=1e-4, atol=1e-4)
  spread = given(policy, tokens, 3 * positions, segments)
  assert np.abs(np.asarray(spread - plain))[kept].max() > 1e-2


def test_one_side_may_have_its_head_in_another_dtype():
  graph, params = nnx.split(small_policy())
  assert with_head_dtype(graph, params, "float32") == graph
  rounded = with_head_dtype(graph, params, "bfloat16")
  assert rounded != graph  # another compiled program
  tokens = jnp.arange(15).reshape(3, 5) % V
  full, other = (nnx.merge(each, params)(tokens) for each in (graph, rounded))
  gap = np.abs(np.asarray(full) - np.asarray(other))
  assert 1e-3 < gap.max() < 0.1
  as_bfloat16 = np.asarray(other).astype(jnp.bfloat16)
  np.testing.assert_array_equal(other, as_bfloat16.astype(np.float32))
