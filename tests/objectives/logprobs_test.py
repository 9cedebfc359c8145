"""Log-probs of the chosen token, entropy and warping, against plain loops."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from scalerl_jax.objectives import logprobs
from tests.helpers import equations
from tests.reference import losses as reference

B, T, V = 3, 5, 7


def _logits(seed=0, scale=3.0, shape=(B, T, V)):
  rng = np.random.default_rng(seed)
  return jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)


def _tokens(seed=1):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32)


def _gradient(function, logits):
  """Compiled whole: operation by operation costs ten compilations."""
  return jax.jit(jax.grad(function))(logits)


def _per_token(function, logits):
  """`function` of every row of logits, as nested lists."""
  rows = np.asarray(logits, np.float64).tolist()
  return [[function(position) for position in row] for row in rows]


def test_token_logps_equal_the_scalar_loop_value_and_gradient():
  logits, tokens = _logits(), _tokens()
  expected = [
    [
      reference.token_logp(position, token)
      for position, token in zip(row, token_row, strict=True)
    ]
    for row, token_row in zip(
      np.asarray(logits, np.float64).tolist(), tokens.tolist(), strict=True
    )
  ]
  values = [[value for value, _ in row] for row in expected]
  slopes = [[slope for _, slope in row] for row in expected]

  actual = logprobs.token_logps(logits, tokens)
  gradient = _gradient(lambda z: logprobs.token_logps(z, tokens).sum(), logits)

  assert actual.dtype == jnp.float32
  np.testing.assert_allclose(actual, values, rtol=1e-6, atol=1e-6)
  np.testing.assert_allclose(gradient, slopes, rtol=1e-5, atol=1e-6)


def test_token_logps_are_the_log_of_a_distribution():
  logits = _logits()
  every = jnp.stack(
    [
      logprobs.token_logps(logits, jnp.full((B, T), v, jnp.int32))
      for v in range(V)
    ],
    axis=-1,
  )
  expected = special.log_softmax(np.asarray(logits, np.float64), axis=-1)
  np.testing.assert_allclose(every, expected, rtol=1e-6, atol=1e-6)
  np.testing.assert_allclose(jnp.exp(every).sum(-1), 1.0, atol=1e-6)


@pytest.mark.parametrize("shape", [(V,), (2, B, T, V)])
def test_any_leading_axes_give_the_same_log_probs(shape):
  logits = _logits(shape=shape)
  tokens = jnp.zeros(shape[:-1], jnp.int32)
  expected = special.log_softmax(np.asarray(logits, np.float64), axis=-1)
  actual = logprobs.token_logps(logits, tokens)
  assert actual.shape == shape[:-1]
  np.testing.assert_allclose(actual, expected[..., 0], rtol=1e-6, atol=1e-6)
  assert logprobs.entropy(logits).shape == shape[:-1]
  assert logprobs.warp_logits(logits, temperature=0.6).shape == shape


def test_bfloat16_logits_are_scored_in_float32():
  # 512 near-equal logits: a bfloat16 logsumexp is off by about 1e-2.
  rng = np.random.default_rng(2)
  logits = jnp.asarray(rng.uniform(-1.0, 1.0, (B, T, 512)), jnp.bfloat16)
  tokens = jnp.asarray(rng.integers(0, 512, (B, T)), jnp.int32)
  exact = special.log_softmax(
    np.asarray(logits.astype(jnp.float32), np.float64), axis=-1
  )
  chosen = np.take_along_axis(exact, np.asarray(tokens)[..., None], -1)[..., 0]

  actual = logprobs.token_logps(logits, tokens)
  assert actual.dtype == jnp.float32
  np.testing.assert_allclose(actual, chosen, rtol=1e-5)

  entropy = logprobs.entropy(logits)
  assert entropy.dtype == jnp.float32
  np.testing.assert_allclose(
    entropy, -(np.exp(exact) * exact).sum(-1), rtol=1e-5
  )

  warped = logprobs.warp_logits(logits, temperature=0.7)
  assert warped.dtype == jnp.float32
  np.testing.assert_allclose(
    warped - special.logsumexp(np.asarray(warped), axis=-1, keepdims=True),
    special.log_softmax(
      np.asarray(logits.astype(jnp.float32), np.float64) / 0.7, axis=-1
    ),
    atol=1e-5,
  )


def test_a_shift_of_the_logits_changes_nothing():
  # Multiples of 1/8, so that adding 2048 is exact in float32.
  logits = jnp.round(_logits() * 8.0) / 8.0
  tokens = _tokens()
  for shift in (-2048.0, 2048.0):
    np.testing.assert_allclose(
      logprobs.token_logps(logits + shift, tokens),
      _at(special.log_softmax(np.asarray(logits, np.float64), -1), tokens),
      atol=5e-4,  # one float32 ulp at 2048 is 2.4e-4
    )
    np.testing.assert_allclose(
      logprobs.entropy(logits + shift),
      _per_token(lambda z: reference.entropy(z)[0], logits),
      atol=5e-4,
    )


def test_extreme_logits_give_finite_log_probs_and_gradients():
  logits = jnp.asarray([[[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]]], jnp.float32)
  tokens = jnp.asarray([[1, 2]], jnp.int32)
  np.testing.assert_allclose(
    logprobs.token_logps(logits, tokens),
    [[-2e4, -math.log(3)]],
    atol=1e-3,  # one float32 ulp at 1e4
  )
  np.testing.assert_allclose(
    logprobs.entropy(logits), [[0.0, math.log(3)]], atol=1e-3
  )
  for function in (
    lambda z: logprobs.token_logps(z, tokens).sum(),
    lambda z: logprobs.entropy(z).sum(),
  ):
    assert np.isfinite(_gradient(function, logits)).all()


def test_cut_tokens_score_minus_infinity_and_leave_finite_gradients():
  logits = _logits().at[..., 2].set(-jnp.inf)
  kept = jnp.zeros((B, T), jnp.int32)
  cut = jnp.full((B, T), 2, jnp.int32)
  assert (np.asarray(logprobs.token_logps(logits, cut)) == -np.inf).all()

  gradient = _gradient(lambda z: logprobs.token_logps(z, kept).sum(), logits)
  expected = _per_token(lambda z: reference.token_logp(z, 0)[1], logits)
  np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)


def test_entropy_equals_the_scalar_loop_value_and_gradient():
  logits = _logits()
  value = logprobs.entropy(logits)
  gradient = _gradient(lambda z: logprobs.entropy(z).sum(), logits)
  assert value.dtype == jnp.float32
  np.testing.assert_allclose(
    value, _per_token(lambda z: reference.entropy(z)[0], logits), rtol=1e-5
  )
  np.testing.assert_allclose(
    gradient,
    _per_token(lambda z: reference.entropy(z)[1], logits),
    rtol=1e-5,
    atol=1e-6,
  )


def test_entropy_is_in_nats_and_between_zero_and_log_v():
  uniform = jnp.zeros((B, T, V), jnp.float32)
  certain = jnp.full((B, T, V), -1e3, jnp.float32).at[..., 4].set(0.0)
  np.testing.assert_allclose(logprobs.entropy(uniform), math.log(V), rtol=1e-6)
  np.testing.assert_allclose(logprobs.entropy(certain), 0.0, atol=1e-6)


def test_entropy_ignores_tokens_that_were_cut():
  logits = _logits().at[..., 2].set(-jnp.inf).at[..., 5].set(-jnp.inf)
  left = jnp.delete(logits, jnp.asarray([2, 5]), axis=-1)
  np.testing.assert_allclose(
    logprobs.entropy(logits),
    _per_token(lambda z: reference.entropy(z)[0], left),
    rtol=1e-5,
  )
  gradient = _gradient(lambda z: logprobs.entropy(z).sum(), logits)
  np.testing.assert_allclose(
    gradient,
    _per_token(lambda z: reference.entropy(z)[1], logits),
    rtol=1e-5,
    atol=1e-6,
  )


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_temperature_raises_probabilities_to_its_inverse(temperature):
  logits = _logits()
  probabilities = special.softmax(np.asarray(logits, np.float64), axis=-1)
  powered = probabilities ** (1.0 / temperature)
  expected = powered / powered.sum(-1, keepdims=True)
  warped = logprobs.warp_logits(logits, temperature=temperature)
  assert warped.dtype == jnp.float32
  np.testing.assert_allclose(jax.nn.softmax(warped), expected, atol=1e-6)


def test_no_warping_leaves_the_distribution_alone():
  logits = _logits()
  np.testing.assert_allclose(
    jax.nn.softmax(logprobs.warp_logits(logits)),
    special.softmax(np.asarray(logits, np.float64), axis=-1),
    atol=1e-6,
  )


@pytest.mark.parametrize("top_k", [1, 3, V, V + 2])
def test_top_k_keeps_the_k_largest(top_k):
  logits = _logits()
  warped = logprobs.warp_logits(logits, temperature=0.6, top_k=top_k)
  expected = _per_token(lambda z: _warp(z, 0.6, top_k=top_k), logits)
  np.testing.assert_allclose(_probabilities(warped), expected, atol=1e-6)
  assert (np.isneginf(warped) == (np.asarray(expected) == 0.0)).all()


@pytest.mark.parametrize("top_p", [1e-6, 0.4, 0.9, 1.0])
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p):
  logits = _logits()
  warped = logprobs.warp_logits(logits, temperature=1.3, top_p=top_p)
  expected = _per_token(lambda z: _warp(z, 1.3, top_p=top_p), logits)
  np.testing.assert_allclose(_probabilities(warped), expected, atol=1e-6)
  assert (np.isneginf(warped) == (np.asarray(expected) == 0.0)).all()


def test_top_p_by_hand():
  # p = 0.5, 0.3, 0.15, 0.05 in an order that is not sorted.
  logits = jnp.log(jnp.asarray([0.15, 0.5, 0.05, 0.3], jnp.float32))
  for top_p, kept in (
    (0.4, [False, True, False, False]),
    (0.6, [False, True, False, True]),
    (0.9, [True, True, False, True]),
    (0.97, [True, True, True, True]),
  ):
    warped = logprobs.warp_logits(logits, top_p=top_p)
    assert (~np.isneginf(warped)).tolist() == kept, top_p


def test_top_p_counts_what_top_k_left_at_the_sampling_temperature():
  logits = _logits()
  warped = logprobs.warp_logits(logits, temperature=1.3, top_k=4, top_p=0.7)
  expected = _per_token(lambda z: _warp(z, 1.3, top_k=4, top_p=0.7), logits)
  np.testing.assert_allclose(_probabilities(warped), expected, atol=1e-6)


def test_warped_log_probs_are_those_of_the_renormalised_distribution():
  logits = _logits()
  expected = np.asarray(
    _per_token(lambda z: _warp(z, 0.6, top_k=4, top_p=0.8), logits)
  )
  best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
  warped = logprobs.warp_logits(logits, temperature=0.6, top_k=4, top_p=0.8)
  np.testing.assert_allclose(
    logprobs.token_logps(warped, best), np.log(_at(expected, best)), atol=1e-6
  )


def test_the_gradient_reaches_the_logits_through_the_warping():
  logits = _logits()
  best = jnp.argmax(logits, axis=-1).astype(jnp.int32)

  def score(logits):
    warped = logprobs.warp_logits(logits, temperature=0.6, top_k=4, top_p=0.8)
    return logprobs.token_logps(warped, best).sum()

  # d/dz log q(best) = (onehot - q) / temperature, q the warped distribution.
  warped = np.asarray(
    _per_token(lambda z: _warp(z, 0.6, top_k=4, top_p=0.8), logits)
  )
  expected = (np.eye(V)[np.asarray(best)] - warped) / 0.6
  np.testing.assert_allclose(
    _gradient(score, logits), expected, rtol=1e-5, atol=1e-6
  )


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("temperature", 0.0),
    ("temperature", -1.0),
    ("top_k", 0),
    ("top_k", -3),
    ("top_p", 0.0),
    ("top_p", 1.5),
  ],
)
def test_a_warping_outside_its_domain_is_refused_by_name(name, value):
  with pytest.raises(ValueError, match=name):
    logprobs.warp_logits(_logits(), **{name: value})


def test_tokens_of_another_shape_are_refused():
  with pytest.raises((TypeError, ValueError)):
    logprobs.token_logps(_logits(), _tokens().T)


D = 4


def _scored(chunk, *, options=(), length=T):
  """Log-probs and entropies from hidden states, and d Σ of both."""
  rng = np.random.default_rng(5)
  hidden = jnp.asarray(rng.standard_normal((B, length, D)), jnp.float32)
  table = jnp.asarray(rng.standard_normal((V, D)), jnp.float32)
  tokens = jnp.asarray(rng.integers(0, V, (B, length)), jnp.int32)

  def total(hidden, table):
    def score(hidden, tokens):
      logits = logprobs.warp_logits(hidden @ table.T, **dict(options))
      logps = jnp.maximum(logprobs.token_logps(logits, tokens), -9.0)
      return logps, logprobs.entropy(logits)

    both = logprobs.score_in_chunks(score, hidden, tokens, chunk=chunk)
    slopes = jnp.arange(1.0, length + 1)[None]  # each column counts otherwise
    return sum((slopes * values).sum() for values in both), both

  gradients, both = jax.jit(jax.grad(total, (0, 1), has_aux=True))(
    hidden, table
  )
  return both, gradients


# Less than a row each, a column, two (the last piece is padded), all but one.
@pytest.mark.parametrize("chunk", [1, B, 2 * B + 1, 4 * B])
@pytest.mark.parametrize(
  "options",
  [(), (("temperature", 0.6), ("top_k", 5)), (("top_p", 0.8),)],
  ids=str,
)
def test_chunks_change_neither_value_nor_gradient(chunk, options):
  expected = _scored(0, options=options)
  actual = _scored(chunk, options=options)
  assert max(np.abs(x).max() for x in jax.tree.leaves(expected[1])) > 0.5
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5),
    actual,
    expected,
  )


@pytest.mark.parametrize("chunk", [0, T * B, 10 * T * B])
def test_a_chunk_of_everything_is_no_loop(chunk):
  jaxpr = jax.make_jaxpr(
    lambda h, t: logprobs.score_in_chunks(
      lambda h, t: (h.sum(axis=-1),), h, t, chunk=chunk
    )
  )(jnp.ones((B, T, D)), _tokens())
  names = {equation.primitive.name for equation in equations(jaxpr.jaxpr)}
  assert not names & {"scan", "while"}


def test_a_chunk_below_nothing_is_refused():
  with pytest.raises(ValueError, match="chunk must be 0"):
    _scored(-1)


def _warp(logits, temperature, top_k=None, top_p=None):
  """Probabilities after temperature, then top-k, then top-p: a plain loop."""
  logps = reference.log_softmax([logit / temperature for logit in logits])
  probabilities = [math.exp(logp) for logp in logps]
  order = sorted(range(len(logits)), key=lambda v: -probabilities[v])
  kept = order if top_k is None else order[:top_k]
  if top_p is not None:
    mass = math.fsum(probabilities[v] for v in kept)
    before, nucleus = 0.0, []
    for v in kept:
      if nucleus and before >= top_p:
        break
      nucleus.append(v)
      before += probabilities[v] / mass
    kept = nucleus if top_p < 1.0 else kept
  mass = math.fsum(probabilities[v] for v in kept)
  return [
    probabilities[v] / mass if v in kept else 0.0 for v in range(len(logits))
  ]


def _probabilities(warped):
  return special.softmax(np.asarray(warped, np.float64), axis=-1)


def _at(values, tokens):
  return np.take_along_axis(
    np.asarray(values), np.asarray(tokens)[..., None], axis=-1
  )[..., 0]
