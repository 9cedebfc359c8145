"""What is compiled into a program besides shapes."""

import functools
from collections.abc import Callable, Hashable
from typing import Any


@functools.lru_cache(maxsize=64)
def with_settings(
  function: Callable[..., Any], **settings: Hashable
) -> Callable[..., Any]:
  """The function with its settings given; the same object for equal ones.

  `jax.jit` keeps what it traced and compiled by the identity of the function,
  so two samplers or learners with equal settings share their programs.

  >>> with_settings(pow, exp=2) is with_settings(pow, exp=2)
  True
  """
  return functools.partial(function, **settings)
