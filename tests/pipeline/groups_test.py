"""A group's life: nothing is lost, replaced groups make room."""

import dataclasses

import numpy as np
import pytest

from scalerl_jax.config import LengthConfig
from scalerl_jax.data.curriculum import PromptStream
from scalerl_jax.pipeline.events import NonFiniteError, Totals
from scalerl_jax.pipeline.groups import Groups
from scalerl_jax.pipeline.judging import Judging
from scalerl_jax.pipeline.refill import Refill
from scalerl_jax.pipeline.schedule import StalenessLedger
from scalerl_jax.pipeline.timeline import Timeline
from scalerl_jax.pipeline.transport import InProcess
from scalerl_jax.types import FinishReason
from tests.pipeline import parts
from tests.pipeline.parts import G, P


def _make(verifier=parts.even, limit=0, steps=4):
  """Groups without devices, and the journal lines they write."""
  task = dataclasses.replace(parts.tiny_task(), verifier=verifier)
  lines = []
  groups = Groups(
    stream=PromptStream(task.train, seed=3),
    ledger=StalenessLedger(P, 1, steps * P),
    transport=InProcess(None),
    judging=Judging(task, beside=False, timeline=Timeline(None)),
    refill=Refill(limit),
    totals=Totals(),
    length=LengthConfig(),
    sampler=parts.SAMPLER,
    group_size=G,
    write=lambda event, **fields: lines.append({"event": event, **fields}),
  )
  return groups, lines


def _end(groups, index, rows=range(G), length=2):
  """Completions of a group end, all but the first after a digit more."""
  rollout = groups.store.in_flight[index]
  for row in rows:
    rollout.length[row] = length + (row > 0)
    rollout.tokens[row, : rollout.length[row]] = 5 + row
    rollout.finish[row] = FinishReason.EOS


def test_admitted_groups_are_the_streams_in_order_and_told():
  groups, lines = _make()
  told = [*groups.admit(2, 0), *groups.admit(1, 0)]
  same = PromptStream(parts.tiny_task().train, seed=3)
  wanted = [
    (index, prompt.uid, visit * G)
    for index, (prompt, visit) in enumerate(same.next(3))
  ]
  assert [(g.index, g.uid, g.first_sample) for g in told] == wanted
  assert groups.admitted == groups.ledger.in_flight == 3
  assert sorted(groups.store.in_flight) == [0, 1, 2]
  assert groups.totals.prompt_tokens == sum(len(g.tokens) for g in told)
  assert [
    (line["group"], line["uid"], line["first_sample"]) for line in lines
  ] == wanted
  assert {line["event"] for line in lines} == {"admit"}


def test_only_whole_groups_are_judged_and_queued_with_their_verdicts():
  groups, _ = _make()
  groups.admit(3, 0)
  _end(groups, 1)
  _end(groups, 2, rows=[0, 2])
  groups.judge()
  groups.file()
  assert sorted(groups.store.in_flight) == [0, 2]
  assert sorted(groups.store.queued) == [1]
  assert groups.ledger.queued == 1
  scored = groups.store.queued[1]
  task = parts.tiny_task()
  prompts = {prompt.uid: prompt for prompt in task.train}
  texts = task.tokenizer.decode_batch(
    scored.rollout.tokens, scored.rollout.length
  )
  answer = prompts[int(scored.rollout.uid)].answer
  np.testing.assert_array_equal(
    scored.correct, [parts.even(answer, text, ended=True) for text in texts]
  )


def test_a_replaced_group_makes_room_and_is_counted():
  groups, lines = _make(lambda *_, ended: ended, limit=1)
  groups.admit(2 * P, 0)
  assert groups.ledger.admissible() == 0
  for index in (0, 1):
    _end(groups, index)
  groups.judge()
  groups.file()
  assert groups.ledger.admissible() == 1
  assert groups.totals.discarded_groups == 1
  assert groups.totals.discarded_tokens == 2 + (G - 1) * 3
  assert lines[-1] == {"event": "discard", "group": 0}
  assert sorted(groups.store.queued) == [1]  # the limit lets it through
  assert sorted(groups.store.in_flight) == [2, 3]


def test_a_batch_leaves_the_queue_and_renews_the_limit():
  groups, _ = _make(lambda *_, ended: ended, limit=1)
  groups.admit(4, 0)
  for index in range(3):
    _end(groups, index)
  groups.judge()
  groups.file()
  assert groups.refill.replaced == 1
  assert [s.index for s in groups.take([1, 2])] == [1, 2]
  assert not groups.store.queued
  assert groups.refill.replaced == 0


def test_log_probs_that_are_not_finite_are_not_judged():
  groups, _ = _make()
  groups.admit(2, 0)
  _end(groups, 1)
  groups.store.in_flight[1].behavior_logps[2, 0] = np.nan
  with pytest.raises(NonFiniteError, match="log-probs of sampled") as caught:
    groups.judge()
  assert [scored.index for scored in caught.value.batch] == [1]
