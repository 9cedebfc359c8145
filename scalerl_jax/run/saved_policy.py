"""A policy that a run has saved, outside of the run: loaded, exported."""

import dataclasses
import pathlib
import shutil
from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from scalerl_jax.config import Config
from scalerl_jax.data.task import Task
from scalerl_jax.data.tasks import load_task
from scalerl_jax.learning.train_step import LearnerState
from scalerl_jax.models import pretrained
from scalerl_jax.models.policy import Policy
from scalerl_jax.run.checkpoint import Checkpoints
from scalerl_jax.run.meshes import make_meshes
from scalerl_jax.run.warm_start import resolved
from scalerl_jax.run.workdir import check_sections

LAST = "last"


def stored_task(config: Config, workdir: pathlib.Path) -> Task:
  """The run's task, with the tokenizer that its workdir holds, if it does."""
  stored = workdir / "tokenizer.model"
  return load_task(
    config.task,
    config.supervised,
    stored if stored.exists() else None,
    max_prompt_tokens=config.sampler.max_prompt_tokens,
    checkpoint=config.model.checkpoint,
  )


def find_step(name: str, steps: Sequence[int], workdir: pathlib.Path) -> int:
  """The saved step that `name` says: a number, or "last".

  Raises:
    ValueError: no such step; those that there are, are listed.
  """
  if name == LAST and steps:
    return steps[-1]
  if name.isdecimal() and int(name) in steps:
    return int(name)
  there = ", ".join(map(str, steps)) or "none"
  raise ValueError(
    f"a step of {str(workdir)!r} must be one that is saved ({there}) or"
    f" {LAST!r}, got {name!r}; a run keeps its newest checkpoint.keep"
  )


def load_step(
  config: Config, workdir: pathlib.Path, name: str, task: Task, mesh: Mesh
) -> tuple[Policy, int]:
  """The policy of a saved step, on a mesh.

  Only its parameters are read, not the optimiser, the slots or their KV.

  Args:
    config: as the run's in the model's section.
    workdir: of the run.
    name: a step, or "last".
    task: whose tokenizer says the vocabulary; a checkpoint says its own.
    mesh: with the tensor axis of the run's.

  Returns:
    The policy and its step.

  Raises:
    ValueError: no run's workdir, another model, or no such step.
  """
  check_sections(workdir, config, ("model",))
  asked, model = config.model, resolved(config).model
  words = task.tokenizer.vocab_size
  rows = words
  if asked.checkpoint:
    words = pretrained.vocabulary(asked)
    tensor = mesh.shape["tensor"]
    rows = -(-words // tensor) * tensor  # as `pretrained.load` fills it up
  folder = workdir / "checkpoints"
  if not folder.is_dir():
    find_step(name, (), workdir)
  checkpoints = Checkpoints(folder, keep=config.checkpoint.keep)
  try:
    step = find_step(name, checkpoints.steps, workdir)
    policy = Policy(model, vocab_size=rows, mesh=mesh)
    policy.vocab_size = words
    graph, params = nnx.split(policy)
    # The names of `RunState`, with nothing but the parameters in it.
    like = {"run": {"learner": LearnerState(params, (), None)}}
    state = checkpoints.restore_part(step, like)
  finally:
    checkpoints.close()
  return nnx.merge(graph, state["run"]["learner"].params), step


def load_policy(
  config: Config, workdir: pathlib.Path, name: str, task: Task, mesh: Mesh
) -> tuple[Policy, str]:
  """The policy of a saved step or of a checkpoint's folder, and its label.

  Raises:
    ValueError: as `load_step`, or as `pretrained.load`.
  """
  if name == LAST or name.isdecimal():
    policy, step = load_step(config, workdir, name, task, mesh)
    return policy, f"step_{step}"
  policy = pretrained.load(name, dtype=jnp.float32, mesh=mesh)
  policy.config = dataclasses.replace(policy.config, dtype=config.model.dtype)
  return policy, pathlib.Path(name).name


def export_step(
  config: Config, workdir: pathlib.Path, name: str, folder: pathlib.Path
) -> str:
  """Writes a saved step as a folder that transformers loads.

  Weights in float32, with the tokenizer's files beside them.

  Args:
    config: the run's.
    workdir: of the run.
    name: a step, or "last".
    folder: new, or empty.

  Returns:
    A sentence that says what was written.

  Raises:
    ValueError: as `load_step`, a folder that holds files, or a policy that no
      published family is like.
  """
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    raise ValueError(
      f"--export must name a new or empty folder, got {str(folder)!r}"
    )
  check_sections(workdir, config, ("model", "task"))
  task = stored_task(config, workdir)
  mesh = make_meshes(resolved(config)).trainer
  policy, step = load_step(config, workdir, name, task, mesh)
  pretrained.save(policy, folder)
  tokenizer = workdir / "tokenizer"
  if tokenizer.is_dir():
    for path in tokenizer.iterdir():
      if not (folder / path.name).exists():  # the config is the policy's own
        shutil.copyfile(path, folder / path.name)
  else:
    task.tokenizer.store(folder)
  return f"step {step} of {workdir} is in {folder}"
