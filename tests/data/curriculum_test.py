"""The order of prompts: fair, shuffled, addressed, restorable."""

import collections

import numpy as np
import pytest

from scalerl_jax.data.curriculum import PromptStream
from scalerl_jax.types import Prompt

PROMPTS = [
  Prompt(100 + i, f"p{i}", np.zeros(3, np.int32), "0") for i in range(7)
]


def order(prompt_stream, count):
  return [(p.uid, visit) for p, visit in prompt_stream.next(count)]


def test_every_prompt_once_an_epoch_and_visits_count_up():
  given = order(PromptStream(PROMPTS, seed=3), 3 * 7)
  uids = {p.uid for p in PROMPTS}
  for epoch in range(3):
    part = given[7 * epoch : 7 * (epoch + 1)]
    assert {uid for uid, _ in part} == uids
    assert {visit for _, visit in part} == {epoch}
  assert max(collections.Counter(given).values()) == 1


def test_epochs_and_seeds_differ_in_order():
  given = [uid for uid, _ in order(PromptStream(PROMPTS, seed=3), 14)]
  other = [uid for uid, _ in order(PromptStream(PROMPTS, seed=4), 7)]
  assert given[:7] != given[7:]
  assert given[:7] != other


def test_the_size_of_requests_does_not_matter():
  whole = order(PromptStream(PROMPTS, seed=0), 24)
  pieces = PromptStream(PROMPTS, seed=0)
  assert [x for n in (1, 0, 5, 10, 8) for x in order(pieces, n)] == whole


@pytest.mark.parametrize("taken", [0, 3, 7, 9, 15])
def test_a_restored_stream_goes_on_identically(taken):
  original = PromptStream(PROMPTS, seed=1)
  original.next(taken)
  # As it comes back from a checkpoint.
  state = {name: np.int64(value) for name, value in original.state().items()}
  restored = PromptStream(PROMPTS, seed=1)
  restored.next(4)
  restored.restore(state)
  assert order(restored, 17) == order(original, 17)
  assert restored.state() == original.state()
  assert all(type(value) is int for value in restored.state().values())


@pytest.mark.parametrize("state", [{}, {"position": -1}, {"offset": 1}])
def test_a_strange_cursor_is_refused(state):
  with pytest.raises(ValueError, match="cursor must be"):
    PromptStream(PROMPTS, seed=0).restore(state)


def test_no_prompts_are_refused():
  with pytest.raises(ValueError, match="at least one prompt, got none"):
    PromptStream([], seed=0)
