"""From rollouts to rows, against a scalar loop; masks are carried."""

import numpy as np
import pytest

from scalerl_jax.config import LengthConfig
from scalerl_jax.learning.batching import (
  collate,
  completion_rewards,
  counted_rows,
  make_batch,
)
from scalerl_jax.types import FinishReason, Rollout

P, G, TP, TC = 3, 4, 5, 7
PAD = 0  # and the end token


def _rollouts(seed=0):
  """Any ids anywhere, the pad's among them; junk behind every length."""
  rng = np.random.default_rng(seed)
  rollouts = []
  for n in range(P):
    length = rng.integers(1, TC + 1, G).astype(np.int32)
    tokens = rng.integers(0, 4, (G, TC)).astype(np.int32)
    tokens[np.arange(G), length - 1] = PAD
    rollouts.append(
      Rollout(
        uid=np.int32(n),
        first_sample=np.int32(0),
        prompt=rng.integers(0, 4, TP).astype(np.int32),
        prompt_length=np.int32((1, 5, 3)[n]),
        tokens=tokens,
        length=length,
        behavior_logps=-rng.random((G, TC)).astype(np.float32),
        versions=np.zeros((G, TC), np.int32),
        forced=rng.random((G, TC)) < 0.3,
        finish=np.ones((G,), np.int32),
      )
    )
  return rollouts


def _slow(rollouts, correct, rewards):
  """The rows as lists, token after token."""
  rows = []
  for p, rollout in enumerate(rollouts):
    for g in range(G):
      tokens = rollout.prompt[: rollout.prompt_length].tolist()
      mask, logps = [False] * len(tokens), [0.0] * len(tokens)
      for t in range(rollout.length[g]):
        drawn = not rollout.forced[g, t]
        tokens.append(int(rollout.tokens[g, t]))
        mask.append(drawn)
        logps.append(float(rollout.behavior_logps[g, t]) if drawn else 0.0)
      padding = TP + TC - len(tokens)
      rows.append(
        {
          "tokens": tokens + [0] * padding,
          "segment_ids": [1] * len(tokens) + [0] * padding,
          "mask": mask + [False] * padding,
          "behavior_logps": logps + [0.0] * padding,
          "correct": correct[p][g],
          "rewards": rewards[p][g],
        }
      )
  return {name: np.asarray([row[name] for row in rows]) for name in rows[0]}


def _collated(rollouts):
  correct = np.random.default_rng(1).integers(0, 2, (P, G))
  rewards = np.where(correct, 1.0, -1.0)
  batch = collate(rollouts, correct, rewards)
  return batch, _slow(rollouts, correct.tolist(), rewards.tolist())


@pytest.mark.parametrize("seed", range(3))
def test_rows_equal_the_scalar_loop(seed):
  batch, slow = _collated(_rollouts(seed))
  for name, expected in slow.items():
    actual = getattr(batch, name)
    np.testing.assert_array_equal(actual, expected.astype(actual.dtype), name)


def test_dtypes_are_those_of_the_record():
  batch, _ = _collated(_rollouts())
  assert batch.tokens.dtype == batch.segment_ids.dtype == np.int32
  assert batch.mask.dtype == bool
  assert batch.behavior_logps.dtype == batch.rewards.dtype == np.float32
  assert batch.correct.dtype == np.int32


def test_the_mask_counts_drawn_tokens_whatever_their_ids():
  rollouts = _rollouts()
  batch, _ = _collated(rollouts)
  for rollout in rollouts:
    rollout.prompt[:] = PAD
    rollout.tokens[:] = PAD
  blank, _ = _collated(rollouts)
  np.testing.assert_array_equal(blank.mask, batch.mask)
  np.testing.assert_array_equal(blank.segment_ids, batch.segment_ids)
  # As many as were drawn: neither prompts, nor forced tokens, nor padding.
  drawn = sum(
    (~r.forced & (np.arange(TC) < r.length[:, None])).sum() for r in rollouts
  )
  assert batch.mask.sum() == drawn


def test_what_stands_behind_a_length_is_never_read():
  rollouts = _rollouts()
  before, _ = _collated(rollouts)
  for rollout in rollouts:
    rollout.prompt[rollout.prompt_length :] = 99
    junk = np.arange(TC) >= rollout.length[:, None]
    rollout.tokens[junk] = 99
    rollout.behavior_logps[junk] = np.nan
    rollout.forced[junk] = False
  after, _ = _collated(rollouts)
  for name in ("tokens", "segment_ids", "mask", "behavior_logps"):
    np.testing.assert_array_equal(getattr(after, name), getattr(before, name))


def test_rewards_are_one_for_right_and_minus_one_for_wrong_or_truncated():
  correct = np.array([[1, 0, 0], [0, 1, 1]])
  lengths = np.array([[TC, TC, 1], [2, TC, 3]])
  rewards = completion_rewards(correct, lengths, LengthConfig(), max_length=TC)
  assert rewards.dtype == np.float32
  assert rewards.tolist() == [[1, -1, -1], [-1, 1, 1]]


def test_the_length_penalty_lowers_right_completions_only():
  # L_max 7, L_cache 4: free up to 3 tokens, −1 at 7.
  length = LengthConfig(control="penalty", penalty_cache=4)
  correct = np.array([[1, 1, 1], [1, 1, 0]])
  lengths = np.array([[2, 3, 4], [5, 7, 7]])
  rewards = completion_rewards(correct, lengths, length, max_length=7)
  np.testing.assert_allclose(
    rewards, [[1.0, 1.0, 0.75], [0.5, 0.0, -1.0]], atol=1e-6
  )


@pytest.mark.parametrize("truncated", ["wrong", "masked"])
def test_truncated_completions_are_wrong_or_do_not_count(truncated):
  rollouts = _rollouts()
  for rollout in rollouts:
    rollout.finish[:] = FinishReason.EOS
    rollout.forced[:] = False
  rollouts[1].finish[2] = FinishReason.BUDGET
  correct = np.ones((P, G), np.int32)
  correct[1, 2] = 0
  length = LengthConfig(truncated=truncated)
  counted = counted_rows(np.stack([r.finish for r in rollouts]), length)
  assert (~counted).sum() == (truncated == "masked")
  batch = make_batch(rollouts, correct, length)
  row = G + 2
  assert batch.mask[row].any() == (truncated == "wrong")
  assert batch.mask[np.arange(P * G) != row].any(axis=1).all()
  assert batch.rewards[row] == -1.0
  assert batch.segment_ids[row].any()
