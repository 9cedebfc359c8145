"""What travels between rooms: pytrees, with dtype and shape beside each field.

Leading axes are written in the letters of WORKSPACE.md: P prompts, G group
size, B = P·G completions, T tokens, Tp prompt and Tc completion budget.
"""

import dataclasses
import enum
from typing import Any, TypedDict

import jax
import numpy as np


class FinishReason(enum.IntEnum):
  """Why a completion ended."""

  RUNNING = 0
  EOS = 1  # the policy drew an end token
  BUDGET = 2  # truncated: the completion budget ran out


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A question with what its verifier needs; `uid` names it for ever."""

  uid: int  # unique within a run, training and held-out together
  text: str
  tokens: np.ndarray  # int32 [length]
  answer: str
  task: str = ""  # name of the task that judges it
  difficulty: float = 0.0  # the task's own measure; greater is harder


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Rollout:
  """The G completions of one prompt, as the sampler recorded them.

  Every later room reads this record; nobody recomputes what it says.
  """

  uid: Any  # int32 [], the prompt's
  first_sample: Any  # int32 [], sample index of row 0; row g has + g
  prompt: Any  # int32 [Tp], right-padded
  prompt_length: Any  # int32 []
  tokens: Any  # int32 [G, Tc], right-padded
  length: Any  # int32 [G], completion tokens, the end token included
  behavior_logps: Any  # float32 [G, Tc], nats, of the distribution drawn from
  versions: Any  # int32 [G, Tc], policy version that drew each token
  forced: Any  # bool [G, Tc], True where the token was not drawn
  finish: Any  # int32 [G], FinishReason


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Packed:
  """A batch's completions side by side in rows of W tokens; R rows."""

  tokens: Any  # int32 [R, W]
  segment_ids: Any  # int32 [R, W], 1, 2, ... along a row, 0 on padding
  row: Any  # int32 [B], the row of each completion; -1 is in none
  start: Any  # int32 [B], its first column there


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
  """One gradient step's completions, a row each; groups are G adjacent rows.

  Position t of a per-token field speaks of `tokens[:, t]` given those before.
  """

  tokens: Any  # int32 [B, T], prompt then completion then padding
  segment_ids: Any  # int32 [B, T], 1 on tokens, 0 on padding
  mask: Any  # bool [B, T], True on sampled completion tokens that count
  behavior_logps: Any  # float32 [B, T], nats; 0 outside the mask
  correct: Any  # int32 [B], 0/1 correctness, what filters look at
  rewards: Any  # float32 [B], what advantages are made of
  prompt_length: Any = None  # int32 [B], tokens of each row's prompt, 1 up
  packed: Any = None  # Packed, where the forward pass goes over fuller rows


class RunState(TypedDict):
  """Everything that changes during a run; saved and restored as one pytree.

  Whole at a step boundary: no update is running, no chunk is in the air, and
  the published weights are the learner's.
  """

  learner: Any  # learning.train_step.LearnerState: params, optimiser, step
  slots: Any  # sampling.slots.SlotState: half-written completions and their KV
  occupancy: Any  # which group holds which slot and place, int arrays
  store: Any  # pipeline.store: groups in flight and queued, fixed-shape arrays
  ledger: Any  # pipeline.schedule: outstanding groups and the version
  stream: Any  # data.curriculum: cursors and pass-rate history, int arrays
  counters: Any  # pipeline.events.Totals, groups admitted, journal lines
