"""`--evaluate`: mean@n of a saved policy, with every completion written down.

Outside of a run, on its held-out sets or on a file of questions.
"""

import json
import pathlib
from collections.abc import Sequence

import numpy as np
from flax import nnx

from scalerl_jax.config import Config
from scalerl_jax.data.task import Task
from scalerl_jax.data.tasks import question_set
from scalerl_jax.models.generator import (
  cast,
  generator_graph,
  weight_dtypes,
)
from scalerl_jax.run.evaluate import Evaluation, Evaluator
from scalerl_jax.run.meshes import make_meshes
from scalerl_jax.run.saved_policy import load_policy, stored_task
from scalerl_jax.run.warm_start import resolved
from scalerl_jax.run.workdir import check_sections
from scalerl_jax.sampling.interruption import make_interruption
from scalerl_jax.types import Prompt


def evaluate_saved(
  config: Config, workdir: pathlib.Path, name: str
) -> list[str]:
  """Evaluates a policy on every set; completions go into the workdir.

  The random numbers are those of the run's own evaluations, so a saved step
  has the pass rate that `curve.csv` tells.

  Args:
    config: the run's; `evaluation` and `sampler` may differ from it.
    workdir: of the run; where completions are written.
    name: a saved step, "last", or the folder or hub name of a checkpoint.

  Returns:
    A line for each set.

  Raises:
    ValueError: no such policy or set, or a config that is not the run's.
  """
  asked, config = config, resolved(config)
  if not config.evaluation.path and (workdir / "config.json").is_file():
    check_sections(workdir, asked, ("task",))
  task = stored_task(asked, workdir)
  sets = _sets(config, task)
  mesh = make_meshes(config).generator
  policy, label = load_policy(asked, workdir, name, task, mesh)
  graph, params = nnx.split(policy)
  graph = generator_graph(graph, params, config.sampler)
  params = cast(params, weight_dtypes(params, policy.config, config.sampler))
  del policy  # and with it weights that are held in another dtype now
  interruption = make_interruption(
    config.length,
    task.tokenizer,
    max_completion_tokens=config.sampler.max_completion_tokens,
  )
  evaluator = Evaluator(
    sets,
    graph,
    params,
    config.evaluation,
    config.sampler,
    mesh,
    interruption,
  )
  told = []
  workdir.mkdir(parents=True, exist_ok=True)
  for which, prompts in sets.heldout.items():
    found = evaluator.evaluate(params, prompts)
    path = workdir / f"completions_{label}_{which}.jsonl"
    write_completions(path, prompts, found)
    told.append(f"{which}, {label}: {_summary(found)}; completions: {path}")
  return told


def write_completions(
  path: pathlib.Path, prompts: Sequence[Prompt], found: Evaluation
) -> None:
  """A JSON line a prompt: its text, answer, completions and verdicts."""
  rows = zip(prompts, found.completions, found.verdicts.tolist(), strict=True)
  lines = [
    json.dumps(
      {
        "prompt": prompt.text,
        "answer": prompt.answer,
        "completions": completions,
        "correct": [int(verdict) for verdict in verdicts],
      },
      ensure_ascii=False,
    )
    for prompt, completions, verdicts in rows
  ]
  path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _sets(config: Config, task: Task) -> Task:
  if not config.evaluation.path:
    return task
  return question_set(
    config.task,
    config.evaluation.path,
    task.tokenizer,
    max_prompt_tokens=config.sampler.max_prompt_tokens,
  )


def _summary(found: Evaluation) -> str:
  rates = found.correct / found.samples
  prompts = len(rates)
  # Of the mean over prompts: their completions are not independent.
  error = rates.std(ddof=1) / np.sqrt(prompts) if prompts > 1 else float("nan")
  cut = found.truncated.sum() / found.samples.sum()
  return (
    f"mean@{found.samples[0]} {found.pass_rate:.4f}, standard error"
    f" {error:.4f} over {prompts} prompts; {cut:.1%} out of budget"
  )
