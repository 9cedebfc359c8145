"""Token losses and a linear softmax policy, value and gradient by hand.

Lists of floats in and out. Each loss returns the values and, beside them, the
derivative of each value with respect to its own token's log-prob.
"""

import math


def reinforce(logps, advantages):
  """-Â_i · log π(y_it), and its derivative -Â_i."""
  values, slopes = [], []
  for row, advantage in zip(logps, advantages, strict=True):
    values.append([-advantage * logp for logp in row])
    slopes.append([-advantage for _ in row])
  return values, slopes


def cispo(logps, behavior_logps, advantages, clip_max, bound=20.0):
  """-sg(min(ρ, clip_max)) · Â_i · log π, and -min(ρ, clip_max) · Â_i."""
  values, slopes = [], []
  for row, behavior_row, advantage in zip(
    logps, behavior_logps, advantages, strict=True
  ):
    row_values, row_slopes = [], []
    for logp, behavior_logp in zip(row, behavior_row, strict=True):
      log_ratio = max(-bound, min(bound, logp - behavior_logp))
      factor = min(math.exp(log_ratio), clip_max)
      row_values.append(-factor * advantage * logp)
      row_slopes.append(-factor * advantage)
    values.append(row_values)
    slopes.append(row_slopes)
  return values, slopes


def total(weights, values):
  """Σ_it w_it · loss_it, correctly rounded."""
  return math.fsum(
    weight * value
    for weight_row, value_row in zip(weights, values, strict=True)
    for weight, value in zip(weight_row, value_row, strict=True)
  )


def log_softmax(logits):
  """log softmax of one row, -inf allowed."""
  top = max(logits)
  log_total = top + math.log(
    math.fsum(math.exp(logit - top) for logit in logits)
  )
  return [logit - log_total for logit in logits]


def token_logp(logits, token):
  """log softmax(logits)[token], and its derivative onehot - softmax."""
  logps = log_softmax(logits)
  slopes = [
    (1.0 if index == token else 0.0) - math.exp(logp)
    for index, logp in enumerate(logps)
  ]
  return logps[token], slopes


def entropy(logits):
  """H = -Σ p log p, and dH/dz_v = -p_v · (log p_v + H); 0 · log 0 = 0."""
  logps = log_softmax(logits)
  value = -math.fsum(
    math.exp(logp) * logp for logp in logps if logp > -math.inf
  )
  slopes = [
    -math.exp(logp) * (logp + value) if logp > -math.inf else 0.0
    for logp in logps
  ]
  return value, slopes


def linear_policy(features, kernel, tokens):
  """log π(y_it) of the policy whose logits are x_it · kernel."""
  logps = []
  for feature_row, token_row in zip(features, tokens, strict=True):
    row = []
    for feature, token in zip(feature_row, token_row, strict=True):
      row.append(token_logp(_matvec(feature, kernel), token)[0])
    logps.append(row)
  return logps


def linear_policy_gradient(features, kernel, tokens, slopes):
  """d loss / d kernel, given d loss / d log π of every token."""
  width, vocabulary = len(kernel), len(kernel[0])
  gradient = [[0.0] * vocabulary for _ in range(width)]
  for feature_row, token_row, slope_row in zip(
    features, tokens, slopes, strict=True
  ):
    for feature, token, slope in zip(
      feature_row, token_row, slope_row, strict=True
    ):
      if slope == 0.0:
        continue
      _, logit_slopes = token_logp(_matvec(feature, kernel), token)
      for d in range(width):
        for v in range(vocabulary):
          gradient[d][v] += slope * feature[d] * logit_slopes[v]
  return gradient


def _matvec(feature, kernel):
  return [
    math.fsum(
      x * kernel_row[v] for x, kernel_row in zip(feature, kernel, strict=True)
    )
    for v in range(len(kernel[0]))
  ]
