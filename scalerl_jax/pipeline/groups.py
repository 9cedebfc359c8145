"""A group's life on the host: admitted, filled, judged, replaced or queued.

Counting and filing; what runs on devices is dispatched by `loop.py`.
"""

from collections.abc import Callable

import numpy as np

from scalerl_jax.config import LengthConfig, SamplerConfig
from scalerl_jax.data.curriculum import PromptStream
from scalerl_jax.learning.batching import counted_rows
from scalerl_jax.pipeline.events import NonFiniteError, Totals
from scalerl_jax.pipeline.judging import Judged, Judging
from scalerl_jax.pipeline.refill import Refill
from scalerl_jax.pipeline.schedule import StalenessLedger
from scalerl_jax.pipeline.store import RolloutStore, Scored, no_rollout
from scalerl_jax.pipeline.transport import Transport
from scalerl_jax.sampling.sampler import Group, empty_rollout
from scalerl_jax.types import Rollout


class Groups:
  """All groups between the prompt stream and a batch.

  Args:
    stream: the order of training prompts.
    ledger: which group may start.
    transport: carries scored groups to the learner's side.
    judging: gives the verdicts.
    refill: which groups are replaced.
    totals: the run's counters.
    length: says which completions count.
    sampler: budgets, for the shapes of a rollout.
    group_size: G.
    write: a line of the journal.
  """

  def __init__(
    self,
    *,
    stream: PromptStream,
    ledger: StalenessLedger,
    transport: Transport,
    judging: Judging,
    refill: Refill,
    totals: Totals,
    length: LengthConfig,
    sampler: SamplerConfig,
    group_size: int,
    write: Callable[..., None],
  ):
    self.stream, self.ledger, self.transport = stream, ledger, transport
    self.judging, self.refill, self.totals = judging, refill, totals
    self.store = RolloutStore(ledger.capacity, no_rollout(group_size, sampler))
    self.admitted = 0
    self._length, self._sampler, self._group_size = length, sampler, group_size
    self._write = write

  def admit(self, count: int, version: int) -> list[Group]:
    """Starts the next groups of the stream under a policy version."""
    groups = []
    for prompt, visit in self.stream.next(count):
      first_sample = visit * self._group_size
      group = Group(self.admitted, prompt.uid, first_sample, prompt.tokens)
      self.store.in_flight[group.index] = empty_rollout(
        group, self._group_size, self._sampler
      )
      self.ledger.admit(group.index, version)
      self.totals.prompt_tokens += len(prompt.tokens)
      self._write(
        "admit",
        group=group.index,
        uid=prompt.uid,
        first_sample=first_sample,
        version=version,
      )
      self.admitted += 1
      groups.append(group)
    return groups

  def judge(self) -> None:
    """Has those judged, on 0/1 correctness, whose completions have all ended.

    Raises:
      NonFiniteError: a log-prob of theirs is not finite.
    """
    indices = self.store.complete()
    if not indices:
      return
    rollouts = [self.store.in_flight.pop(index) for index in indices]
    # Tokens drawn from logits that are not finite may not even be tokens.
    if not all(np.isfinite(r.behavior_logps).all() for r in rollouts):
      drawn = [
        Scored(index, rollout, np.zeros_like(rollout.length))
        for index, rollout in zip(indices, rollouts, strict=True)
      ]
      raise NonFiniteError(
        self.ledger.version, "log-probs of sampled tokens", drawn
      )
    self.judging.put(indices, rollouts)

  def file(self, wait: bool = False) -> None:
    """Queues what has been judged, and with `wait` all that is being judged."""
    while self.judging.ready or (wait and self.judging.pending):
      self._file_one(self.judging.take())

  def take(self, indices: list[int]) -> list[Scored]:
    """The groups of a batch, out of the queue."""
    self.refill.next_batch()
    return [self.store.queued.pop(index) for index in indices]

  def _file_one(self, judged: Judged) -> None:
    self.totals.verifier_timeouts += judged.given_up
    for index, rollout, row in zip(
      judged.indices, judged.rollouts, judged.correct, strict=True
    ):
      self.stream.record(int(rollout.uid), int(row.sum()), row.size)
      counted = counted_rows(rollout.finish, self._length)
      if self.refill.replaces(row, counted):
        self._discard(index, rollout)
      else:
        self.transport.put(Scored(index, rollout, row))
    while (scored := self.transport.get()) is not None:
      self.store.queued[scored.index] = scored
      self.ledger.finish(scored.index)

  def _discard(self, index: int, rollout: Rollout) -> None:
    """Forgets a group; the ledger lets another one in its place."""
    self.ledger.discard(index)
    self.totals.discarded_groups += 1
    self.totals.discarded_tokens += int(rollout.length.sum())
    self._write("discard", group=index)
