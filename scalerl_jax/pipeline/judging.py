"""Verdicts on finished groups: at once, or in a thread beside the loop."""

import collections
import concurrent.futures
import dataclasses
from collections.abc import Sequence

import numpy as np

from scalerl_jax.data.task import Task
from scalerl_jax.pipeline.timeline import Timeline
from scalerl_jax.types import FinishReason, Rollout


@dataclasses.dataclass(frozen=True)
class Judged:
  """Groups with their verdicts."""

  indices: Sequence[int]  # admission numbers
  rollouts: Sequence[Rollout]
  correct: np.ndarray  # int32 [groups, G], 0/1
  given_up: int  # judgements that took too long


class Judging:
  """Reads completions as text and asks the task's verifier, first come first.

  Args:
    task: its prompts, tokenizer and verifier.
    beside: in a thread, for the wall schedule: a slow verifier then stops
      neither side. The logical schedule needs the verdicts at once, for what
      may start next depends on them.
    timeline: is told what took how long.
  """

  def __init__(self, task: Task, *, beside: bool, timeline: Timeline):
    self.task = task
    self._timeline = timeline
    self._prompts = {prompt.uid: prompt for prompt in task.train}
    self._beside = beside
    self._pool: concurrent.futures.ThreadPoolExecutor | None = None
    self._waiting: collections.deque[concurrent.futures.Future[Judged]] = (
      collections.deque()
    )

  @property
  def pending(self) -> bool:
    """Whether there are verdicts that nobody has taken."""
    return bool(self._waiting)

  @property
  def ready(self) -> bool:
    """Whether the oldest of them is there."""
    return self.pending and self._waiting[0].done()

  def put(self, indices: Sequence[int], rollouts: Sequence[Rollout]) -> None:
    """Groups to judge, all completions of each ended."""
    if self._beside:
      if self._pool is None:
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "judge")
      self._waiting.append(self._pool.submit(self._judge, indices, rollouts))
    else:
      judged: concurrent.futures.Future[Judged] = concurrent.futures.Future()
      judged.set_result(self._judge(indices, rollouts))
      self._waiting.append(judged)

  def take(self) -> Judged:
    """The oldest verdicts; waits for them, and raises what they raised."""
    return self._waiting.popleft().result()

  def close(self) -> None:
    """Ends the thread after the judgement that it is at."""
    self._waiting.clear()
    if self._pool is not None:
      self._pool.shutdown(wait=True, cancel_futures=True)
      self._pool = None

  def _judge(
    self, indices: Sequence[int], rollouts: Sequence[Rollout]
  ) -> Judged:
    tokens = np.concatenate([r.tokens for r in rollouts])
    lengths = np.concatenate([r.length for r in rollouts])
    finish = np.concatenate([r.finish for r in rollouts])
    prompts = [self._prompts[int(r.uid)] for r in rollouts for _ in r.length]
    with self._timeline.span(
      "verify", "verification", completions=len(prompts)
    ):
      texts = self.task.tokenizer.decode_batch(tokens, lengths)
      before = self.task.timeouts
      correct = self.task.verify_batch(
        prompts, texts, finish == FinishReason.EOS
      ).astype(np.int32)
    return Judged(
      indices,
      rollouts,
      correct.reshape(len(indices), -1),
      self.task.timeouts - before,
    )
