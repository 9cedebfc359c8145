"""mean@n: the pass rate on held-out prompts, n completions each."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import nnx
from jax.sharding import Mesh

from scalerl_jax.config import EvaluationConfig, SamplerConfig
from scalerl_jax.data.tasks import Task
from scalerl_jax.sampling.interruption import Interruption
from scalerl_jax.sampling.sampler import Group, Sampler
from scalerl_jax.types import FinishReason, Prompt


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """One policy on one held-out set; arrays have an entry a prompt."""

  correct: np.ndarray  # int32 [P], correct completions
  samples: np.ndarray  # int32 [P], completions
  mean_length: np.ndarray  # float32 [P], tokens
  truncated: np.ndarray  # int32 [P], completions that ran out of budget
  completions: list[list[str]]  # of each prompt
  verdicts: np.ndarray  # bool [P, n], whether each of them is right

  @property
  def pass_rate(self) -> float:
    """Mean of 0/1 correctness."""
    return float(self.correct.sum() / self.samples.sum())

  @property
  def texts(self) -> list[str]:
    """The first completion of each prompt."""
    return [completions[0] for completions in self.completions]

  @property
  def first_correct(self) -> np.ndarray:
    """Whether that one is right."""
    return self.verdicts[:, 0]


class Evaluator:
  """Slots of its own and keys of its own, so that evaluating changes nothing.

  The same keys serve every evaluation: two policies are compared on the same
  random numbers.
  """

  def __init__(
    self,
    task: Task,
    policy: Any,
    params: nnx.State,
    config: EvaluationConfig,
    sampler: SamplerConfig,
    mesh: Mesh,
    interruption: Interruption | None = None,
  ):
    self.task = task
    self.samples = config.samples
    self._sampler = Sampler(
      policy,
      params,
      sampler,
      group_size=config.samples,
      eos_ids=task.tokenizer.eos_ids,
      seed=config.seed,
      mesh=mesh,
      interruption=interruption,
    )

  def compile(self, params: nnx.State) -> None:
    """Compiles before the clock starts."""
    self._sampler.compile(params)

  def evaluate(
    self, params: nnx.State, heldout: Sequence[Prompt]
  ) -> Evaluation:
    """All held-out prompts under these parameters."""
    groups = [
      Group(i, prompt.uid, 0, prompt.tokens) for i, prompt in enumerate(heldout)
    ]
    rollouts = self._sampler.generate(params, 0, groups)
    if not all(np.isfinite(r.behavior_logps).all() for r in rollouts):
      raise FloatingPointError(
        "an evaluation drew tokens with log-probs that are not finite: the"
        " policy has diverged; lower optimizer.learning_rate"
      )
    tokens = np.concatenate([r.tokens for r in rollouts])
    lengths = np.stack([r.length for r in rollouts])
    finish = np.stack([r.finish for r in rollouts])
    texts = self.task.tokenizer.decode_batch(tokens, lengths.reshape(-1))
    prompts = [prompt for prompt in heldout for _ in range(self.samples)]
    ended = finish.reshape(-1) == FinishReason.EOS
    correct = self.task.verify_batch(prompts, texts, ended)
    correct = correct.reshape(len(heldout), self.samples)
    return Evaluation(
      correct=correct.sum(axis=1).astype(np.int32),
      samples=np.full((len(heldout),), self.samples, np.int32),
      mean_length=lengths.mean(axis=1).astype(np.float32),
      truncated=(finish == FinishReason.BUDGET).sum(axis=1).astype(np.int32),
      completions=[
        texts[first : first + self.samples]
        for first in range(0, len(texts), self.samples)
      ],
      verdicts=correct,
    )
