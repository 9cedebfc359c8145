"""Small checks that hold also where shape annotations are not enforced."""

from collections.abc import Sequence
from typing import Any

import jax.core
import jax.numpy as jnp


def check_shape(name: str, x: Any, shape: Sequence[int | None]) -> None:
  """Refuses an array of another shape; `None` fits any length.

  Raises:
    ValueError: with the expected shape and the one received.

  >>> check_shape("mask", jnp.ones((2, 3)), (2, None))
  """
  got = jnp.shape(x)
  fits = len(got) == len(shape) and all(
    want is None or want == have for want, have in zip(shape, got, strict=True)
  )
  if not fits:
    want = "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]"
    raise ValueError(f"{name} must have shape {want}, got {list(got)}")


def check_groups(name: str, x: Any, group_size: int) -> int:
  """Number of groups along the leading axis, P = B / G.

  Raises:
    ValueError: `group_size` is below 1 or does not divide the leading axis.

  >>> check_groups("rewards", jnp.ones(6), 3)
  2
  """
  rows = jnp.shape(x)[0]
  if group_size < 1 or rows % group_size:
    raise ValueError(
      f"group_size must be 1 or more and divide the {rows} rows of {name},"
      f" got {group_size}"
    )
  return rows // group_size


def is_concrete(x: Any) -> bool:
  """Whether values can be looked at: not while JAX is tracing.

  >>> is_concrete(jnp.ones(3))
  True
  """
  return not isinstance(x, jax.core.Tracer)
