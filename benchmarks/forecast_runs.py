"""Runs whose ends the fitter has to forecast.

    python -m benchmarks.forecast_runs --runs=DIR

trains 42 laptop policies: seven tasks of their own (five tables of chain
arithmetic, two of chain logic), six recipes each. A finished run is skipped, so
the same command goes on after a stop. `benchmarks.forecasts --runs=DIR` scores
forecasts on them. About 90 s a run and core on a quiet host.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from experiments.studies.runner import Job, core_sets, run_jobs
from scalerl_jax.config import Config, override

# Tasks that no forecast was tuned on: the published runs have seed 0.
TASKS = (
  *(("chain_arithmetic", seed) for seed in range(101, 106)),
  *(("chain_logic", seed) for seed in (201, 202)),
)

# Losses, learning rates, batch sizes, group sizes and lengths of run.
RECIPES: dict[str, dict[str, Any]] = {
  "cispo": {},
  "gspo": {
    "loss.name": "gspo",
    "loss.clip_low": 0.02,
    "loss.clip_high": 0.02,
    "loss.aggregation": "sample_average",
  },
  "dapo_faster": {
    "loss.name": "clipped_surrogate",
    "optimizer.learning_rate": 5e-4,
    "run.steps": 300,
  },
  "small_batch": {
    "batch.prompts": 16,
    "run.steps": 800,
    "evaluation.every": 20,
  },
  "slow": {"optimizer.learning_rate": 1.5e-4},
  "group_8": {
    "batch.prompts": 64,
    "batch.group_size": 8,
    "optimizer.learning_rate": 6e-4,
    "run.steps": 320,
  },
}


def make_jobs(folder: pathlib.Path) -> list[Job]:
  """A run for each task and recipe, tasks outermost.

  Args:
    folder: of all runs; a run's workdir is `folder/task_seed/recipe`.

  Returns:
    The runs; run seeds differ between all of them.
  """
  jobs: list[Job] = []
  for name, seed in TASKS:
    for recipe, fields in RECIPES.items():
      config = override(
        Config(),
        {"task.name": name, "task.seed": seed, "run.seed": len(jobs)} | fields,
      )
      label = f"{name}_{seed}"
      jobs.append(
        Job(f"{label}, {recipe}", len(jobs), config, folder / label / recipe)
      )
  return jobs


def main(words: Sequence[str]) -> int:
  """Trains what is not trained yet; the exit code.

  Args:
    words: the flags.

  Returns:
    0; 1 when a run failed; 130 when told to stop.
  """
  parser = argparse.ArgumentParser(prog="benchmarks.forecast_runs")
  parser.add_argument("--runs", required=True, help="folder for the workdirs")
  folder = pathlib.Path(parser.parse_args(words).runs).resolve()
  outcome = run_jobs(
    make_jobs(folder), cores=core_sets(1), reuse=False, flags="", tell=print
  )
  for run, why in outcome.failed.items():
    print(f"error: {run} failed: {why}", file=sys.stderr)
  if outcome.stopped:
    return 130
  return 1 if outcome.failed else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
