"""Metrics to Weights & Biases as well, where `run.wandb_project` names one."""

import importlib.util
import pathlib
from collections.abc import Mapping
from typing import Any

from scalerl_jax import config as config_lib
from scalerl_jax.config import Config


def check_wandb(config: Config) -> None:
  """Refuses `run.wandb_project` where its client is not installed.

  Raises:
    ValueError: the client is missing.
  """
  if config.run.wandb_project and importlib.util.find_spec("wandb") is None:
    raise ValueError(
      f"run.wandb_project ({config.run.wandb_project!r}) needs the package"
      " wandb, which is not installed; pip install 'scalerl-jax[wandb]' or"
      " leave it empty"
    )


class WandbMirror:
  """One W&B run for each workdir; a resumed run goes on in it.

  Args:
    config: the run's; shown beside its metrics.
    workdir: names the run, and holds what the client writes.
  """

  def __init__(self, config: Config, workdir: pathlib.Path):
    # Here, so that nobody else needs it.
    import wandb  # pyright: ignore[reportMissingImports]

    self._run: Any = wandb.init(
      project=config.run.wandb_project,
      name=workdir.name,
      id=config_lib.fingerprint([str(workdir.absolute())]),
      resume="allow",
      dir=str(workdir),
      config=config_lib.to_dict(config),
    )

  def log(self, step: int, values: Mapping[str, float]) -> None:
    """The numbers of a step; a later call may add to the same step."""
    self._run.log(dict(values), step=step)

  def close(self) -> None:
    """Sends what is left."""
    self._run.finish()


def make_mirror(config: Config, workdir: pathlib.Path) -> WandbMirror | None:
  """The mirror that the config asks for, if it asks for one."""
  if not config.run.wandb_project:
    return None
  return WandbMirror(config, workdir)
