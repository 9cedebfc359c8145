"""Pytrees on disk with Orbax: a run's whole state, and base policies."""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp


def _flat(tree: Any) -> dict[str, Any]:
  """Leaves by their path, so that a checkpoint can be read by name."""
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  named = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
  return {
    name: leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    for name, leaf in named.items()
  }


def _like(tree: Any, flat: Mapping[str, Any]) -> Any:
  """`flat` in the structure of `tree`."""
  paths = jax.tree_util.tree_flatten_with_path(tree)[0]
  structure = jax.tree.structure(tree)
  names = [jax.tree_util.keystr(path) for path, _ in paths]
  return jax.tree.unflatten(structure, [flat[name] for name in names])


def save_tree(path: pathlib.Path, tree: Any) -> None:
  """Writes a pytree to a new folder; whole or not at all."""
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path.absolute(), _flat(tree))


def load_tree(path: pathlib.Path, like: Any) -> Any:
  """Reads what `save_tree` wrote, into the shardings of `like`."""
  target = jax.tree.map(ocp.utils.to_shape_dtype_struct, _flat(like))
  with ocp.StandardCheckpointer() as checkpointer:
    return _like(like, checkpointer.restore(path.absolute(), target))


class Checkpoints:
  """`workdir/checkpoints`: the newest `keep` states, named by their step."""

  def __init__(self, folder: pathlib.Path, *, keep: int):
    options = ocp.CheckpointManagerOptions(
      max_to_keep=keep, enable_async_checkpointing=False
    )
    self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

  @property
  def latest(self) -> int | None:
    """Step of the newest state, or None."""
    return self._manager.latest_step()

  @property
  def steps(self) -> list[int]:
    """Steps of all states, oldest first."""
    return sorted(self._manager.all_steps())

  def save(self, step: int, state: Any) -> None:
    """Saves a state; one that exists for this step is left as it is."""
    if self.latest != step:
      self._manager.save(step, args=ocp.args.StandardSave(_flat(state)))
      self._manager.wait_until_finished()

  def restore(self, step: int, like: Any) -> Any:
    """The state of a step, in the structure and shardings of `like`."""
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, _flat(like))
    flat = self._manager.restore(step, args=ocp.args.StandardRestore(target))
    return _like(like, flat)

  def restore_part(self, step: int, like: Any) -> Any:
    """As `restore`, of a state of which `like` has some leaves only."""
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, _flat(like))
    # Apart from the manager, which only knows whole states.
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
      flat = reader.restore(
        self._manager.directory / str(step) / "default",
        args=ocp.args.PyTreeRestore(
          item=target,
          restore_args=ocp.checkpoint_utils.construct_restore_args(target),
          partial_restore=True,
        ),
      )
    return _like(like, flat)

  def close(self) -> None:
    """Ends Orbax's threads."""
    self._manager.close()
