"""What tests of the sampler share: its state on the host, and back again."""

import jax
import numpy as np


def saved(sampler):
  """What a sampler is, on the host."""
  return jax.tree.map(np.array, sampler.state_dict())


def restore(sampler, state):
  """Makes a sampler what it was when `state` was saved."""
  slots = jax.tree.map(
    lambda x, like: jax.device_put(x, like.sharding),
    state["slots"],
    sampler.state_dict()["slots"],
  )
  sampler.load_state_dict({**state, "slots": slots})
