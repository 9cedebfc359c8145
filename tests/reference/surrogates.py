"""Clipped surrogates, GSPO, K3 and the length penalty, as scalar loops.

Lists of floats in and out, from PAPER-style equations; each loss returns its
values and the derivative of the *row's total* by each token's log-prob.
"""

import math

BOUND = 20.0


def _bounded(difference):
  return max(-BOUND, min(BOUND, difference))


def clipped(ratio, advantage, clip_low, clip_high):
  """min(ρÂ, clip(ρ)Â) and its derivative by ρ."""
  kept = max(1.0 - clip_low, min(1.0 + clip_high, ratio))
  if ratio * advantage <= kept * advantage:
    return ratio * advantage, advantage
  return kept * advantage, 0.0


def surrogate(logps, behavior_logps, advantages, clip_low, clip_high):
  """-min(ρ_it Â_i, clip(ρ_it) Â_i); d/d log π = -Â ρ where not clipped."""
  values, slopes = [], []
  for row, behavior_row, advantage in zip(
    logps, behavior_logps, advantages, strict=True
  ):
    pairs = []
    for logp, behavior_logp in zip(row, behavior_row, strict=True):
      ratio = math.exp(_bounded(logp - behavior_logp))
      value, slope = clipped(ratio, advantage, clip_low, clip_high)
      pairs.append((-value, -slope * ratio))
    values.append([value for value, _ in pairs])
    slopes.append([slope for _, slope in pairs])
  return values, slopes


def gspo(logps, behavior_logps, advantages, mask, clip_low, clip_high):
  """-min(s_i Â_i, clip(s_i) Â_i) at each token, s_i = exp(mean log ρ).

  The derivative by one token's log-prob of the row's *mean* loss:
  -Â_i s_i / len_i, and 0 off the mask or where clipped.
  """
  values, slopes = [], []
  for row, behavior_row, advantage, kept in zip(
    logps, behavior_logps, advantages, mask, strict=True
  ):
    differences = [
      logp - behavior_logp
      for logp, behavior_logp, counts in zip(
        row, behavior_row, kept, strict=True
      )
      if counts
    ]
    length = max(len(differences), 1)
    ratio = math.exp(_bounded(math.fsum(differences) / length))
    value, slope = clipped(ratio, advantage, clip_low, clip_high)
    values.append([-value for _ in row])
    slopes.append([-slope * ratio / length if c else 0.0 for c in kept])
  return values, slopes


def k3(logps, behavior_logps):
  """ρ - 1 - log ρ."""
  return [
    [
      math.exp(_bounded(a - b)) - 1.0 - _bounded(a - b)
      for a, b in zip(row, behavior_row, strict=True)
    ]
    for row, behavior_row in zip(logps, behavior_logps, strict=True)
  ]


def length_penalty(lengths, correct, max_length, cache_length):
  """clip((L_max - |y|)/L_cache - 1, -1, 0) for correct completions."""
  return [
    max(-1.0, min(0.0, (max_length - length) / cache_length - 1.0))
    if right
    else 0.0
    for length, right in zip(lengths, correct, strict=True)
  ]
