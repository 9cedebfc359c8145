"""The policy in float64, one token, one head, one key at a time.

Written from the equations; a sequence is a list of cached keys and values, so
that weights may change between two tokens while the cache stays.
"""

import math

import numpy as np


def rms_norm(x, scale, epsilon):
  """x_i / sqrt(mean x² + ε) · scale_i of one vector."""
  mean = math.fsum(value * value for value in x) / len(x)
  return np.array(
    [
      value / math.sqrt(mean + epsilon) * factor
      for value, factor in zip(x, scale, strict=True)
    ]
  )


def rotate(x, position, theta):
  """Turns the pairs (x_i, x_{i + Dh/2}) by position · theta^(-2i/Dh)."""
  half = len(x) // 2
  turned = np.zeros(len(x))
  for i in range(half):
    angle = position * theta ** (-2.0 * i / len(x))
    low, high = x[i], x[i + half]
    turned[i] = low * math.cos(angle) - high * math.sin(angle)
    turned[i + half] = high * math.cos(angle) + low * math.sin(angle)
  return turned


def attend(query, keys, values):
  """Softmax-weighted mean of the values of one head."""
  scores = [float(query @ key) / math.sqrt(len(query)) for key in keys]
  top = max(scores)
  masses = [math.exp(score - top) for score in scores]
  total = math.fsum(masses)
  return sum(
    mass / total * value for mass, value in zip(masses, values, strict=True)
  )


def swiglu(x, gate, up, down):
  """Σ_f silu(x·gate_f) (x·up_f) down_f."""
  hidden = []
  for f in range(gate.shape[1]):
    g, u = float(x @ gate[:, f]), float(x @ up[:, f])
    hidden.append(g / (1.0 + math.exp(-g)) * u)
  return np.asarray(hidden) @ down


class Sequence:
  """One sequence being read; `shape` is a ModelConfig."""

  def __init__(self, shape):
    self.shape = shape
    self.cache = [[] for _ in range(shape.num_layers)]  # (keys, values) [K, Dh]
    self.length = 0

  def read(self, weights, token):
    """Reads a token with these weights; the hidden state after it."""
    shape, layers = self.shape, weights["layers"]
    x = weights["embedding"][token]
    for n, cache in enumerate(self.cache):
      h = rms_norm(x, layers["attention_norm"][n], shape.norm_epsilon)
      query = np.einsum("d,dhw->hw", h, layers["query"][n])
      key = np.einsum("d,dkw->kw", h, layers["key"][n])
      value = np.einsum("d,dkw->kw", h, layers["value"][n])
      turned = [rotate(one, self.length, shape.rope_theta) for one in key]
      cache.append((turned, value))
      for head in range(shape.num_heads):
        kv = head // (shape.num_heads // shape.num_kv_heads)
        mixed = attend(
          rotate(query[head], self.length, shape.rope_theta),
          [keys[kv] for keys, _ in cache],
          [values[kv] for _, values in cache],
        )
        x = x + mixed @ layers["out"][n, head]
      h = rms_norm(x, layers["mlp_norm"][n], shape.norm_epsilon)
      x = x + swiglu(h, layers["gate"][n], layers["up"][n], layers["down"][n])
    self.length += 1
    return rms_norm(x, weights["final_norm"], shape.norm_epsilon)


def logits(weights, hidden):
  """The head: one dot product a word."""
  return weights.get("output", weights["embedding"]) @ hidden


def forward(weights, shape, tokens):
  """Logits after each token of one sequence, `[T, V]`."""
  sequence = Sequence(shape)
  return np.stack(
    [logits(weights, sequence.read(weights, token)) for token in tokens]
  )


def log_softmax(row):
  """z - log Σ exp z of one row; -inf stays -inf."""
  top = max(row)
  total = math.log(math.fsum(math.exp(z - top) for z in row))
  return np.array([z - top - total for z in row])


def decode_logps(versions, shape, prompt, completion, token_versions):
  """log π of each completion token, weights switched at recorded places.

  The token at place i was drawn with `versions[token_versions[i]]`, which also
  read the token before it; keys and values read earlier are kept.
  """
  sequence = Sequence(shape)
  logps = []
  read, unread = list(prompt), list(completion)
  for token, version in zip(completion, token_versions, strict=True):
    weights = versions[version]
    for known in read:
      hidden = sequence.read(weights, known)
    logps.append(log_softmax(logits(weights, hidden))[token])
    read = [unread.pop(0)]
  return np.asarray(logps)
