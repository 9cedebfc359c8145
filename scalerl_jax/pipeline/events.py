"""What the loop tells: counters of a run, a step's metrics, what went wrong."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scalerl_jax.config import LengthConfig
from scalerl_jax.learning.batching import counted_rows
from scalerl_jax.pipeline.store import Scored
from scalerl_jax.sampling.work import Work
from scalerl_jax.types import FinishReason


@dataclasses.dataclass
class Totals:
  """Counters of a run; all but the seconds follow the schedule alone."""

  chunks: int = 0
  decode_steps: int = 0
  drawn_tokens: int = 0  # in decode steps, half-written ones included
  generated_tokens: int = 0  # of finished completions
  prompt_tokens: int = 0  # prefilled
  # As in `sampling.work.Work`.
  prefilled_rows: int = 0
  prefilled_tokens: int = 0
  prefilled_keys: int = 0
  decoded_slots: int = 0
  decoded_keys: int = 0
  decoded_columns: int = 0
  waits_for_oldest: int = 0  # chunks started while an old group held a batch up
  trained_tokens: int = 0  # completion tokens of all batches
  skipped_steps: int = 0
  micro_batches: int = 0
  computed_logits: int = 0  # positions that got logits in the learner
  computed_tokens: int = 0  # positions it computed, padding included
  computed_keys: int = 0  # that these positions were multiplied with
  discarded_groups: int = 0  # finished, and replaced instead of trained on
  discarded_tokens: int = 0  # of their completions
  verifier_timeouts: int = 0  # completions whose judgement was given up
  train_seconds: float = 0.0  # of the loop, evaluation and saving left out

  def count_sampled(self, work: Work) -> None:
    """Adds what the sampler has computed."""
    for name, count in work._asdict().items():
      setattr(self, name, getattr(self, name) + count)

  def count_computed(self, metrics: Mapping[str, float]) -> None:
    """Adds what an update has computed."""
    self.micro_batches += int(metrics["micro_batches"])
    self.computed_logits += int(metrics["computed_logits"])
    self.computed_tokens += int(metrics["computed_tokens"])
    self.computed_keys += int(metrics["computed_keys"])


@dataclasses.dataclass(frozen=True)
class StepEvent:
  """An update whose weights have just been published."""

  step: int  # updates done
  metrics: dict[str, Any]
  totals: Totals
  examples: Sequence[Scored]  # the batch's groups


class NonFiniteError(FloatingPointError):
  """A step whose numbers are not finite; holds the groups that had them."""

  def __init__(self, step: int, what: str, batch: Sequence[Scored]):
    super().__init__(
      f"step {step} has {what} that are not finite; nothing was published"
    )
    self.step = step
    self.batch = batch


def batch_metrics(
  scored: Sequence[Scored],
  staleness: np.ndarray,
  max_staleness: int,
  length: LengthConfig,
) -> dict[str, Any]:
  """What the host knows of a batch before its update runs.

  Args:
    scored: P groups of G completions.
    staleness: of each group, learner steps.
    max_staleness: k.
    length: says which completions do not count.
  """
  correct = np.stack([s.correct for s in scored])
  lengths = np.stack([s.rollout.length for s in scored])
  finish = np.stack([s.rollout.finish for s in scored])
  versions = np.stack([s.rollout.versions for s in scored])
  forced = np.stack([s.rollout.forced for s in scored])
  written = np.arange(versions.shape[-1]) < lengths[..., None]
  newest = np.where(written, versions, -1).max(axis=-1)
  oldest = np.where(written, versions, np.iinfo(np.int32).max).min(axis=-1)
  counted = counted_rows(finish, length)
  right = ((correct == 1) & counted).any(axis=1)
  wrong = ((correct == 0) & counted).any(axis=1)
  return {
    "train_pass_rate": float(correct.mean()),
    "mixed_groups": int((right & wrong).sum()),
    "batch_tokens": int(lengths.sum()),
    "completion_length": float(lengths.mean()),
    "truncated": float((finish == FinishReason.BUDGET).mean()),
    "interrupted": float((forced & written).any(axis=-1).mean()),
    "several_versions": float((newest > oldest).mean()),
    "staleness_mean": float(staleness.mean()),
    "staleness_max": int(staleness.max()),
    "staleness": np.bincount(staleness, minlength=max_staleness + 1).tolist(),
  }
