"""Draws: frequencies are the probabilities, keys are addresses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.sampling import distribution
from tests.reference import transformer as reference

DRAW = jax.jit(distribution.draw)
N = 2000


def _logits(vocabulary, *, cut=0.0, seed=0):
  """Random logits, a share of them -inf, never all."""
  rng = np.random.default_rng(seed)
  logits = np.float32(2.0 * rng.standard_normal(vocabulary))
  logits[rng.random(vocabulary) < cut] = -np.inf
  if np.isinf(logits).all():
    logits[vocabulary // 2] = 0.0
  return logits


def _spread(logits, uniforms):
  """One draw of the same distribution at each uniform number."""
  rows = np.broadcast_to(logits, (len(uniforms), len(logits)))
  tokens, logps = DRAW(jnp.asarray(rows), jnp.asarray(uniforms, jnp.float32))
  return np.asarray(tokens), np.asarray(logps)


# Around a square (the table of the two sums is full or not), and 1.
@pytest.mark.parametrize("cut", [0.0, 0.5])
@pytest.mark.parametrize("vocabulary", [1, 2, 15, 16, 17, 47])
def test_frequencies_are_the_softmax_probabilities(vocabulary, cut):
  logits = _logits(vocabulary, cut=cut, seed=vocabulary)
  # One uniform number in the middle of each of N equal strata: the count of a
  # token may miss N·p only by the strata at its two borders.
  tokens, logps = _spread(logits, (np.arange(N) + 0.5) / N)
  expected = reference.log_softmax(logits.astype(np.float64))
  counts = np.bincount(tokens, minlength=vocabulary)
  np.testing.assert_allclose(counts, N * np.exp(expected), atol=1.01)
  assert (counts[np.isinf(logits)] == 0).all()
  np.testing.assert_allclose(logps, expected[tokens], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_a_token_of_no_probability_is_never_drawn(seed):
  # The first and the last word, and whole blocks of the table, are cut.
  logits = _logits(17, cut=0.7, seed=seed)
  logits[[0, 4, 5, 6, 7, -2, -1]] = -np.inf
  logits[9] = 0.0
  edges = [0.0, 1e-30, 0.5, 1.0 - 2.0**-24, 1.0]
  below = np.cumsum(np.exp(reference.log_softmax(logits)))
  at_borders = np.clip(
    np.concatenate([below, below - 1e-7, below + 1e-7]), 0, 1
  )
  tokens, logps = _spread(logits, [*edges, *at_borders])
  assert np.isfinite(logits[tokens]).all()
  assert np.isfinite(logps).all()


def test_rows_are_drawn_from_their_own_logits():
  rows = np.stack([np.roll([5.0, -50.0, -50.0, -50.0], n) for n in range(4)])
  tokens, _ = DRAW(jnp.asarray(rows, jnp.float32), jnp.full(4, 0.7))
  np.testing.assert_array_equal(tokens, [0, 1, 2, 3])


def test_extreme_logits_give_finite_log_probs():
  tokens, logps = _spread(
    np.float32([1e4, -1e4, 1e4, 0.0]), (np.arange(8) + 0.5) / 8
  )
  np.testing.assert_array_equal(tokens, [0] * 4 + [2] * 4)
  np.testing.assert_allclose(logps, -np.log(2.0), rtol=1e-6)


def _fold(*numbers, seed=5):
  key = jax.random.key(seed, impl="threefry2x32")
  for number in numbers:
    key = jax.random.fold_in(key, number)
  return key


def test_keys_are_addressed_by_prompt_sample_and_position():
  run = jax.random.key_data(jax.random.key(5, impl="threefry2x32"))
  uids = np.array([3, 3, 1, 4, 1], np.int32)
  samples = np.array([0, 1, 0, 2, 3], np.int32)
  positions = np.array([0, 6, 2, 2, 2], np.int32)
  keys = jax.jit(distribution.sample_keys)(run, uids, samples)
  uniforms = jax.jit(distribution.token_uniforms)(keys, positions)
  for n in range(5):
    key = _fold(uids[n], samples[n])
    np.testing.assert_array_equal(keys[n], jax.random.key_data(key))
    expected = jax.random.uniform(jax.random.fold_in(key, positions[n]))
    assert uniforms[n] == expected
  assert len(set(np.asarray(uniforms).tolist())) == 5
  assert ((uniforms >= 0) & (uniforms < 1)).all()
