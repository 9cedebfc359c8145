"""The compiled programs of a sampler: one of each kind for each shape."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from scalerl_jax.config import SamplerConfig
from scalerl_jax.models.policy import Policy
from scalerl_jax.models.sharding import named_sharding, replicated
from scalerl_jax.models.static import with_settings
from scalerl_jax.sampling.decode import (
  DecodeSettings,
  decode_chunk,
  insert_groups,
)
from scalerl_jax.sampling.rings import Plan, cut_back, filled_up, repack
from scalerl_jax.sampling.slots import (
  SlotState,
  empty_slots,
  logical_axes,
  without_rings,
)


class Programs:
  """Jitted once for each plan of the rings, whatever the policy version.

  Args:
    settings: what is compiled in.
    mesh: the generator mesh.
  """

  def __init__(self, settings: DecodeSettings, mesh: Mesh):
    self._settings, self._mesh = settings, mesh
    self._made: dict[Any, Any] = {}

  def create(
    self,
    policy: Policy,
    config: SamplerConfig,
    plan: Plan,
    *,
    places: int,
    shards: int,
  ) -> SlotState:
    """Empty slots under a plan of one ring, each on its devices.

    Args:
      policy: for the shape of its cache.
      config: budgets.
      plan: of all slots in one ring.
      places: for prompts.
      shards: equal parts of slots and places.
    """
    ((slots, columns),) = plan

    def make() -> SlotState:
      return empty_slots(
        policy.empty_cache(
          prompts=places,
          slots=slots,
          group_size=self._settings.group_size,
          prompt_tokens=config.max_prompt_tokens,
          completion_tokens=columns,
          shards=shards,
          dtype=config.kv_dtype,
        ),
        completion_tokens=config.max_completion_tokens,
        interrupted=self._settings.interruption is not None,
      )

    shardings = self._shardings(jax.eval_shape(make))
    return jax.jit(make, out_shardings=shardings)()

  def insert(self, state: SlotState) -> Any:
    """Prefills groups; takes and gives the state without its rings."""
    return self._program(
      "insert",
      lambda: jax.jit(
        with_settings(insert_groups, settings=self._settings),
        donate_argnums=2,
        out_shardings=self._shardings(without_rings(state)),
      ),
    )

  def decode(self, state: SlotState, plan: Plan) -> Any:
    """Decodes a chunk under the plan, which the state has."""
    return self._program(
      ("decode", plan),
      lambda: jax.jit(
        with_settings(decode_chunk, settings=self._settings),
        donate_argnums=2,
        out_shardings=(self._shardings(state), replicated(self._mesh)),
      ),
    )

  def repack(
    self,
    state: SlotState,
    held: Plan,
    plan: Plan,
    order: np.ndarray,
    *,
    young: bool = False,
  ) -> SlotState:
    """The state under another plan; see `rings.repack`."""
    moved = bool((order != np.arange(len(order))).any())
    change = with_settings(repack, plan=plan, moved=moved, young=young)
    order = order.astype(np.int32)

    def make() -> Any:
      shape = jax.eval_shape(change, state, order)
      return jax.jit(change, out_shardings=self._shardings(shape))

    key = "repack", held, plan, moved, young
    return self._program(key, make)(state, order)

  def fill_up(self, state: SlotState, held: Plan, full: Plan) -> SlotState:
    """The state in the full shape, as it is saved."""
    return self._reshape(filled_up, state, held, full)

  def cut_back(self, state: SlotState, plan: Plan, full: Plan) -> SlotState:
    """The state of a plan, out of the full shape."""
    return self._reshape(cut_back, state, full, plan)

  def _reshape(
    self, change: Any, state: SlotState, held: Plan, plan: Plan
  ) -> SlotState:
    if held == plan:
      return state

    def make() -> Any:
      shaped = with_settings(change, plan=plan)
      shape = jax.eval_shape(shaped, state)
      return jax.jit(shaped, out_shardings=self._shardings(shape))

    return self._program((change.__name__, held, plan), make)(state)

  def _program(self, key: Any, make: Callable[[], Any]) -> Any:
    if key not in self._made:
      self._made[key] = make()
    return self._made[key]

  def _shardings(self, state: SlotState) -> SlotState:
    return jax.tree.map(
      lambda x, axes: named_sharding(axes, x.shape, self._mesh),
      state,
      logical_axes(state),
    )
