"""Refill: constant groups are replaced, at most so many for a batch."""

import numpy as np

from scalerl_jax.pipeline.refill import Refill

ALL = np.ones(3, bool)


def test_only_constant_groups_are_replaced():
  refill = Refill(limit=9)
  verdicts = [
    refill.replaces(np.array(correct), ALL)
    for correct in ([0, 0, 0], [1, 1, 1], [0, 1, 0], [1, 1, 0])
  ]
  assert verdicts == [True, True, False, False]
  assert refill.replaced == 2


def test_a_completion_that_is_masked_out_does_not_make_a_group_mixed():
  correct = np.array([1, 1, 0])
  counted = np.array([True, True, False])
  assert Refill(limit=1).replaces(correct, counted)
  assert not Refill(limit=1).replaces(correct, ALL)
  assert Refill(limit=1).replaces(correct, ~ALL)  # nothing left of it


def test_the_limit_holds_for_each_batch():
  refill = Refill(limit=2)
  right = np.ones(3, int)
  assert [refill.replaces(right, ALL) for _ in range(4)] == [
    *(True, True),
    *(False, False),
  ]
  refill.next_batch()
  assert [refill.replaces(right, ALL) for _ in range(3)] == [True, True, False]


def test_without_a_limit_nothing_is_replaced():
  assert not Refill(limit=0).replaces(np.zeros(3, int), ALL)
