"""The four averages of a loss as nested means, and the weights in them.

`average` is the paper's formula on the losses themselves; `weights` says what
each token's loss is multiplied by in it.
"""

import math


def average(losses, mask, group_size, how, max_tokens=None):
  """The mean of `losses` over what `mask` keeps, as the paper prints it."""
  rows = [
    [loss for loss, kept in zip(loss_row, mask_row, strict=True) if kept]
    for loss_row, mask_row in zip(losses, mask, strict=True)
  ]
  filled = [row for row in rows if row]
  if not filled:
    return 0.0
  if how == "sample_average":
    # mean over completions of (1 / len_i) Σ_t
    return _mean([_mean(row) for row in filled])
  if how == "prompt_average":
    # mean over prompts of (1 / Σ_i len_i) Σ_i Σ_t
    groups = []
    for start in range(0, len(rows), group_size):
      tokens = [x for row in rows[start : start + group_size] for x in row]
      if tokens:
        groups.append(_mean(tokens))
    return _mean(groups)
  if how == "token_average":
    # one mean over every token of the batch
    return _mean([loss for row in filled for loss in row])
  if how == "constant":
    # mean over completions of (1 / max_tokens) Σ_t
    return _mean([math.fsum(row) / max_tokens for row in filled])
  raise AssertionError(how)


def weights(mask, group_size, how, max_tokens=None):
  """d average / d loss_it; the average is linear, so each token is probed."""
  result = []
  for b, row in enumerate(mask):
    result.append([])
    for t in range(len(row)):
      probe = [
        [1.0 if (i, j) == (b, t) else 0.0 for j in range(len(row))]
        for i in range(len(mask))
      ]
      result[-1].append(average(probe, mask, group_size, how, max_tokens))
  return result


def _mean(values):
  return math.fsum(values) / len(values)
