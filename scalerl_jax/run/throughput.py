"""A run's rates and totals, read from its metrics for the report."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from scalerl_jax.run.progress import clock, quantity

SPEED = "time/sampler_tokens_per_second"
Write = Callable[[float], str]

# Metric, what it is, and how its median over the steps is written.
RATES: tuple[tuple[str, str, Write], ...] = (
  (SPEED, "tokens generated a second", quantity),
  ("time/step_seconds", "seconds a step", "{:.3g}".format),
  ("time/learner_idle_share", "learner idle", "{:.0%}".format),
  ("time/sampler_idle_share", "sampler idle", "{:.0%}".format),
  ("time/learner_mfu", "learner, of the matmul rate", "{:.0%}".format),
  ("time/sampler_mfu", "sampler, of the matmul rate", "{:.0%}".format),
  (
    "time/sampler_bandwidth_share",
    "decoding, of the memory bandwidth",
    "{:.0%}".format,
  ),
  ("time/publish_seconds", "seconds a publication", "{:.2g}".format),
  ("sampler_occupancy", "sampler slots occupied", "{:.0%}".format),
  ("useful_token_fraction", "tokens that teach", "{:.0%}".format),
  ("effective_batch", "completions that count", "{:.0f}".format),
  ("truncated", "completions out of budget", "{:.1%}".format),
  ("interrupted", "completions interrupted", "{:.1%}".format),
)
# The same, of the last step.
ENDS: tuple[tuple[str, str, Write], ...] = (
  ("generated_tokens", "tokens generated", quantity),
  ("trained_tokens", "tokens trained on", quantity),
  ("discarded_groups", "groups replaced", quantity),
  ("retired_share", "prompts retired", "{:.1%}".format),
  ("flops_full", "FLOPs of all work asked for", quantity),
  ("flops_spent", "FLOPs really computed", quantity),
  ("time/device_seconds", "device-seconds", "{:.1f}".format),
  ("time/wall_seconds", "time", clock),
)


def series(
  metrics: Sequence[Mapping[str, Any]], name: str
) -> tuple[np.ndarray, np.ndarray]:
  """Steps and values of a metric, where it is a number."""
  told = [
    (line["step"], line[name])
    for line in metrics
    if isinstance(line.get(name), int | float)
  ]
  steps, values = np.array(told, float).reshape(-1, 2).T
  return steps, values


def rows(metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
  """(what, value, over what) of every metric that the run wrote."""
  found = []
  for table, over, reduce in (
    (RATES, "median of steps", np.median),
    (ENDS, "whole run", lambda values: values[-1]),
  ):
    for name, what, write in table:
      values = series(metrics, name)[1]
      if len(values):
        found.append((what, write(float(reduce(values))), over))
  return found
