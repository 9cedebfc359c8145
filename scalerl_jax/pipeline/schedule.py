"""Which group may start, and which batch may be trained on: staleness ≤ k.

Counting only: no arrays of tokens, no threads, no clock of the wall. The loop
asks here, acts, and tells what it did.
"""

import dataclasses
import enum
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, SupportsIndex

import numpy as np
from jaxtyping import Int


class _Status(enum.IntEnum):
  """Where an outstanding group is; `EMPTY` only pads the state's arrays."""

  EMPTY = 0
  IN_FLIGHT = 1
  QUEUED = 2
  IN_UPDATE = 3


def check_integer(name: str, value: Any, minimum: int) -> None:
  """Refuses what is not an int of at least `minimum`."""
  if isinstance(value, bool) or not isinstance(value, int | np.integer):
    raise TypeError(f"{name} must be an int, got {value!r}; pass a number.")
  if value < minimum:
    raise ValueError(
      f"{name} must be at least {minimum}, got {value}; raise it."
    )


def check_fields(
  name: str, state: Mapping[str, Any], like: Mapping[str, Any]
) -> None:
  """Refuses a state whose fields are not those of `like`."""
  if set(state) != set(like):
    raise ValueError(
      f"{name} must have the fields {sorted(like)}, got {sorted(state)}; "
      "restore what state_dict() returned."
    )


@dataclasses.dataclass(eq=False)
class StalenessLedger:
  """Bounded staleness by admission: nothing older than k, nothing dropped.

  With v updates done *and published*, P groups a batch, and a group's version
  the one at which its first token was drawn, `staleness = v − version`.

  - Admission: `outstanding < (k + 1)·P`. A group is outstanding from its
    admission until the weights of its own update are published, so the batch
    in the running update counts; a discarded group stops counting at once.
  - Use: the P oldest finished groups, and only if afterwards
    `#{remaining: version ≤ v + d − k} ≤ d·P` for d = 0, ..., k. Remaining
    means admitted and not taken, finished or not.

  The use rule says that the remaining groups can still be used in time, P an
  update. Admission makes it true again once everything in flight is finished:
  the learner may wait, but never for ever. k = 0 is exactly synchronous.

  Args:
    prompts_per_step: P, groups in a batch, at least 1.
    max_staleness: k in learner steps, at least 0.
    total_groups: groups that the whole run trains on, steps·P. Discarded
      groups are not among them: each may be replaced by a new one.

  Raises:
    TypeError: An argument is not an int.
    ValueError: An argument is too small, or `total_groups` is not a multiple
      of `prompts_per_step` (the rest would wait for ever).

  Example:
    >>> ledger = StalenessLedger(2, max_staleness=0, total_groups=4)
    >>> for group in (10, 11):
    ...   ledger.admit(group, version=0)
    >>> ledger.finish(11)
    >>> ledger.next_batch(), ledger.blocked_on()
    (None, 'queue')
    >>> ledger.finish(10)
    >>> ledger.take(ledger.next_batch())
    array([0, 0])
    >>> ledger.admissible()  # synchronous: nothing starts before the update
    0
    >>> ledger.publish()
    >>> ledger.version, ledger.admissible()
    (1, 2)

  Reference:
    Khatri et al. 2025, arXiv 2510.13786, section 3.1 (PipelineRL-k). There
    the trainers wait when they are k steps ahead of the generators; here the
    bound holds for the oldest token of every group that is trained on.
  """

  prompts_per_step: int
  max_staleness: int
  total_groups: int
  version: int = dataclasses.field(init=False, default=0)

  def __post_init__(self):
    check_integer("prompts_per_step", self.prompts_per_step, 1)
    check_integer("max_staleness", self.max_staleness, 0)
    check_integer("total_groups", self.total_groups, 1)
    if self.total_groups % self.prompts_per_step:
      raise ValueError(
        "total_groups must be a multiple of prompts_per_step = "
        f"{self.prompts_per_step}, got {self.total_groups}; pass "
        "steps · prompts_per_step."
      )
    # Both in admission order. Admission is at the published version, which
    # never falls, so this is also the order by version.
    self._versions: dict[int, int] = {}
    self._statuses: dict[int, _Status] = {}

  @property
  def capacity(self) -> int:
    """Most groups that can be outstanding, (k + 1)·P."""
    return (self.max_staleness + 1) * self.prompts_per_step

  @property
  def outstanding(self) -> int:
    """Groups in flight, queued, or in the running update."""
    return len(self._versions)

  @property
  def in_flight(self) -> int:
    """Groups admitted and not finished."""
    return self._count(_Status.IN_FLIGHT)

  @property
  def queued(self) -> int:
    """Groups finished and not taken."""
    return self._count(_Status.QUEUED)

  @property
  def updating(self) -> bool:
    """Whether an update is running: taken and not published."""
    return self._count(_Status.IN_UPDATE) > 0

  @property
  def done(self) -> bool:
    """Whether all `total_groups` are trained on and published."""
    return self.version * self.prompts_per_step >= self.total_groups

  def admissible(self) -> int:
    """How many new groups may be admitted now, ≥ 0.

    The smaller of `(k + 1)·P − outstanding` and what the run still needs
    beyond the groups that are outstanding already, so that it drains.
    """
    trained = self.version * self.prompts_per_step
    needed = self.total_groups - trained - self.outstanding
    return min(self.capacity - self.outstanding, needed)

  def admit(self, group_id: SupportsIndex, version: SupportsIndex) -> None:
    """Lets a new group into the sampler.

    Args:
      group_id: Its name, not that of an outstanding group.
      version: Policy version that will draw its first token; the published
        one, as an older one could be too old at use whatever the order.

    Raises:
      ValueError: The id is outstanding, the version is not the published one,
        or nothing is admissible.
    """
    group_id, version = operator.index(group_id), operator.index(version)
    if group_id in self._versions:
      raise ValueError(
        f"group_id {group_id} is already outstanding; give each group its own."
      )
    if version != self.version:
      raise ValueError(
        f"version of a new group must be the published {self.version}, got "
        f"{version}; fetch the newest weights before admitting."
      )
    if self.admissible() < 1:
      raise ValueError(
        f"group {group_id} must not be admitted: {self.outstanding} of "
        f"{self.capacity} places are taken after {self.version} updates of a "
        f"run of {self.total_groups} groups; ask admissible() first."
      )
    self._versions[group_id] = version
    self._statuses[group_id] = _Status.IN_FLIGHT

  def finish(self, group_id: SupportsIndex) -> None:
    """Queues a group for training: all its completions are done.

    Raises:
      ValueError: The group is not in flight.
    """
    group_id = self._known(group_id, "finished", (_Status.IN_FLIGHT,))
    self._statuses[group_id] = _Status.QUEUED

  def discard(self, group_id: SupportsIndex) -> None:
    """Forgets a group that will not be trained on; another may replace it.

    Raises:
      ValueError: The group is not in flight or queued. In an update it keeps
        its place: its successor would start before the update is published
        and be one step too old.
    """
    allowed = (_Status.IN_FLIGHT, _Status.QUEUED)
    group_id = self._known(group_id, "discarded", allowed)
    del self._versions[group_id], self._statuses[group_id]

  def next_batch(self) -> list[int] | None:
    """The batch that the learner may take now; it is not taken yet.

    Returns:
      The ids of the P oldest finished groups, oldest first, or None while an
      update is running, too few are finished, or taking them would leave
      groups that cannot all be used in time.
    """
    batch = self._candidate()
    if self.updating or batch is None or not self._leaves_enough(batch):
      return None
    return batch

  def take(self, batch: Iterable[SupportsIndex]) -> Int[np.ndarray, "P"]:
    """Marks the offered batch as in update.

    Args:
      batch: What `next_batch()` returns.

    Returns:
      Staleness of each group in learner steps, in 0..k, int64.

    Raises:
      ValueError: The batch is not the one on offer.
    """
    offered = self.next_batch()
    batch = [operator.index(group_id) for group_id in batch]
    if batch != offered:
      raise ValueError(
        f"batch must be the one on offer, {offered}, got {batch}; take what "
        "next_batch() returns."
      )
    for group_id in batch:
      self._statuses[group_id] = _Status.IN_UPDATE
    return np.array([self.version - self._versions[i] for i in batch])

  def publish(self) -> None:
    """Ends the update: its weights are out, its groups are released.

    Raises:
      ValueError: No update is running.
    """
    if not self.updating:
      raise ValueError(
        f"version {self.version + 1} must not be published: no update is "
        "running; take a batch first."
      )
    for group_id, status in list(self._statuses.items()):
      if status is _Status.IN_UPDATE:
        del self._versions[group_id], self._statuses[group_id]
    self.version += 1

  def blocked_on(self) -> Literal["update", "queue", "oldest"] | None:
    """Why no batch is on offer.

    Returns:
      "update" while one is running, "queue" if fewer than P groups are
      finished, "oldest" if an unfinished old group holds the learner up, None
      if a batch is on offer or the run is done.
    """
    if self.done:
      return None
    if self.updating:
      return "update"
    batch = self._candidate()
    if batch is None:
      return "queue"
    return None if self._leaves_enough(batch) else "oldest"

  def state_dict(self) -> dict[str, Any]:
    """Everything that changes, as ints and arrays of fixed shape.

    Returns:
      Arrays of length (k + 1)·P, padded with zeros, so that a fresh ledger's
      state has the structure and the shapes of any other's.
    """
    arrays = {
      "group_ids": list(self._versions),
      "versions": list(self._versions.values()),
      "statuses": list(self._statuses.values()),
    }
    free = self.capacity - self.outstanding
    return {
      "prompts_per_step": int(self.prompts_per_step),
      "max_staleness": int(self.max_staleness),
      "version": int(self.version),
      **{
        name: np.pad(np.array(values, np.int64), (0, free))
        for name, values in arrays.items()
      },
    }

  def load_state_dict(self, state: Mapping[str, Any]) -> None:
    """Goes on from `state` exactly; `total_groups` may have grown since.

    Raises:
      ValueError: A field is missing or unknown, the state is that of another
        P or k, or it holds more groups than the run trains on.
    """
    check_fields("ledger state", state, self.state_dict())
    for name in ("prompts_per_step", "max_staleness"):
      if int(state[name]) != getattr(self, name):
        raise ValueError(
          f"{name} of the ledger state must be {getattr(self, name)}, got "
          f"{int(state[name])}; resume with the configuration that saved it."
        )
    version = int(state["version"])
    statuses = np.asarray(state["statuses"])
    held = np.flatnonzero(statuses != _Status.EMPTY)
    groups = version * self.prompts_per_step + held.size
    if groups > self.total_groups:
      raise ValueError(
        f"total_groups must be at least the {groups} of the ledger state, got "
        f"{self.total_groups}; resume with at least as many steps."
      )
    ids = np.asarray(state["group_ids"])[held].tolist()
    versions = np.asarray(state["versions"])[held].tolist()
    self.version = version
    self._versions = dict(zip(ids, versions, strict=True))
    self._statuses = dict(
      zip(ids, map(_Status, statuses[held].tolist()), strict=True)
    )

  def _count(self, status: _Status) -> int:
    return sum(each is status for each in self._statuses.values())

  def _known(
    self, group_id: SupportsIndex, verb: str, allowed: Sequence[_Status]
  ) -> int:
    """The id as an int, if the group's status allows what is to be done."""
    group_id = operator.index(group_id)
    status = self._statuses.get(group_id, _Status.EMPTY)
    if status in allowed:
      return group_id
    rule = " or ".join(each.name.lower().replace("_", " ") for each in allowed)
    found = "not outstanding (never admitted, discarded or trained on already)"
    if status is not _Status.EMPTY:
      found = status.name.lower().replace("_", " ")
    raise ValueError(
      f"group {group_id} must be {rule} to be {verb}, but it is {found}; "
      "report each event of a group once."
    )

  def _candidate(self) -> list[int] | None:
    """The P oldest finished groups, or None if there are fewer."""
    finished = [i for i, s in self._statuses.items() if s is _Status.QUEUED]
    if len(finished) < self.prompts_per_step:
      return None
    return finished[: self.prompts_per_step]

  def _leaves_enough(self, batch: Sequence[int]) -> bool:
    """Whether all groups but `batch` can be used in time, P an update."""
    taken = set(batch)
    # Sorted, as admission order is the order by version.
    remaining = [v for i, v in self._versions.items() if i not in taken]
    updates = np.arange(self.max_staleness + 1)
    due = self.version + updates - self.max_staleness
    counts = np.searchsorted(remaining, due, side="right")
    return bool(np.all(counts <= updates * self.prompts_per_step))
