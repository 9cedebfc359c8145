"""Groups on their way into slots: the arrays that an insertion is given."""

import dataclasses
import functools
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
  budget: int = 0  # completion tokens allowed; 0: the sampler's


NARROWEST = 32  # tokens; shorter prompts are all padded to one width
PROMPTS = (4, 16, 64, 256)  # of an insertion, where so many groups fit in
# Tokens that an insertion costs beside its own: it reads all weights, and that
# takes as long as a few hundred tokens on an accelerator, as 120 measured on
# two CPU cores.
OVERHEAD = 256


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


def check_groups(groups: Sequence[Group], config: SamplerConfig) -> None:
  """Refuses what has no room.

  Raises:
    ValueError: a prompt of no tokens or of too many, or a budget over the
      sampler's.
  """
  limit, most = config.max_prompt_tokens, config.max_completion_tokens
  for group in groups:
    if not 1 <= len(group.tokens) <= limit:
      raise ValueError(
        f"prompt {group.uid} has {len(group.tokens)} tokens; prompts must"
        f" have 1 to sampler.max_prompt_tokens ({limit})"
      )
    if not 0 <= group.budget <= most:
      raise ValueError(
        f"prompt {group.uid} has a budget of {group.budget} tokens; it must be"
        f" 0 (the sampler's) to sampler.max_completion_tokens ({most})"
      )


class Sizes(NamedTuple):
  """Shapes of an insertion that a program is compiled for."""

  prompts: tuple[int, ...]  # P, ascending, each divisible by the shards
  widths: tuple[int, ...]  # tokens, ascending; the last one holds any prompt


def sizes_of(config: SamplerConfig, *, groups: int, shards: int) -> Sizes:
  """Few shapes that waste little: a prompt pays for at most twice its tokens.

  Args:
    config: slots and budgets.
    groups: that fit into the slots.
    shards: equal parts of the slots.
  """
  prompts, most = set(), config.max_prompt_tokens
  for count in PROMPTS:
    prompts.add(min(groups, -(-count // shards) * shards))
  widths = {most, *(n for n in (most // 2, most // 4) if n >= NARROWEST)}
  return Sizes(tuple(sorted(prompts)), tuple(sorted(widths)))


def no_entry(
  size: int,
  width: int,
  config: SamplerConfig,
  *,
  places: int,
  group_size: int,
) -> Entry:
  """An insertion of nobody.

  Args:
    size: P.
    width: tokens of a prompt, padding included.
    config: slots and budgets.
    places: prompt places that there are.
    group_size: G.
  """
  ones = np.ones((4, size), np.int32)
  ones[3] = config.max_completion_tokens
  return Entry(
    np.zeros((size, width), np.int32),
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
  sizes: Sizes,
  held_places: int,
  shards: int,
) -> Iterator[Entry]:
  """The groups in a few insertions, those of like prompts together.

  Args:
    groups: that enter.
    places: int `[groups]`, the prompt place given to each.
    slots: int `[groups, G]`, the slots given to each.
    config: slots and budgets.
    sizes: that there are programs for.
    held_places: prompt places that there are.
    shards: equal parts of places, slots and rows.
  """
  part = places * shards // held_places
  lengths = np.array([len(group.tokens) for group in groups], int)
  width_of = np.searchsorted(sizes.widths, lengths)
  group_size = slots.shape[1]
  for index, width in enumerate(sizes.widths):
    here = width_of == index
    waiting = [
      np.flatnonzero(here & (part == shard)).tolist() for shard in range(shards)
    ]
    while any(waiting):
      most = shards * max(map(len, waiting))
      share = split(most, sizes.prompts, width)[0] // shards
      entry = no_entry(
        share * shards,
        width,
        config,
        places=held_places,
        group_size=group_size,
      )
      for shard in range(shards):
        now, waiting[shard] = waiting[shard][:share], waiting[shard][share:]
        for row, i in enumerate(now, start=shard * share):
          group = groups[i]
          entry.prompts[row, : len(group.tokens)] = group.tokens
          entry.lengths[row] = len(group.tokens)
          entry.uids[row] = group.uid
          entry.first_samples[row] = group.first_sample
          entry.budgets[row] = group.budget or config.max_completion_tokens
          entry.places[row] = places[i]
          entry.members[row] = slots[i]
          entry.source[slots[i]] = row * group_size + np.arange(group_size)
      yield entry


@functools.lru_cache(maxsize=1024)
def split(rows: int, sizes: tuple[int, ...], width: int) -> tuple[int, ...]:
  """Sizes of the insertions that cost least for so many rows, largest first.

  >>> [split(40, (4, 16, 64), width) for width in (8, 64)]
  [(64,), (16, 16, 4, 4)]
  """
  best: list[tuple[int, tuple[int, ...]]] = [(0, ())]
  for left in range(1, rows + 1):
    ways = (
      (best[max(left - size, 0)], size, size * width + OVERHEAD)
      for size in sizes
    )
    best.append(
      min((cost + more, (*taken, size)) for (cost, taken), size, more in ways)
    )
  return tuple(sorted(best[rows][1], reverse=True))
