"""A base policy is trained once for each config, and read afterwards."""

import dataclasses
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from scalerl_jax.config import ModelConfig
from scalerl_jax.data.tasks import load_task
from scalerl_jax.models import pretrained
from scalerl_jax.models.policy import Policy
from scalerl_jax.models.sharding import make_mesh
from scalerl_jax.run import warm_start
from scalerl_jax.run.train import Run, enable_compilation_cache
from scalerl_jax.run.warm_start import base_policy, cache_folder
from tests.fixtures.byte_tokenizer import save_byte_tokenizer
from tests.models.parts import CHECKPOINTS
from tests.runs import TINY, metrics, shared_cache, vary


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


CHECKPOINT = CHECKPOINTS / "llama_tied"
FROM_CHECKPOINT = dataclasses.replace(
  vary(TINY, supervised={"steps": 0}),
  model=ModelConfig(checkpoint=str(CHECKPOINT)),
)


def test_a_checkpoint_is_the_base_policy(task, would_train):
  config = FROM_CHECKPOINT
  model = dataclasses.replace(config.model, dtype="bfloat16", remat="block")
  mesh = make_mesh(jax.devices()[:2], fsdp=2)
  before = _folders()
  graph, params = base_policy(
    task,
    task_config=config.task,
    supervised=config.supervised,
    model=model,
    mesh=mesh,
  )
  assert _folders() == before
  # Parameters are trained in float32, whatever the body is computed in.
  table = params["embedding"][...]
  published = load_file(CHECKPOINT / "model.safetensors")
  np.testing.assert_array_equal(table, published["model.embed_tokens.weight"])
  assert table.sharding.mesh == mesh
  policy = nnx.merge(graph, params)
  assert (policy.config.dtype, policy.config.remat) == ("bfloat16", "block")
  assert policy.config.num_heads == 3
  assert policy.vocab_size == 97 > task.tokenizer.vocab_size


WORDS = 259  # of the byte tokenizer


@pytest.fixture(scope="module")
def published(tmp_path_factory):
  """A config that starts from a checkpoint with a tokenizer of its own."""
  folder = tmp_path_factory.mktemp("published")
  checkpoint = save_byte_tokenizer(folder / "checkpoint")
  model = ModelConfig(
    width=24,
    num_layers=1,
    num_heads=3,
    num_kv_heads=3,
    head_width=8,
    mlp_width=80,
  )
  policy = Policy(model, vocab_size=WORDS + 1, rngs=nnx.Rngs(0))
  pretrained.save(policy, checkpoint)
  lines = folder / "lines.jsonl"
  rows = [{"prompt": f"say {n}", "answer": str(n)} for n in range(31)]
  lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return dataclasses.replace(
    vary(
      TINY,
      supervised={"steps": 0},
      task={"name": "jsonl", "path": str(lines)},
      sampler={"max_prompt_tokens": 8},
    ),
    model=ModelConfig(checkpoint=str(checkpoint)),
  )


def test_a_run_knows_the_architecture_of_its_checkpoint(published, tmp_path):
  run = Run(published, tmp_path)
  assert (run.config.model.num_heads, run.config.model.mlp_width) == (3, 80)
  assert run.task.tokenizer.vocab_size == WORDS + 1  # a row more
  held = json.loads((tmp_path / "config.json").read_text())["config"]
  assert held["model"]["checkpoint"] == published.model.checkpoint
  assert held["model"]["num_heads"] == ModelConfig().num_heads
  Run(published, tmp_path)  # the same workdir again
  changes = {"generator_devices": 2, "tensor": 2}
  with pytest.raises(ValueError, match="must divide the 3 query heads"):
    Run(vary(published, pipeline=changes), tmp_path / "other")


def test_a_tokenizer_with_more_words_than_the_checkpoint_is_refused(
  published, tmp_path
):
  small = tmp_path / "small"
  shutil.copytree(published.model.checkpoint, small)
  held = pretrained.load(small, dtype="float32")
  pretrained.save(
    Policy(held.config, vocab_size=WORDS - 1, rngs=nnx.Rngs(0)), small
  )
  config = vary(published, model={"checkpoint": str(small)})
  with pytest.raises(ValueError, match=r"258.* got 259"):
    Run(config, tmp_path / "run")
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_checkpoint_is_trained(published, tmp_path):
  config = vary(published, run={"steps": 2})
  summary = Run(config, tmp_path).train()
  assert summary.lines()
  assert len(metrics(tmp_path)) == 2
