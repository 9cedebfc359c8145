"""The learner: state on the trainer mesh, one update in the air at a time."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from scalerl_jax.learning.buckets import Bucket
from scalerl_jax.learning.optimizer import init_sharded
from scalerl_jax.learning.packing import pack, trained_rows
from scalerl_jax.learning.train_step import (
  LearnerState,
  TrainSettings,
  step_buckets,
  train_step,
)
from scalerl_jax.models.sharding import replicated
from scalerl_jax.models.static import with_settings
from scalerl_jax.types import Batch


class Learner:
  """Dispatches updates; the caller asks whether they are done.

  Args:
    params: initial parameters, on the trainer mesh; copied, since the state is
      donated from step to step.
    settings: of the train step.
    mesh: the trainer mesh.
  """

  def __init__(self, params: nnx.State, settings: TrainSettings, mesh: Mesh):
    self.mesh = mesh
    self.settings = settings
    with jax.set_mesh(mesh):
      params = jax.tree.map(jnp.copy, params)
      self.state = LearnerState(
        params=params,
        optimizer=init_sharded(settings.optimizer, params, mesh),
        step=jax.device_put(jnp.zeros((), jnp.int32), replicated(mesh)),
      )
    shardings = jax.tree.map(lambda x: x.sharding, self.state)
    self._step = jax.jit(
      with_settings(train_step, settings=settings),
      donate_argnums=0,
      out_shardings=(shardings, replicated(mesh)),
    )
    # Any: `is_ready` is not in the type of a jax.Array.
    self._metrics: dict[str, Any] | None = None
    self._buckets: tuple[Bucket, ...] = ()  # of the running update

  @property
  def running(self) -> bool:
    """Whether an update was dispatched and not yet collected."""
    return self._metrics is not None

  @property
  def ready(self) -> bool:
    """Whether the running update is done."""
    return self._metrics is None or self._metrics["loss"].is_ready()

  @property
  def metrics_arrays(self) -> dict[str, jax.Array] | None:
    """What the running update will make; to be waited for, not read."""
    return self._metrics

  def start(self, batch: Batch) -> None:
    """Dispatches an update; it runs while the host goes on."""
    with jax.set_mesh(self.mesh):
      placed = self._placed(batch)
      self._buckets = step_buckets(placed, self.settings)
      self.state, self._metrics = self._step(self.state, placed)

  def collect(self) -> dict[str, float]:
    """Waits for the running update and returns its metrics.

    Those of the step and what it computed, padding included: `micro_batches`,
    `computed_tokens`, `computed_logits` (those of them that got logits),
    `computed_keys` (that they were multiplied with), and which share of these
    tokens was padding.
    """
    if self._metrics is None:
      raise ValueError("no update is running; call start first")
    found = {name: np.asarray(value) for name, value in self._metrics.items()}
    self._metrics = None
    counts = found.pop("micro_batches").tolist()
    ran = list(zip(counts, self._buckets, strict=True))
    metrics = {name: float(value) for name, value in found.items()}

    def computed(what: str) -> int:
      return sum(int(n) * getattr(b, what) for n, b in ran)

    tokens, filled = computed("tokens"), metrics.pop("row_tokens")
    # On the host: a float32 would not hold these numbers.
    return metrics | {
      "micro_batches": sum(counts),
      "computed_logits": float(computed("logits")),
      "computed_tokens": float(tokens),
      "computed_keys": float(computed("keys")),
      "padding_share": 1.0 - filled / tokens if tokens else 0.0,
    }

  def compile(self, batch: Batch) -> None:
    """Compiles the step for batches of this shape; runs nothing."""
    with jax.set_mesh(self.mesh):
      self._step.lower(self.state, self._placed(batch)).compile()

  def _placed(self, batch: Batch) -> Batch:
    """The batch on every device of the mesh, packed where that is asked."""
    settings = self.settings
    if settings.packing:
      # On the trainer's device: the generator's would let the host wait.
      with jax.default_device(self.mesh.devices.flat[0]):
        keep = trained_rows(
          jnp.asarray(batch.mask),
          jnp.asarray(batch.correct),
          group_size=settings.group_size,
          drop=settings.loss.zero_variance != "keep",
        )
      batch = pack(batch, np.asarray(keep), settings.packing)
    return jax.device_put(batch, replicated(self.mesh))

  def load_state(self, state: Any) -> None:
    """Back to a saved `LearnerState`."""
    self.state = state
    self._metrics = None
