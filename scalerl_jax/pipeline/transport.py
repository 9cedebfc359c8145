"""How weights and rollouts cross between the sides; in one process here.

Weights go learner -> sampler as whole versions: staged when published, in use
when fetched. Rollouts go sampler -> learner as scored groups, oldest first.
"""

import collections
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx

from scalerl_jax.pipeline.store import Scored


@runtime_checkable
class Transport(Protocol):
  """What the loop needs of a transport, whatever carries it."""

  def publish(self, version: int, params: nnx.State) -> Any:
    """Stages a whole version; never an array that a later step donates.

    Returns:
      Arrays that are ready when it has arrived, or None: only timed.
    """
    ...

  def fetch(self) -> tuple[int, nnx.State]:
    """The newest staged version, from now on the one in use."""
    ...

  def put(self, scored: Scored) -> None:
    """Hands a scored group to the learner's side."""
    ...

  def get(self) -> Scored | None:
    """The oldest group that was put and not yet got, or None."""
    ...


class InProcess:
  """Both sides in one process: weights by `device_put` onto another mesh.

  Args:
    shardings: of the parameters on the generator mesh, a pytree.
    dtypes: in which they are held there, a pytree; the trainer's by default.
  """

  def __init__(self, shardings: Any, dtypes: Any = None):
    self._shardings, self._dtypes = shardings, dtypes
    self._staged: tuple[int, nnx.State] | None = None
    self._groups: collections.deque[Scored] = collections.deque()

  def publish(self, version: int, params: nnx.State) -> nnx.State:
    # Copied first: to an equal sharding `device_put` returns the same array,
    # and the next train step would donate what the sampler reads. In the
    # sampler's dtype already, so that no more bytes cross than it reads.
    if self._dtypes is None:
      copied = jax.tree.map(jnp.copy, params)
    else:
      copied = jax.tree.map(
        lambda x, dtype: jnp.array(x, dtype), params, self._dtypes
      )
    staged = jax.device_put(copied, self._shardings)
    self._staged = version, staged
    return staged

  def fetch(self) -> tuple[int, nnx.State]:
    if self._staged is None:
      raise ValueError(
        "no weights were published; publish version 0 before the first token"
      )
    return self._staged

  def put(self, scored: Scored) -> None:
    self._groups.append(scored)

  def get(self) -> Scored | None:
    return self._groups.popleft() if self._groups else None
