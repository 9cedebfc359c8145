"""A saved step is the run's policy, to the bit, here and for others."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scalerl_jax.models import pretrained
from scalerl_jax.models.sharding import make_mesh
from scalerl_jax.run import saved_policy
from tests.helpers import moved, small_policy
from tests.runs import TINY, saved_workdir, vary

TOKENS = jnp.array([[3, 1, 4, 1, 5]], jnp.int32)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """Workdir, task and parameters of a run with two saved steps."""
  folder = tmp_path_factory.mktemp("saved") / "run"
  task = saved_policy.stored_task(TINY, folder)
  policy = small_policy(TINY.model, vocab_size=task.tokenizer.vocab_size)
  first = nnx.state(policy)
  params = [first, moved(first, 0.3, seed=5)]
  saved_workdir(folder, TINY, params)
  task.tokenizer.store(folder)
  return types.SimpleNamespace(workdir=folder, task=task, params=params)


def _load(run, name, config=TINY):
  return saved_policy.load_policy(
    config, run.workdir, name, run.task, make_mesh()
  )


@pytest.mark.parametrize(("name", "step"), [("last", 2), ("2", 2), ("1", 1)])
def test_a_step_is_what_the_learner_held(run, name, step):
  policy, label = _load(run, name)
  assert label == f"step_{step}"
  jax.tree.map(
    np.testing.assert_array_equal,
    nnx.to_pure_dict(nnx.state(policy)),
    nnx.to_pure_dict(run.params[step - 1]),
  )


@pytest.mark.parametrize("name", ["7", "07"])
def test_a_step_that_was_not_saved_is_refused_with_those_that_were(run, name):
  with pytest.raises(ValueError, match=rf"saved \(1, 2\).* got '{name}'"):
    _load(run, name)


def test_another_model_is_refused(run):
  wider = vary(TINY, model={"mlp_width": 40})
  with pytest.raises(ValueError, match=r"differs in model\.mlp_width"):
    _load(run, "last", wider)


def test_an_exported_step_is_a_checkpoint_with_its_tokenizer(run, tmp_path):
  folder = tmp_path / "out"
  told = saved_policy.export_step(TINY, run.workdir, "last", folder)
  assert told.startswith("step 2 of ")
  assert (folder / "tokenizer.model").is_file()
  loaded = pretrained.load(folder, dtype="float32")
  held, _ = _load(run, "last")
  np.testing.assert_array_equal(loaded(TOKENS), held(TOKENS))
  again, label = _load(run, str(folder))
  assert label == "out"
  np.testing.assert_array_equal(again(TOKENS), held(TOKENS))
  with pytest.raises(ValueError, match="a new or empty folder"):
    saved_policy.export_step(TINY, run.workdir, "last", folder)


def test_the_body_of_a_checkpoint_is_computed_as_the_config_says(run, tmp_path):
  saved_policy.export_step(TINY, run.workdir, "1", tmp_path / "out")
  half = vary(TINY, model={"dtype": "bfloat16"})
  policy, _ = _load(run, str(tmp_path / "out"), half)
  assert policy.dtype == "bfloat16"
  assert dataclasses.replace(policy.config, dtype="float32") == (
    pretrained.load(tmp_path / "out", dtype="float32").config
  )
