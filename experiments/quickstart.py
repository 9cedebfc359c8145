"""ScaleRL on chain arithmetic, from a flawed base policy, on a laptop.

The paper's recipe at laptop scale (the defaults of every section of the
config): PipelineRL-8, CISPO, FP32 head, prompt average, batch-level advantages,
zero-variance prompts dropped, 48 prompts x 16 completions a step, 400 steps.
The policy has 0.10 M parameters; its base is trained on a teacher whose
arithmetic is wrong in places, and the reward shows it which.

Command:  make quickstart, or
          python -m scalerl_jax.main --config=experiments/quickstart.py \
            --workdir=runs/quickstart
Hardware: two CPU cores
"""

from scalerl_jax.config import Config


def get_config() -> Config:
  """ScaleRL's recipe at laptop scale: the defaults of every section."""
  return Config()
