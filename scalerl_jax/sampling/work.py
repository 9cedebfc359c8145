"""What a sampler computes, counted on the host."""

from typing import NamedTuple


class Work(NamedTuple):
  """What a sampler has computed, padding and idle slots included."""

  prefilled_rows: int = 0  # prompts
  prefilled_tokens: int = 0  # positions of these
  prefilled_keys: int = 0  # that these positions were multiplied with
  decoded_slots: int = 0  # that decode steps computed
  decoded_keys: int = 0  # that these were multiplied with
  decoded_columns: int = 0  # of keys and values that were read for it

  def plus(self, **more: int) -> "Work":
    """With more of some."""
    return self._replace(
      **{name: getattr(self, name) + count for name, count in more.items()}
    )
