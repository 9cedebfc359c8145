"""A whole run in seconds: what tests of runs share.

A run's time goes into tracing and compiling, so all of them are of one shape
and share one cache of base policies and compiled programs.
"""

import contextlib
import csv
import dataclasses
import json
import os
import signal

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from scalerl_jax.config import (
  BatchConfig,
  CheckpointConfig,
  Config,
  EvaluationConfig,
  ModelConfig,
  OptimizerConfig,
  PipelineConfig,
  RunConfig,
  SamplerConfig,
  SupervisedConfig,
  TaskConfig,
)
from scalerl_jax.learning.train_step import LearnerState
from scalerl_jax.run.checkpoint import Checkpoints
from scalerl_jax.run.workdir import claim_workdir

# Chains modulo 2: a policy of thirty supervised steps is right every other
# time, so that groups are mixed and updates are made.
TINY = Config(
  run=RunConfig(steps=6),
  task=TaskConfig(
    train_prompts=24,
    heldout_prompts=7,
    modulus=2,
    min_operations=2,
    max_operations=3,
  ),
  supervised=SupervisedConfig(
    steps=30,
    batch_size=32,
    learning_rate=2e-2,
    error_alpha=0.2,
    guess_share=0.25,
  ),
  model=ModelConfig(
    width=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_width=8,
    mlp_width=24,
  ),
  sampler=SamplerConfig(
    slots=16, chunk=3, max_prompt_tokens=5, max_completion_tokens=7
  ),
  batch=BatchConfig(prompts=4, group_size=4, micro_batch=8),
  # Large steps, so that a token of a wrong version shows.
  optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=0),
  pipeline=PipelineConfig(max_staleness=2, chunks_per_step=1),
  evaluation=EvaluationConfig(every=2, samples=4),
  checkpoint=CheckpointConfig(every=4),
)


def vary(config, **sections):
  """`vary(TINY, run={"steps": 3})`: the config with some fields changed."""
  return dataclasses.replace(
    config,
    **{
      name: dataclasses.replace(getattr(config, name), **fields)
      for name, fields in sections.items()
    },
  )


def as_file(config, path):
  """A config file that says what `config` does."""
  classes = {type(getattr(config, f.name)) for f in dataclasses.fields(config)}
  names = ", ".join(sorted(c.__name__ for c in {Config, *classes}))
  path.write_text(
    f"from scalerl_jax.config import {names}\n\n\n"
    f"def get_config():\n  return {config!r}\n"
  )
  return path


@contextlib.contextmanager
def shared_cache(tmp_path_factory):
  """`SCALERL_CACHE` for all runs of this process; gives the folder.

  A run turns JAX's compilation cache on; later tests find it as it was.
  """
  folder = tmp_path_factory.getbasetemp() / "cache_of_runs"
  options = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
  )
  before = {name: getattr(jax.config, name) for name in options}
  compilation_cache.reset_cache()
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("SCALERL_CACHE", str(folder))
    yield folder
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


class Signals:
  """A transport that sends its process a signal.

  Args:
    inner: what it is put around.
    number: the signal.
    at: version whose publication sends it; None: the first prefill does.
  """

  def __init__(self, inner, number, at):
    self.inner, self.number, self.at = inner, number, at

  def publish(self, version, params):
    self.inner.publish(version, params)
    if version == self.at:
      os.kill(os.getpid(), self.number)

  def fetch(self):
    return self.inner.fetch()

  def put(self, scored):
    if self.at is None:
      self.at = -1
      os.kill(os.getpid(), self.number)
    self.inner.put(scored)

  def get(self):
    return self.inner.get()


def send(number, at=None):
  """The `wrap_transport` of `Signals`."""
  signal.Signals(number)
  return lambda inner: Signals(inner, number, at)


def metrics(workdir, *, without=("time/",)):
  """The lines of `metrics.jsonl` without the keys that start so."""
  return [
    {
      name: value
      for name, value in json.loads(line).items()
      if not name.startswith(tuple(without))
    }
    for line in (workdir / "metrics.jsonl").read_text().splitlines()
  ]


def curve(workdir, *, without=("device_seconds", "wall_seconds")):
  """The rows of `curve.csv` as text, without these columns."""
  with (workdir / "curve.csv").open() as file:
    return [
      {name: text for name, text in row.items() if name not in without}
      for row in csv.DictReader(file)
    ]


def evaluations(workdir):
  """The arrays of `evaluations.npz`."""
  with np.load(workdir / "evaluations.npz") as arrays:
    return {name: arrays[name].tolist() for name in arrays}


def journal(workdir):
  """The events of `journal.jsonl`."""
  lines = (workdir / "journal.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def saved_workdir(folder, config, params):
  """A workdir as a run leaves it, with these parameters at steps 1, 2, ...

  Made by hand: a run would take its time to compile.
  """
  claim_workdir(folder, config)
  checkpoints = Checkpoints(folder / "checkpoints", keep=len(params))
  for step, held in enumerate(params, 1):
    learner = LearnerState(held, {"moments": np.ones(3)}, np.int32(step))
    run = {"learner": learner, "slots": {"tokens": np.zeros((3, 5))}}
    checkpoints.save(step, {"run": run, "wall_seconds": np.zeros(())})
  checkpoints.close()
