"""Dynamic sampling: groups that teach nothing are replaced, within bounds."""

import numpy as np


class Refill:
  """Says which finished groups are thrown away and sampled anew.

  A group whose completions are all right or all wrong has advantage 0; DAPO
  samples other prompts until the batch is full of mixed ones. Here at most
  `limit` groups are replaced for each batch. What comes after them is
  trained on as it is (the train step's filter leaves constant groups out), so
  a policy that is always right or always wrong ends no run.

  Args:
    limit: groups that may be replaced before a batch is taken; 0 replaces
      none.

  Example:
    >>> refill = Refill(limit=1)
    >>> right, mixed = np.array([1, 1]), np.array([0, 1])
    >>> [refill.replaces(c, c >= 0) for c in (mixed, right, right)]
    [False, True, False]
    >>> refill.next_batch()
    >>> refill.replaces(right, right >= 0)
    True

  Reference: DAPO, arXiv 2503.14476, section 3.2 (dynamic sampling).
  """

  def __init__(self, limit: int):
    self.limit = limit
    self.replaced = 0  # since the last batch was taken

  def replaces(self, correct: np.ndarray, counted: np.ndarray) -> bool:
    """Whether a group is thrown away; counts it if so.

    Args:
      correct: 0/1, `[G]`.
      counted: bool `[G]`, False on completions that are masked out.
    """
    seen = correct[counted]
    mixed = bool((seen == 1).any() and (seen == 0).any())
    if mixed or self.replaced >= self.limit:
      return False
    self.replaced += 1
    return True

  def next_batch(self) -> None:
    """A batch was taken: the next one has the whole limit again."""
    self.replaced = 0
