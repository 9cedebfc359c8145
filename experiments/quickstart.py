"""ScaleRL on chain arithmetic, from a flawed base policy, on a laptop."""

from scalerl_jax.config import Config


def get_config() -> Config:
  """ScaleRL's recipe at laptop scale: the defaults of every section."""
  return Config()
