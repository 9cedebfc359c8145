"""What the loop tells of a batch, worked by hand."""

import numpy as np
import pytest

from scalerl_jax.config import LengthConfig
from scalerl_jax.pipeline.events import (
  NonFiniteError,
  Totals,
  batch_metrics,
)
from scalerl_jax.pipeline.store import Scored
from scalerl_jax.types import FinishReason, Rollout

TC = 4


def _scored(index, correct, length, versions, finish):
  rows = len(length)
  return Scored(
    index,
    Rollout(
      uid=np.int32(index),
      first_sample=np.int32(0),
      prompt=np.zeros(5, np.int32),
      prompt_length=np.int32(3),
      tokens=np.zeros((rows, TC), np.int32),
      length=np.array(length, np.int32),
      behavior_logps=np.zeros((rows, TC), np.float32),
      versions=np.array(versions, np.int32),
      forced=np.zeros((rows, TC), bool),
      finish=np.array(finish, np.int32),
    ),
    np.array(correct, np.int32),
  )


def _batch():
  """Two groups of two; what stands behind a completion's end is rubbish."""
  eos, budget = FinishReason.EOS, FinishReason.BUDGET
  return [
    _scored(4, [1, 0], [2, 4], [[3, 3, 9, 9], [3, 3, 4, 4]], [eos, budget]),
    _scored(7, [1, 1], [1, 3], [[5, 0, 0, 0], [5, 6, 6, 0]], [eos, eos]),
  ]


def test_metrics_of_a_batch_by_hand():
  batch = _batch()
  # Of four completions one has a forced token; one more lies behind an end.
  batch[0].rollout.forced[1, 2] = True
  batch[1].rollout.forced[0, 1] = True
  told = batch_metrics(batch, np.array([2, 0]), 3, LengthConfig())
  assert told == {
    "train_pass_rate": 0.75,
    "mixed_groups": 1,
    "batch_tokens": 10,
    "completion_length": 2.5,
    "truncated": 0.25,
    "interrupted": 0.25,
    # The second row of each: versions 3 and 4, 5 and 6.
    "several_versions": 0.5,
    "staleness_mean": 1.0,
    "staleness_max": 2,
    "staleness": [1, 0, 1, 0],
  }


def test_a_group_is_mixed_by_the_completions_that_count():
  # The one wrong completion of the first group was truncated.
  masked = LengthConfig(truncated="masked")
  told = batch_metrics(_batch(), np.array([2, 0]), 3, masked)
  assert told["mixed_groups"] == 0


def test_counters_start_at_nothing():
  assert not any(vars(Totals()).values())


def test_an_error_names_its_step_and_holds_its_groups():
  batch = _batch()
  error = NonFiniteError(6, "loss nan and gradient norm 1.0", batch)
  assert (error.step, error.batch) == (6, batch)
  with pytest.raises(FloatingPointError, match="step 6 has loss nan and"):
    raise error
