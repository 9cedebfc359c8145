"""Pytrees on disk: whole, exact, where they were, the newest few."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from scalerl_jax.models.sharding import make_mesh
from scalerl_jax.run.checkpoint import Checkpoints, load_tree, save_tree
from tests.helpers import small_policy


class Pair(NamedTuple):
  left: Any
  right: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
  values: Any
  inner: Any


def _state(seed=0):
  """What a RunState is made of, with bits that arithmetic would change."""
  rng = np.random.default_rng(seed)
  odd = np.array([np.nan, -0.0, np.inf, 1e-45, 3.4e38], np.float32)
  return Record(
    values={
      "jax": jnp.asarray(rng.standard_normal((3, 5)), jnp.float32),
      "bfloat16": jnp.asarray(rng.standard_normal((7,)), jnp.bfloat16),
      "bool": jnp.asarray(rng.random((3,)) < 0.5),
      "odd/name with spaces": jnp.asarray(odd),
      "scalar": jnp.asarray(5, jnp.int32),
    },
    inner=Pair(
      left=[np.arange(7, dtype=np.int64) << 40, np.float64(1 / 3)],
      right=(
        Pair(rng.integers(0, 9, (3, 2)), rng.random((2, 3)) < 0.5),
        optax.EmptyState(),
        2**40 + seed,  # a plain number is an array when it comes back
      ),
    ),
  )


def _blank(tree):
  """The same structure with other contents."""
  return jax.tree.map(
    lambda x: (
      jnp.zeros_like(x) if isinstance(x, jax.Array) else np.zeros_like(x)
    ),
    tree,
  )


def _assert_same(found, wanted):
  assert jax.tree.structure(found) == jax.tree.structure(wanted)
  for one, other in zip(
    jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True
  ):
    assert isinstance(one, jax.Array) == isinstance(other, jax.Array)
    one, other = np.asarray(one), np.asarray(other)
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert one.tobytes() == other.tobytes()


def test_a_tree_comes_back_bit_for_bit(tmp_path):
  save_tree(tmp_path / "tree", _state())
  _assert_same(load_tree(tmp_path / "tree", _blank(_state())), _state())


def test_a_state_comes_back_bit_for_bit(tmp_path):
  checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
  checkpoints.save(3, _state())
  _assert_same(checkpoints.restore(3, _blank(_state())), _state())
  checkpoints.close()


def test_parameters_and_optimiser_come_back_into_their_classes(tmp_path):
  params = nnx.split(small_policy())[1]
  state = {"params": params, "optimizer": optax.adamw(1e-3).init(params)}
  save_tree(tmp_path / "tree", state)
  _assert_same(load_tree(tmp_path / "tree", _blank(state)), state)


def test_an_interrupted_save_is_no_tree(tmp_path):
  # Whole or not at all: nothing is written beside or over a tree that exists.
  save_tree(tmp_path / "tree", _state())
  with pytest.raises(ValueError, match="exist"):
    save_tree(tmp_path / "tree", _state(1))
  _assert_same(load_tree(tmp_path / "tree", _blank(_state())), _state())
  assert [path.name for path in tmp_path.iterdir()] == ["tree"]


@pytest.mark.parametrize("keep", [1, 3])
def test_the_newest_few_are_kept(tmp_path, keep):
  checkpoints = Checkpoints(tmp_path / "checkpoints", keep=keep)
  assert checkpoints.latest is None
  steps = [0, 4, 5, 11, 100]
  for step in steps:
    checkpoints.save(step, {"step": np.asarray(step)})
    assert checkpoints.latest == step
  checkpoints.close()
  again = Checkpoints(tmp_path / "checkpoints", keep=keep)
  assert again.latest == 100
  for step in steps[-keep:]:
    found = again.restore(step, {"step": np.asarray(0)})
    assert found["step"] == step
  again.close()
  folders = {path.name for path in (tmp_path / "checkpoints").iterdir()}
  assert folders == {str(step) for step in steps[-keep:]}


def test_a_saved_step_stays_as_it_is(tmp_path):
  # A clean stop at a step that its cadence has saved already.
  checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
  checkpoints.save(4, {"x": np.asarray(1)})
  checkpoints.save(4, {"x": np.asarray(2)})
  assert checkpoints.restore(4, {"x": np.asarray(0)})["x"] == 1
  checkpoints.close()


def test_what_changes_after_a_save_is_not_in_it(tmp_path):
  checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
  host = np.arange(3)
  checkpoints.save(1, {"host": host})
  host += 1
  found = checkpoints.restore(1, {"host": np.zeros_like(host)})
  np.testing.assert_array_equal(found["host"], [0, 1, 2])
  checkpoints.close()


def _placed(values, mesh, *axes):
  return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*axes)))


@pytest.mark.parametrize("manager", [False, True])
def test_arrays_come_back_where_they_are_wanted(tmp_path, manager):
  devices = jax.local_devices()
  saved_on = make_mesh(devices[:2], fsdp=2)
  wanted_on = make_mesh(devices[4:8], fsdp=2, tensor=2)
  values = np.arange(24, dtype=np.float32).reshape(4, 6)
  state = {"x": _placed(values, saved_on, "fsdp"), "host": np.arange(5)}
  like = {
    "x": _placed(np.zeros_like(values), wanted_on, ("data", "fsdp"), "tensor"),
    "host": np.zeros(5, int),
  }
  if manager:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    checkpoints.save(0, state)
    found = checkpoints.restore(0, like)
    checkpoints.close()
  else:
    save_tree(tmp_path / "tree", state)
    found = load_tree(tmp_path / "tree", like)
  assert found["x"].sharding == like["x"].sharding
  np.testing.assert_array_equal(found["x"], values)
  assert isinstance(found["host"], np.ndarray)
  np.testing.assert_array_equal(found["host"], np.arange(5))


def test_a_state_of_another_shape_is_refused(tmp_path):
  save_tree(tmp_path / "tree", {"x": jnp.zeros((3, 5))})
  for like in ({"x": jnp.zeros((5, 3))}, {"y": jnp.zeros((3, 5))}):
    with pytest.raises((ValueError, KeyError)):
      load_tree(tmp_path / "tree", like)


def test_a_part_of_a_state_is_read_alone(tmp_path):
  whole = {"some": jnp.arange(3.0), "rest": {"large": jnp.ones((5, 7))}}
  made = Checkpoints(tmp_path / "checkpoints", keep=3)
  for step in (2, 5):
    made.save(step, jax.tree.map(lambda x, step=step: step * x, whole))
  assert made.steps == [2, 5]
  found = made.restore_part(2, {"some": jnp.zeros(3)})
  made.close()
  assert set(found) == {"some"}
  np.testing.assert_array_equal(found["some"], [0.0, 2.0, 4.0])
