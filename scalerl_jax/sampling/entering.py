"""Groups on their way into slots: the arrays that an insertion is given."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from scalerl_jax.config import SamplerConfig


@dataclasses.dataclass(frozen=True)
class Group:
  """A prompt about to be sampled G times."""

  index: int  # names the group among those in the sampler
  uid: int  # the prompt's
  first_sample: int  # sample index of the group's first completion
  tokens: np.ndarray  # int32 [length], the prompt


class Entry(NamedTuple):
  """What `decode.insert_groups` reads of P prompts, rows of padding included.

  Rows come in equal parts, one for each shard of the slots.
  """

  prompts: np.ndarray  # int32 [P, Tp]
  lengths: np.ndarray  # int32 [P]
  uids: np.ndarray  # int32 [P]
  first_samples: np.ndarray  # int32 [P]
  budgets: np.ndarray  # int32 [P]
  places: np.ndarray  # int32 [P], out of range for padding
  members: np.ndarray  # int32 [P, G], slots
  source: np.ndarray  # int32 [S], row of P·G that enters a slot, or −1


def check_prompts(groups: Sequence[Group], limit: int) -> None:
  """Refuses what cannot be prefilled.

  Raises:
    ValueError: a prompt of no tokens or of more than `limit`.
  """
  for group in groups:
    if not 1 <= len(group.tokens) <= limit:
      raise ValueError(
        f"prompt {group.uid} has {len(group.tokens)} tokens; prompts must"
        f" have 1 to sampler.max_prompt_tokens ({limit})"
      )


def no_entry(
  size: int, config: SamplerConfig, *, places: int, group_size: int
) -> Entry:
  """An insertion of nobody.

  Args:
    size: P.
    config: slots and budgets.
    places: prompt places that there are.
    group_size: G.
  """
  ones = np.ones((4, size), np.int32)
  ones[3] = config.max_completion_tokens
  return Entry(
    np.zeros((size, config.max_prompt_tokens), np.int32),
    *ones,
    places=np.full((size,), places, np.int32),
    members=np.zeros((size, group_size), np.int32),
    source=np.full((config.slots,), -1, np.int32),
  )


def entries(
  groups: Sequence[Group],
  places: np.ndarray,
  slots: np.ndarray,
  config: SamplerConfig,
  *,
  sizes: Sequence[int],
  held_places: int,
  shards: int,
) -> Iterator[Entry]:
  """The groups in as few insertions as the sizes allow.

  Args:
    groups: that enter.
    places: int `[groups]`, the prompt place given to each.
    slots: int `[groups, G]`, the slots given to each.
    config: slots and budgets.
    sizes: prompts of an insertion that a program exists for, ascending.
    held_places: prompt places that there are.
    shards: equal parts of places, slots and rows.
  """
  part = places * shards // held_places
  waiting = [
    np.flatnonzero(part == shard).tolist() for shard in range(shards)
  ]
  group_size = slots.shape[1]
  while any(waiting):
    most = shards * max(len(rows) for rows in waiting)
    size = next((n for n in sizes if n >= most), sizes[-1])
    share = size // shards
    entry = no_entry(size, config, places=held_places, group_size=group_size)
    for shard in range(shards):
      now, waiting[shard] = waiting[shard][:share], waiting[shard][share:]
      for row, i in enumerate(now, start=shard * share):
        group = groups[i]
        entry.prompts[row, : len(group.tokens)] = group.tokens
        entry.lengths[row] = len(group.tokens)
        entry.uids[row] = group.uid
        entry.first_samples[row] = group.first_sample
        entry.places[row] = places[i]
        entry.members[row] = slots[i]
        entry.source[slots[i]] = row * group_size + np.arange(group_size)
    yield entry
