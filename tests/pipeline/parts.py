"""Pipelines of tiny real parts; what is compiled is made once a process.

Sampler and learner keep their programs and are set back to their first state
for each new pipeline; all else of a pipeline is new.
"""

import copy
import dataclasses
import functools
import threading
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from scalerl_jax.config import (
  LossConfig,
  OptimizerConfig,
  SamplerConfig,
  SupervisedConfig,
  TaskConfig,
)
from scalerl_jax.data.curriculum import PromptStream
from scalerl_jax.data.tasks import load_task
from scalerl_jax.learning.learner import Learner
from scalerl_jax.learning.optimizer import make_optimizer
from scalerl_jax.learning.train_step import TrainSettings
from scalerl_jax.models.sharding import make_mesh, shardings_on
from scalerl_jax.pipeline.loop import Pipeline
from scalerl_jax.pipeline.schedule import StalenessLedger
from scalerl_jax.pipeline.transport import InProcess
from scalerl_jax.sampling.sampler import Sampler, warp_settings
from tests.helpers import SHAPE, small_policy

P, G, TP, TC = 2, 3, 5, 8
# Two groups fit at once, and half of the budget is written in a chunk: at
# most step boundaries something is half-written.
SAMPLER = SamplerConfig(
  slots=2 * G, chunk=2, max_prompt_tokens=TP, max_completion_tokens=TC
)
ONE_LAYER = dataclasses.replace(SHAPE, num_layers=1)
SECONDS = 60.0  # after which a run counts as hung


def even(answer, completion, *, ended):
  """A verdict that hangs on all that a verifier is told, and that a policy
  without any training gets in about half of the cases."""
  return (sum(map(ord, answer + completion)) + ended) % 2 == 0


@functools.cache
def tiny_task(verifier=even):
  """Chains of at most three operations: 7 prompts, 18 words."""
  task = load_task(
    TaskConfig(
      modulus=3,
      min_operations=1,
      max_operations=3,
      train_prompts=7,
      heldout_prompts=2,
    ),
    SupervisedConfig(),
    max_prompt_tokens=TP,
  )
  return dataclasses.replace(task, verifier=verifier)


def end_ids():
  """End tokens, a digit among them: from one token to the whole budget."""
  tokenizer = tiny_task().tokenizer
  return (*tokenizer.eos_ids, int(tokenizer.encode("0")[0]))


def policy(mesh):
  """(graph, parameters) on a mesh."""
  size = tiny_task().tokenizer.vocab_size
  return nnx.split(small_policy(ONE_LAYER, vocab_size=size, mesh=mesh))


class Learning(NamedTuple):
  """The trainer's side."""

  learner: Learner
  new: object  # its state when it was new, on the host


@functools.cache
def learning(device):
  """A learner on the device of this number."""
  mesh = make_mesh([jax.devices()[device]])
  graph, params = policy(mesh)
  learner = Learner(
    params,
    TrainSettings(
      policy=graph,
      # Every step moves the weights visibly.
      optimizer=make_optimizer(
        OptimizerConfig(learning_rate=1e-2, warmup_steps=0)
      ),
      loss=LossConfig(),
      warp=tuple(sorted(warp_settings(SAMPLER).items())),
      group_size=G,
      micro_batch=G,
      max_completion_tokens=TC,
    ),
    mesh,
  )
  return Learning(learner, on_host(learner.state))


class Sampling(NamedTuple):
  """The generator's side; one for all trainers."""

  sampler: Sampler
  new: object  # its state when it was new, on the host
  shardings: object  # of the parameters on the generator mesh


@functools.cache
def sampling():
  """The sampler on the first device."""
  mesh = make_mesh(jax.devices()[:1])
  graph, params = policy(mesh)
  sampler = Sampler(
    graph,
    params,
    SAMPLER,
    group_size=G,
    eos_ids=end_ids(),
    seed=11,
    mesh=mesh,
  )
  return Sampling(
    sampler, on_host(sampler.state_dict()), shardings_on(mesh, params)
  )


class Recorder(InProcess):
  """The transport, remembering what crosses it."""

  def __init__(self, shardings):
    super().__init__(shardings)
    self.calls = []  # ("publish" or "fetch", version)
    self.published = {}  # version -> parameters on the generator
    self.host = {}  # version -> the same, when they were published
    self.scored = []

  def publish(self, version, params):
    super().publish(version, params)
    self.calls.append(("publish", version))
    self.published[version] = super().fetch()[1]
    self.host[version] = on_host(params)

  def fetch(self):
    version, params = super().fetch()
    self.calls.append(("fetch", version))
    return version, params

  def put(self, scored):
    self.scored.append(copy.deepcopy(scored))
    super().put(scored)


def on_host(tree):
  """Copies of all leaves as numpy arrays."""
  return jax.tree.map(np.array, tree)


def like(host, tree):
  """Host arrays put where the leaves of `tree` are."""

  def put(x, old):
    old_is_on_device = isinstance(old, jax.Array)
    return jax.device_put(x, old.sharding) if old_is_on_device else np.array(x)

  return jax.tree.map(put, host, tree)


def make_pipeline(
  *,
  k=2,
  steps=5,
  schedule="logical",
  chunks_per_step=2,
  task=None,
  journal=None,
  trainer=1,
  refill_limit=0,
  timeline=None,
):
  """A new pipeline over parts that are as new; `trainer`: its device."""
  learner, learner_new = learning(trainer)
  sampler, sampler_new, shardings = sampling()
  learner.load_state(like(learner_new, learner.state))
  sampler.load_state_dict(like(sampler_new, sampler.state_dict()))
  task = task or tiny_task()
  return Pipeline(
    task=task,
    stream=PromptStream(task.train, seed=3),
    sampler=sampler,
    learner=learner,
    transport=Recorder(shardings),
    ledger=StalenessLedger(P, k, steps * P),
    schedule=schedule,
    chunks_per_step=chunks_per_step,
    journal=journal,
    refill_limit=refill_limit,
    timeline=timeline,
  )


def counts(totals):
  """All counters but the one that looks at the wall."""
  found = dataclasses.asdict(totals)
  del found["train_seconds"]
  return found


class Recording:
  """What a run said, step by step; hand it to `run` as `on_step`."""

  def __init__(self):
    self.steps, self.metrics, self.totals, self.batches = [], [], [], []

  def __call__(self, event):
    self.steps.append(event.step)
    self.metrics.append(copy.deepcopy(event.metrics))
    self.totals.append(counts(event.totals))
    self.batches.append(copy.deepcopy(list(event.examples)))


def finish(pipeline, on_step=None, **hooks):
  """Runs to the end or to the first error, which is raised here.

  In a thread of its own, so that a run that hangs is a test that fails.
  """
  recording = on_step or Recording()
  errors = []

  def work():
    try:
      pipeline.run(recording, **hooks)
    except BaseException as error:
      errors.append(error)

  thread = threading.Thread(target=work, daemon=True)
  thread.start()
  thread.join(SECONDS)
  if thread.is_alive():
    raise AssertionError(f"the run did not end within {SECONDS} seconds")
  if errors:
    raise errors[0]
  return recording


def same(left, right):
  """Equal, bit for bit."""
  jax.tree.map(np.testing.assert_array_equal, left, right)
