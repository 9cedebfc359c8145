"""Which groups are worth a gradient: decided on 0/1 correctness."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Num

from scalerl_jax.objectives.checks import (
  check_groups,
  check_shape,
  is_concrete,
)


def zero_variance_keep(
  correct: Num[Array, " B"] | Bool[Array, " B"],
  *,
  group_size: int,
  counted: Bool[Array, " B"] | None = None,
) -> Bool[Array, " B"]:
  """True on every row of a group with 0 < mean(correct) < 1.

  A prompt whose completions are all right or all wrong has advantage 0
  everywhere; dropping it takes it out of the denominators too.

  Args:
    correct: 0/1 correctness as bool, int or float; not rewards of ±1, for
      which a mean strictly between 0 and 1 would be another filter.
    group_size: G; groups are adjacent rows.
    counted: True on completions that the mean is over, all by default; a
      completion that is masked out says nothing about its group.

  Returns:
    One value per group, repeated over its rows.

  Raises:
    ValueError: values other than 0 and 1 (where they can be looked at), or a
      size that does not divide.

  >>> zero_variance_keep(jnp.array([1, 0, 1, 1]), group_size=2)
  Array([ True,  True, False, False], dtype=bool)

  Reference: ScaleRL, arXiv 2510.13786, section 3.2.
  """
  check_shape("correct", correct, (None,))
  groups = check_groups("correct", correct, group_size)
  if is_concrete(correct):
    values = np.asarray(correct)
    wrong = values[(values != 0) & (values != 1)]
    if wrong.size:
      raise ValueError(
        f"correct must hold only 0 and 1, got {wrong.flat[0]}; pass"
        " correctness, not rewards"
      )
  table = correct.reshape(groups, group_size).astype(bool)
  if counted is None:
    counted = jnp.ones(correct.shape, bool)
  check_shape("counted", counted, correct.shape)
  part = counted.reshape(groups, group_size)
  mixed = (table & part).any(axis=1) & (~table & part).any(axis=1)
  return jnp.repeat(mixed, group_size)
