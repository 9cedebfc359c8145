"""Advantages of groups of completions, one reward at a time.

Centred by the mean of the group, divided by the population standard deviation
of the group, of the whole kept batch, or by nothing.
"""

import math


def group_advantages(rewards, group_size, normalization, keep=None):
  """Â_i = (r_i - mean_j r_j) / std; 0 in constant groups and dropped groups."""
  kept = [True] * len(rewards) if keep is None else list(keep)
  centered = []
  for start in range(0, len(rewards), group_size):
    group = rewards[start : start + group_size]
    if all(reward == group[0] for reward in group):
      centered.extend([0.0] * group_size)
    else:
      mean = math.fsum(group) / group_size
      centered.extend(reward - mean for reward in group)
  centered = [x if k else 0.0 for x, k in zip(centered, kept, strict=True)]

  if normalization == "none":
    return centered
  if normalization == "prompt_level":
    result = []
    for start in range(0, len(rewards), group_size):
      group = centered[start : start + group_size]
      result.extend(_divide(group, population_std(group)))
    return result
  if normalization == "batch_level":
    std = population_std([x for x, k in zip(centered, kept, strict=True) if k])
    return _divide(centered, std)
  raise AssertionError(normalization)


def population_std(values):
  """√(1/N Σ (x - mean)²): divided by N, not by N - 1; 0 of nothing."""
  if not values:
    return 0.0
  mean = math.fsum(values) / len(values)
  return math.sqrt(math.fsum((x - mean) ** 2 for x in values) / len(values))


def _divide(values, std):
  return [value / std if std > 0.0 else 0.0 for value in values]
