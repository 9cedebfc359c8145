"""The quickstart with each prompt computed once for its group, in short rows.

Two settings of the train step that change its cost and not its numbers:
`batch.share_prompts` computes a prompt once, not once for each of its 16
completions, and `batch.width_buckets` cuts rows to the longest completion of
their group. Half of a quickstart's row is prompt, so much of the update goes;
the curve against `flops_full` and steps is the quickstart's within rounding,
against `flops_spent` and seconds it is to the left of it.

Command:  python -m scalerl_jax.main --config=experiments/short_rows.py \
            --workdir=runs/short_rows
Hardware: two CPU cores
Time:     TIME
Reaches:  REACHES
"""

import dataclasses

from experiments import quickstart
from scalerl_jax.config import Config


def get_config() -> Config:
  """The quickstart's config but for the layout of a batch."""
  config = quickstart.get_config()
  batch = dataclasses.replace(config.batch, share_prompts=True, width_buckets=3)
  return dataclasses.replace(config, batch=batch)
