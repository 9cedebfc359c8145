"""A base policy is trained once for each config, and read afterwards."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest

from scalerl_jax.config import ModelConfig
from scalerl_jax.data.tasks import load_task
from scalerl_jax.models.sharding import make_mesh
from scalerl_jax.run import warm_start
from scalerl_jax.run.train import enable_compilation_cache
from scalerl_jax.run.warm_start import base_policy, cache_folder
from tests.runs import TINY, shared_cache


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
  with shared_cache(tmp_path_factory) as folder:
    enable_compilation_cache()
    yield folder


@pytest.fixture(scope="module")
def task():
  return load_task(TINY.task, TINY.supervised, max_prompt_tokens=5)


@pytest.fixture(scope="module")
def mesh():
  return make_mesh(jax.local_devices())  # as a run does


def _base(task, mesh, **changes):
  """Parameters of the base policy, on the host."""
  arguments = {
    "task_config": TINY.task,
    "supervised": TINY.supervised,
    "model": TINY.model,
    "mesh": mesh,
  }
  _, params = base_policy(task, **(arguments | changes))
  return [np.array(x) for x in jax.tree.leaves(params)]


def _folders():
  found = (cache_folder() / "base").glob("*")
  return {path.name: path.stat().st_mtime_ns for path in found}


def _equal(one, other):
  return all((x == y).all() for x, y in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def trained(task, mesh):
  """The base policy, however it was come by: trained, or another test did."""
  return _base(task, mesh)


def test_the_second_time_nothing_is_trained(task, mesh, trained, capsys):
  before = _folders()
  assert len(before) >= 1
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(warm_start, "train_supervised", None)  # not called
    again = _base(task, mesh)
  assert _equal(again, trained)
  assert _folders() == before
  assert capsys.readouterr().out == ""


def test_another_seed_is_another_policy_with_a_folder_of_its_own(
  task, mesh, trained, capsys
):
  before = _folders()
  supervised = dataclasses.replace(TINY.supervised, seed=1)
  other = _base(task, mesh, supervised=supervised)
  assert not _equal(other, trained)
  assert "supervised warm start 30/30" in capsys.readouterr().out
  after = _folders()
  assert len(after) == len(before) + 1
  assert {name: after[name] for name in before} == before
  # Whole folders only, none half-written, named by 12 digits.
  assert all(len(name) == 12 for name in after)


class _Trained(Exception):
  """Somebody would train."""


@pytest.fixture
def would_train(monkeypatch):
  def refuse(*arguments):
    raise _Trained

  monkeypatch.setattr(warm_start, "train_supervised", refuse)


@pytest.mark.parametrize(
  ("section", "field", "value"),
  [
    ("task_config", "seed", 3),
    ("task_config", "max_operations", 4),
    ("supervised", "learning_rate", 3e-2),
    ("supervised", "steps", 31),
    ("supervised", "error_alpha", 0.3),
    ("model", "rope_theta", 5e3),
  ],
)
def test_every_section_is_part_of_the_name(
  task, mesh, trained, would_train, section, field, value
):
  names = {"task_config": "task"}
  held = getattr(TINY, names.get(section, section))
  changed = dataclasses.replace(held, **{field: value})
  before = _folders()
  with pytest.raises(_Trained):
    _base(task, mesh, **{section: changed})
  assert _folders() == before  # and an error leaves nothing behind


def test_devices_are_part_of_the_name(task, mesh, trained, would_train):
  # Sums over other devices round differently.
  with pytest.raises(_Trained):
    _base(task, make_mesh(jax.local_devices()[:4]))


def test_no_steps_are_a_policy_from_its_seed(task, mesh, trained, would_train):
  before = _folders()
  one, two, other = (
    _base(
      task,
      mesh,
      supervised=dataclasses.replace(TINY.supervised, steps=0, seed=seed),
    )
    for seed in (0, 0, 5)
  )
  assert _equal(one, two)
  assert not _equal(one, other)
  assert not _equal(one, trained)
  assert _folders() == before


def test_a_loss_that_is_not_finite_ends_the_warm_start(task, mesh, monkeypatch):
  def diverges(policy, params, config, *others):
    for done in range(1, config.steps + 1):
      yield done, params, np.float32("nan")

  monkeypatch.setattr(warm_start, "train_supervised", diverges)
  before = _folders()
  supervised = dataclasses.replace(TINY.supervised, seed=9)
  with pytest.raises(FloatingPointError) as caught:
    _base(task, mesh, supervised=supervised)
  text = str(caught.value)
  assert "nan at step 30" in text
  assert "lower supervised.learning_rate (0.02)" in text
  assert _folders() == before


def test_the_model_is_the_one_asked_for(task, mesh, would_train):
  graph, params = base_policy(
    task,
    task_config=TINY.task,
    supervised=dataclasses.replace(TINY.supervised, steps=0),
    model=TINY.model,
    mesh=mesh,
  )
  del graph
  wanted = ModelConfig(**dataclasses.asdict(TINY.model))
  vocab = task.tokenizer.vocab_size
  sizes = {n for x in jax.tree.leaves(params) for n in x.shape}
  assert {wanted.width, wanted.mlp_width} <= sizes
  assert max(sizes) >= vocab


@pytest.mark.parametrize(
  ("named", "xdg", "wanted"),
  [
    ("/a/b", "/c", "/a/b"),
    (None, "/c", "/c/scalerl_jax"),
    ("", "/c", "/c/scalerl_jax"),
    (None, None, "~/.cache/scalerl_jax"),
    (None, "", "~/.cache/scalerl_jax"),
  ],
)
def test_the_cache_is_where_the_user_says(monkeypatch, named, xdg, wanted):
  for name, value in (("SCALERL_CACHE", named), ("XDG_CACHE_HOME", xdg)):
    if value is None:
      monkeypatch.delenv(name, raising=False)
    else:
      monkeypatch.setenv(name, value)
  assert cache_folder() == pathlib.Path(wanted).expanduser()
