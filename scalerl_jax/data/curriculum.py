"""Which training prompts are given out, in which order; restorable.

Order within an epoch, No-Positive-Resampling between epochs, and the mixture
of several tasks. Verdicts come in from outside, whenever a group has ended.
"""

import dataclasses
import fractions
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64

from scalerl_jax.config import CurriculumConfig
from scalerl_jax.data.streams import Purpose, stream
from scalerl_jax.types import Prompt

UNIFORM = CurriculumConfig()


@dataclasses.dataclass
class _Cursor:
  """All that changes in a stream of N prompts from K tasks."""

  given: Int64[np.ndarray, " K"]  # prompts given out, over all epochs
  epoch: Int64[np.ndarray, " K"]
  offset: Int64[np.ndarray, " K"]  # prompts given out in this epoch
  retired: Bool[np.ndarray, " N"]
  groups: Int64[np.ndarray, " N"]  # judged so far
  correct: Int64[np.ndarray, " N"]  # of `samples`
  samples: Int64[np.ndarray, " N"]  # completions that the pass rate is over


class PromptStream:
  """An endless order of prompts, shuffled per epoch by (seed, epoch).

  Every active prompt is given once an epoch; `easy_to_hard` sorts an epoch by
  `Prompt.difficulty`, equals in their shuffled order.

  No-Positive-Resampling: when an epoch ends, each prompt with at least
  `min_visits` judged groups and a pass rate of at least `retire_at` is retired
  for ever. Verdicts that arrive later, of retired prompts too, enter the
  history and count when the next epoch ends. If every prompt would go, those
  that tie for the lowest pass rate stay for the next epoch.

  Several tasks: each has its own epochs, order and retirement, and the weights
  alone decide which task gives next. After n prompts, a task of weight w has
  given n·w, off by less than one.

  >>> prompts = [
  ...   Prompt(uid, str(uid), np.zeros(1, np.int32), "") for uid in range(3)
  ... ]
  >>> given = PromptStream(prompts, seed=0).next(6)
  >>> sorted((prompt.uid, visit) for prompt, visit in given)
  [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]

  What the policy can do is not given again:

  >>> config = CurriculumConfig(no_positive_resampling=True)
  >>> prompt_stream = PromptStream(prompts, seed=0, curriculum=config)
  >>> for prompt, _ in prompt_stream.next(3):
  ...   prompt_stream.record(
  ...     prompt.uid, correct=16 if prompt.uid == 1 else 14, samples=16
  ...   )
  >>> sorted(prompt.uid for prompt, _ in prompt_stream.next(4))
  [0, 0, 2, 2]

  Three prompts of one task for each of another:

  >>> mixed = [
  ...   dataclasses.replace(prompt, task="logic" if prompt.uid else "sums")
  ...   for prompt in prompts
  ... ]
  >>> weights = {"logic": 0.75, "sums": 0.25}
  >>> given = PromptStream(mixed, seed=0, weights=weights).next(8)
  >>> [prompt.task for prompt, _ in given]
  ['logic', 'logic', 'sums', 'logic', 'logic', 'logic', 'sums', 'logic']

  Reference: No-Positive-Resampling: An et al., "Polaris", 2025; Khatri et al.
  2025, arXiv 2510.13786, which leave open whether the rate is over all visits
  and what happens when every prompt would go.
  """

  def __init__(
    self,
    prompts: Sequence[Prompt],
    *,
    seed: int,
    curriculum: CurriculumConfig = UNIFORM,
    weights: Mapping[str, float] | None = None,
  ):
    """Starts before the first prompt of epoch 0.

    Args:
      prompts: what is given out; at least one, each with its own uid.
      seed: decides the order within epochs.
      curriculum: the order's kind, and which prompts are retired.
      weights: share of the prompts that each `Prompt.task` gives; they sum to
        1. None or a single name: all prompts are one pool.

    Raises:
      ValueError: no prompts, two of one uid, a difficulty to sort by that is
        not finite, weights that are not above 0 or do not sum to 1, a task
        without prompts, a prompt whose task has no weight.
    """
    if not prompts:
      raise ValueError("a prompt stream needs at least one prompt, got none")
    self._prompts = prompts
    self._seed = seed
    self._curriculum = curriculum
    self._places: dict[int, int] = {}  # by uid
    for place, prompt in enumerate(prompts):
      if self._places.setdefault(prompt.uid, place) != place:
        raise ValueError(
          f"prompts of a stream must have different uids, got {prompt.uid}"
          " twice"
        )
    self._difficulty = np.array([p.difficulty for p in prompts], np.float64)
    if curriculum.order == "easy_to_hard":
      for place in np.flatnonzero(~np.isfinite(self._difficulty))[:1].tolist():
        raise ValueError(
          "Prompt.difficulty must be finite to order prompts by it, got"
          f" {self._difficulty[place]} for prompt {prompts[place].uid}"
        )
    self._members = _split(prompts, weights)  # places, by task
    if curriculum.order == "easy_to_hard":
      for members in self._members:
        if len(members) > 1 and not np.ptp(self._difficulty[members]):
          raise ValueError(
            "curriculum.order must be 'uniform' where all prompts of a task"
            f" have the same difficulty, {self._difficulty[members[0]]:g}; give"
            ' each line a "difficulty" or use the uniform order'
          )
    self._shares = _whole_shares(weights or {"": 1.0})
    tasks, count = len(self._members), len(prompts)
    self._at = _Cursor(
      given=np.zeros(tasks, np.int64),
      epoch=np.zeros(tasks, np.int64),
      offset=np.zeros(tasks, np.int64),
      retired=np.zeros(count, np.bool_),
      groups=np.zeros(count, np.int64),
      correct=np.zeros(count, np.int64),
      samples=np.zeros(count, np.int64),
    )
    self._orders = [self._order(task) for task in range(tasks)]

  def next(self, count: int) -> list[tuple[Prompt, int]]:
    """The next `count` prompts, each with how often it was given before.

    That number is the visit: sample g of a group has sample index
    visit·G + g, so no completion's random numbers are used twice.
    """
    at, given = self._at, []
    for _ in range(count):
      task = self._next_task()
      # An epoch ends as late as it can: more verdicts count then.
      if at.offset[task] == len(self._orders[task]):
        self._end_epoch(task)
      place = int(self._orders[task][at.offset[task]])
      # Who is active in an epoch was so in all before it: visit = epoch.
      given.append((self._prompts[place], int(at.epoch[task])))
      at.offset[task] += 1
      at.given[task] += 1
    return given

  def record(self, uid: int, correct: int, samples: int) -> None:
    """Enters a finished group into its prompt's history, however late.

    Groups do not say which visit they were: the `last_visit` of the history
    is the one recorded last.

    Args:
      uid: the prompt's.
      correct: completions that were right, in 0 .. samples.
      samples: completions that were judged, 1 or more.

    Raises:
      ValueError: a uid that is not of this stream, or impossible counts.
    """
    if uid not in self._places:
      raise ValueError(
        f"a recorded uid must be of a prompt of this stream, got {uid}"
      )
    if not 0 <= correct <= samples or samples < 1:
      raise ValueError(
        "a recorded group must have 1 or more samples and 0 .. samples correct,"
        f" got {correct} correct of {samples} for prompt {uid}"
      )
    at, place = self._at, self._places[uid]
    if self._curriculum.history == "last_visit":
      at.correct[place] = at.samples[place] = 0
    at.groups[place] += 1
    at.correct[place] += correct
    at.samples[place] += samples

  @property
  def retired_share(self) -> float:
    """Retired prompts among all prompts of all tasks, in [0, 1)."""
    return float(self._at.retired.mean())

  def state(self) -> dict[str, Any]:
    """All that changes, as arrays whose shapes only the prompts decide."""
    return dataclasses.asdict(self._at)

  def restore(self, state: Mapping[str, Any]) -> None:
    """Continues where `state()` was taken, over the same prompts and seed.

    Raises:
      ValueError: `state` is not what `state()` of this stream can give.
    """
    like = dataclasses.asdict(self._at)
    if set(state) != set(like):
      raise _strange(f"the entries {', '.join(like)}", sorted(state))
    for name, old in like.items():
      new = np.asarray(state[name])
      kinds, words = ("b", "bool") if old.dtype == bool else ("iu", "integers")
      if new.shape != old.shape or new.dtype.kind not in kinds:
        rule = f"{words} of shape {old.shape} as {name!r}"
        raise _strange(rule, f"{new.dtype} of shape {new.shape}")
      if new.size and new.min() < 0:
        raise _strange(f"0 or more as {name!r}", new.min())
      like[name] = new.astype(old.dtype)  # a copy
    self._check(new := _Cursor(**like))
    self._at = new
    self._orders = [self._order(task) for task in range(len(self._members))]

  def _check(self, at: _Cursor) -> None:
    """Refuses what no stream over these prompts can come to."""
    for place in np.flatnonzero(at.correct > at.samples)[:1].tolist():
      uid, right = self._prompts[place].uid, at.correct[place]
      raise _strange(
        "'correct' at most 'samples'",
        f"{right} of {at.samples[place]} for prompt {uid}",
      )
    if at.retired.any() and not self._curriculum.no_positive_resampling:
      share = f"{at.retired.mean():.0%} of them"
      raise _strange(
        "no retired prompts, as the curriculum retires none", share
      )
    for task, members in enumerate(self._members):
      active = len(members) - int(at.retired[members].sum())
      epoch, offset = int(at.epoch[task]), int(at.offset[task])
      if active < 1 or offset > active:
        rule = "an 'offset' of at most the active prompts, of which one stays"
        raise _strange(rule, f"{offset} of {active} in task {task}")
      least, most = epoch * active + offset, epoch * len(members) + offset
      if not least <= at.given[task] <= most:
        rule = f"'given' in {least} .. {most} in epoch {epoch} of task {task}"
        raise _strange(rule, at.given[task])

  def _next_task(self) -> int:
    """Whose turn it is: the most urgent task among those that lag behind.

    With two tasks this is the larger deficit; the larger deficit alone comes
    to be off by more than one prompt with five tasks.

    Reference: Tijdeman, "The chairman assignment problem", 1980: no rule
    keeps K tasks closer than 1 − 1/(2K − 2) to their shares in general.
    """
    if len(self._shares) == 1:
      return 0
    total, slack = sum(self._shares), 2 * len(self._shares) - 2
    number = int(self._at.given.sum()) + 1
    urgency = {}
    for task, share in enumerate(self._shares):
      deficit = number * share - int(self._at.given[task]) * total
      if slack * deficit >= total:
        left = (slack - 1) * total - slack * deficit
        urgency[task] = fractions.Fraction(left, share)
    return min(urgency, key=urgency.__getitem__)

  def _end_epoch(self, task: int) -> None:
    """Starts the task's next epoch, without what the policy can do by now."""
    at, rule = self._at, self._curriculum
    if rule.no_positive_resampling:
      members = self._members[task]
      active = members[~at.retired[members]]
      # A float64 quotient is the float nearest to the ratio, and 0.9 the one
      # nearest to 9/10: the comparison is that of the exact numbers.
      rates = at.correct[active] / np.maximum(at.samples[active], 1)
      leaves = rates >= self._curriculum.retire_at
      leaves &= at.groups[active] >= self._curriculum.min_visits
      if leaves.all():
        leaves = rates > rates.min()
      at.retired[active[leaves]] = True
    at.epoch[task] += 1
    at.offset[task] = 0
    self._orders[task] = self._order(task)

  def _order(self, task: int) -> Int64[np.ndarray, " n"]:
    """Places of the task's active prompts, in the order of its epoch."""
    members = self._members[task]
    # Tasks do not share permutations; the first has those of a single pool.
    index = (task << 32) + int(self._at.epoch[task])
    rng = stream(self._seed, Purpose.ORDER, index)
    order = members[rng.permutation(len(members))]
    order = order[~self._at.retired[order]]
    if self._curriculum.order == "easy_to_hard":
      order = order[np.argsort(self._difficulty[order], kind="stable")]
    return order


def _strange(rule: str, value: Any) -> ValueError:
  return ValueError(
    f"the state of this prompt stream must have {rule}, got {value}; restore"
    " what a stream with the same prompts, weights and curriculum gave"
  )


def _split(
  prompts: Sequence[Prompt], weights: Mapping[str, float] | None
) -> list[Int64[np.ndarray, " n"]]:
  """Places of each task's prompts, in the order of `weights`."""
  if weights is not None:
    bounded = all(0 < weight < math.inf for weight in weights.values())
    if not bounded or abs(sum(weights.values()) - 1) > 1e-6:
      raise ValueError(
        f"weights must be above 0 and sum to 1, got {dict(weights)}"
      )
  if weights is None or len(weights) == 1:
    return [np.arange(len(prompts), dtype=np.int64)]
  places: dict[str, list[int]] = {name: [] for name in weights}
  for place, prompt in enumerate(prompts):
    if prompt.task not in places:
      raise ValueError(
        f"the task of a prompt must have a weight ({', '.join(weights)}), got"
        f" {prompt.task!r} for prompt {prompt.uid}; give it one"
      )
    places[prompt.task].append(place)
  for name, of_task in places.items():
    if not of_task:
      raise ValueError(
        f"a task with a weight must have prompts, got none for {name!r}; add"
        " some or leave it out"
      )
  return [np.array(of_task, np.int64) for of_task in places.values()]


def _whole_shares(weights: Mapping[str, float]) -> list[int]:
  """`weights` as whole numbers in the same proportion, to count exactly.

  >>> _whole_shares({"sums": 0.75, "logic": 0.25})
  [3, 1]
  """
  exact = [fractions.Fraction(weight) for weight in weights.values()]
  scale = math.lcm(*(share.denominator for share in exact))
  return [int(share * scale) for share in exact]
