"""PPO-off-policy-k: generate for k updates with one policy, then do them.

The alternative that the paper compares PipelineRL with. Only the rules of
admission and use differ from `schedule.py`; counting is the same.
"""

from collections.abc import Sequence
from typing import Literal

from scalerl_jax.pipeline.schedule import StalenessLedger, check_integer


class PhaseLedger(StalenessLedger):
  """Phases alternate: k·P groups are generated, then k updates are made.

  No group starts while updates of the phase are left, and no update starts
  while a group of the phase is unfinished, so that all tokens of a phase are
  of one version and staleness at use runs through 0, 1, ..., k − 1. k = 1 is
  synchronous and on-policy. The last phase is shorter where k does not divide
  the run's updates.

  Args:
    prompts_per_step: P, groups in a batch, at least 1.
    updates_per_phase: k, at least 1.
    total_groups: groups that the whole run trains on, steps·P.

  Raises:
    TypeError: An argument is not an int.
    ValueError: An argument is too small, or `total_groups` is not a multiple
      of `prompts_per_step`.

  Example:
    >>> ledger = PhaseLedger(1, updates_per_phase=2, total_groups=4)
    >>> ledger.admissible()
    2
    >>> for group in (10, 11):
    ...   ledger.admit(group, version=0)
    >>> ledger.finish(10)
    >>> ledger.next_batch(), ledger.blocked_on()  # the phase is not complete
    (None, 'queue')
    >>> ledger.finish(11)
    >>> ledger.take(ledger.next_batch())
    array([0])
    >>> ledger.publish()
    >>> ledger.admissible()
    0
    >>> ledger.take(ledger.next_batch())
    array([1])
    >>> ledger.publish()
    >>> ledger.admissible()
    2

  Reference:
    Khatri et al. 2025, arXiv 2510.13786, section 3.1 (PPO-off-policy-k).
  """

  def __init__(
    self, prompts_per_step: int, updates_per_phase: int, total_groups: int
  ):
    check_integer("updates_per_phase", updates_per_phase, 1)
    super().__init__(prompts_per_step, updates_per_phase - 1, total_groups)

  def admissible(self) -> int:
    """How many new groups may be admitted now, ≥ 0; 0 between the updates."""
    return 0 if self._updates_begun else super().admissible()

  @property
  def _updates_begun(self) -> bool:
    """Whether the phase whose groups are outstanding has been trained on."""
    started = next(iter(self._versions.values()), self.version)
    return self.updating or self.version > started

  def blocked_on(self) -> Literal["update", "queue", "oldest"] | None:
    """Why no batch is on offer; "queue" while the phase is generated."""
    found = super().blocked_on()
    return "queue" if found == "oldest" else found

  def _leaves_enough(self, batch: Sequence[int]) -> bool:
    """Whether the phase is complete; its order does not matter then."""
    del batch
    return not self.in_flight and not self.admissible()
