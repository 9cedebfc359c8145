"""The base policy: a checkpoint, or supervised training, cached by the hash of
its config.
"""

import dataclasses
import os
import pathlib
import shutil

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from scalerl_jax import config as config_lib
from scalerl_jax.config import (
  Config,
  ModelConfig,
  SupervisedConfig,
  TaskConfig,
)
from scalerl_jax.data.tasks import Task
from scalerl_jax.learning.supervised import train_supervised
from scalerl_jax.models import pretrained
from scalerl_jax.models.policy import Policy
from scalerl_jax.run.checkpoint import load_tree, save_tree
from scalerl_jax.run.progress import Progress

# Part of the cache's key: raise it when the warm start itself changes.
RECIPE_VERSION = 1


def cache_folder() -> pathlib.Path:
  """`$SCALERL_CACHE`, or `scalerl_jax` in the user's cache folder.

  Holds base policies and compiled programs; deleting it costs time only.
  """
  named = os.environ.get("SCALERL_CACHE")
  if named:
    return pathlib.Path(named)
  base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  return pathlib.Path(base) / "scalerl_jax"


def resolved(config: Config) -> Config:
  """The config with its checkpoint's architecture; others as they are.

  Raises:
    ValueError: a checkpoint that cannot be read.
  """
  model = pretrained.architecture(config.model)
  return dataclasses.replace(config, model=model)


def check_vocabulary(model: ModelConfig, task: Task) -> None:
  """Refuses a tokenizer with more words than the checkpoint.

  Raises:
    ValueError: the tokenizer has ids that the policy has no rows for.
  """
  if not model.checkpoint:
    return
  rows, words = pretrained.vocabulary(model), task.tokenizer.vocab_size
  if words > rows:
    raise ValueError(
      f"the task's tokenizer must have at most the {rows} words of"
      f" model.checkpoint ({model.checkpoint!r}), got {words}; use the"
      " checkpoint's own tokenizer"
    )


def base_policy(
  task: Task,
  *,
  task_config: TaskConfig,
  supervised: SupervisedConfig,
  model: ModelConfig,
  mesh: Mesh,
) -> tuple[nnx.GraphDef, nnx.State]:
  """The policy that reinforcement learning starts from, on `mesh`.

  Trained once for each (task, supervised, model) and read from the cache
  afterwards. The mesh is part of the key: sums on more devices round
  differently, and a run should not depend on who trained its base. A
  checkpoint is read as it is, its parameters in float32.
  """
  if model.checkpoint:
    check_vocabulary(model, task)
    policy = pretrained.load(model.checkpoint, dtype="float32", mesh=mesh)
    policy.config = pretrained.architecture(model)
    return nnx.split(policy)
  policy = Policy(
    model,
    vocab_size=task.tokenizer.vocab_size,
    rngs=nnx.Rngs(supervised.seed),
    mesh=mesh,
  )
  graph, params = nnx.split(policy)
  if not supervised.steps:
    return graph, params
  key = config_lib.fingerprint(
    task_config,
    supervised,
    model,
    [RECIPE_VERSION, jax.__version__, mesh.size, mesh.devices.flat[0].platform],
    task.fingerprint(),  # also of a file's content
  )
  folder = cache_folder() / "base" / key
  if folder.exists():
    return graph, load_tree(folder, params)
  with Progress(supervised.steps, "supervised warm start") as progress:
    for done, trained, loss in train_supervised(
      graph, params, supervised, task.supervised(), mesh
    ):
      if done % 50 == 0 or done == supervised.steps:
        nats = float(np.asarray(loss))
        if not np.isfinite(nats):
          raise FloatingPointError(
            f"the supervised loss is {nats} at step {done}; lower"
            f" supervised.learning_rate ({supervised.learning_rate})"
          )
        progress.update(done, {"loss": f"{nats:.3f} nats"})
      params = trained
  folder.parent.mkdir(parents=True, exist_ok=True)
  partial = folder.with_name(f"{key}.{os.getpid()}")
  shutil.rmtree(partial, ignore_errors=True)
  save_tree(partial, params)
  try:
    partial.rename(folder)
  except OSError:  # another run was quicker; its policy is the same
    shutil.rmtree(partial)
  return graph, params
