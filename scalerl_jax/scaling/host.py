"""Where fits run: one device of the host's CPU, in float64."""

import functools

import jax
import numpy as np


@functools.cache
def host_mesh() -> jax.sharding.Mesh:
  """One device of the CPU, where there is one: others may lack float64.

  A mesh, because a caller's own mesh would put the fit on all its devices.
  """
  try:
    device = jax.local_devices(backend="cpu")[0]
  except RuntimeError:  # The process was told to use an accelerator alone.
    device = jax.local_devices()[0]
  return jax.sharding.Mesh(np.array([device]), ("host",))
