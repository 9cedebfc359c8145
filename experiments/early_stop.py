"""The quickstart, twice as long, that may stop when little is left to gain.

At each evaluation the fit so far says with what probability the rest of the
run gains less than .02; at .95 the run saves its state and ends.

Command:  python -m scalerl_jax.main --config=experiments/early_stop.py \
            --workdir=runs/early_stop
Hardware: two CPU cores
Time:     4 minutes; at most twice the quickstart
Reaches:  stops at step 700 of 800 (run.seed 0) with probability .966, expecting
          +.007; held-out pass rate .144 -> .924
"""

from experiments import quickstart
from scalerl_jax.config import Config, override


def get_config() -> Config:
  """ScaleRL for 800 steps, or until less than .02 is left."""
  return override(
    quickstart.get_config(), {"run.steps": 800, "run.early_stop_gain": 0.02}
  )
