"""Attention over whole rows: a mix of what each query may see.

A query sees nothing that comes after it. So queries are taken a block at a
time, and keys after the block are not multiplied with. What mixes a block is
`model.attention`: our own products, or JAX's library function.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from scalerl_jax.config import ModelConfig
from scalerl_jax.models.layers import MASKED
from scalerl_jax.models.operands import FLOAT32

BLOCK = 64  # queries at least; fewer make products too small to be fast
MOST_BLOCKS = 8  # nothing beyond is worth its code: 9/16 of the keys are left


CUDNN_WIDEST = 256  # of a head; 128 before NVIDIA's Hopper, which JAX checks


class Before(NamedTuple):
  """Keys and values that come before a row, shared by the rows of a group."""

  key: Float[Array, "P Tp K Dh"]
  value: Float[Array, "P Tp K Dh"]
  mask: Bool[Array, "P #G #T Tp"]  # True where a query may see a key


def blocks(length: int) -> list[tuple[int, int]]:
  """First and last column + 1 of each block of queries.

  >>> blocks(100), blocks(150)
  ([(0, 100)], [(0, 75), (75, 150)])
  """
  count = max(1, min(length // BLOCK, MOST_BLOCKS))
  edges = [-(-length * i // count) for i in range(count + 1)]
  return list(itertools.pairwise(edges))


def pairs(length: int) -> int:
  """Products of a query and a key that a row of tokens costs, masked ones too.

  >>> pairs(100), pairs(150)
  (10000, 16875)
  """
  return sum((last - first) * last for first, last in blocks(length))


def attend(
  query: Float[Array, "B T H Dh"],
  key: Float[Array, "B T K Dh"],
  value: Float[Array, "B T K Dh"],
  mask: Bool[Array, "B T T"],
  *,
  kernel: str = "einsum",
) -> Float[Array, "B T H Dh"]:
  """Grouped-query attention over whole rows; softmax in float32.

  Args:
    query: of all heads.
    key, value: of the heads that are shared.
    mask: True where a query may see a key; nothing after the query.
    kernel: `model.attention`.

  Reference: Ainslie et al., 2023, arXiv 2305.13245.
  """

  def lone(x: Array) -> Array:
    return x[:, None]  # a group of its own

  mixed = attend_groups(
    lone(query), lone(key), lone(value), lone(mask), kernel=kernel
  )
  return mixed[:, 0]


def attend_groups(
  query: Float[Array, "P G T H Dh"],
  key: Float[Array, "P G T K Dh"],
  value: Float[Array, "P G T K Dh"],
  mask: Bool[Array, "#P #G T T"],
  before: Before | None = None,
  *,
  kernel: str = "einsum",
) -> Float[Array, "P G T H Dh"]:
  """`attend` of G rows each of P groups, after what their group has before.

  One softmax over both. What is before is held and read once for its group.

  Args:
    query, key, value: as in `attend`.
    mask: as there.
    before: seen by all rows of a group; nothing by default.
    kernel: `model.attention`.
  """
  if kernel != "einsum":
    return _by_library(query, key, value, mask, before, kernel)
  prompts, group, length, heads, width = query.shape
  kv_heads = key.shape[3]
  # In the order (P, K, G, heads of a key, T): all queries of a group that see
  # the same keys are adjacent, and so are those of one row.
  query = query * jnp.asarray(width**-0.5, query.dtype)
  query = query.reshape(prompts, group, length, kv_heads, -1, width)
  query = query.transpose(0, 3, 1, 4, 2, 5)
  key, value = (x.transpose(0, 3, 1, 2, 4) for x in (key, value))
  bias = _bias(mask)[:, None, :, None]
  pieces = []
  for first, last in blocks(length):
    rows = query[..., first:last, :]
    seen = [
      (key[..., :last, :], value[..., :last, :], bias[..., first:last, :last])
    ]
    if before is not None:
      prior = _bias(before.mask)[:, None, :, None]
      prior = prior if prior.shape[-2] == 1 else prior[..., first:last, :]
      early = before.key.transpose(0, 2, 1, 3)
      seen.append((early, before.value.transpose(0, 2, 1, 3), prior))
    pieces.append(_mix(rows, seen))
  mixed = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=-2)
  mixed = mixed.transpose(0, 2, 4, 1, 3, 5)
  return mixed.reshape(prompts, group, length, heads, width).astype(query.dtype)


def _bias(mask: Array) -> Array:
  # Added, not selected: forward and backward together take 2.6 ms in place of
  # 6.3 (64 rows of 29 tokens, 4 heads of 16, one thread) with plain products,
  # no selects, and a sum divided by after the product with the values.
  return jnp.where(mask, 0.0, MASKED)


def _mix(
  query: Float[Array, "P K G R t Dh"],
  seen: list[tuple[Array, Array, Array]],
) -> Float[Array, "P K G R t Dh"]:
  """Softmax over all keys together, mix of their values, in float32.

  Args:
    query: scaled.
    seen: keys, values `[P, K, G, u, Dh]` or `[P, K, u, Dh]` and a bias that
      broadcasts to `[P, K, G, R, t, u]`.
  """

  def flat(x: Array, like: Array) -> Array:
    """Rows that meet the same keys together: [N, rows, ...]."""
    ahead = like.ndim - 2
    count = 1
    for size in x.shape[:ahead]:
      count *= size
    return x.reshape(count, -1, x.shape[-1])

  scores = []
  for key, _, bias in seen:
    dots = jnp.einsum(
      "ntd,nud->ntu", flat(query, key), flat(key, key), **FLOAT32
    )
    scores.append(dots.reshape(*query.shape[:-1], key.shape[-2]) + bias)
  tops = [jnp.max(x, axis=-1, keepdims=True) for x in scores]
  top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, tops))
  mixes, totals = [], []
  for score, (_, value, _) in zip(scores, seen, strict=True):
    weights = jnp.exp(score - top)
    totals.append(weights.sum(axis=-1, keepdims=True))
    mixed = jnp.einsum(
      "ntu,nud->ntd",
      flat(weights.astype(value.dtype), value),
      flat(value, value),
      **FLOAT32,
    )
    mixes.append(mixed.reshape(query.shape))
  mixed, total = (functools.reduce(jnp.add, x) for x in (mixes, totals))
  return mixed / total


def check_kernel(config: ModelConfig, platform: str) -> None:
  """Refuses an attention that this hardware or this model does not have.

  Args:
    config: of a policy, its checkpoint's architecture included.
    platform: of its devices, as JAX calls it.

  Raises:
    ValueError: cuDNN for other devices than NVIDIA's, or for heads that it
      does not take.
  """
  if config.attention != "cudnn":
    return
  if platform not in ("gpu", "cuda"):
    raise ValueError(
      "model.attention must be einsum or xla on devices other than an NVIDIA"
      f" GPU, got cudnn on a {platform}"
    )
  width = config.head_width
  if width % 8 or width > CUDNN_WIDEST:
    raise ValueError(
      "model.attention cudnn takes heads of a multiple of 8 numbers, at most"
      f" {CUDNN_WIDEST}, got model.head_width {width}: choose einsum"
    )


def _by_library(
  query: Float[Array, "P G T H Dh"],
  key: Float[Array, "P G T K Dh"],
  value: Float[Array, "P G T K Dh"],
  mask: Bool[Array, "#P #G T T"],
  before: Before | None,
  kernel: str,
) -> Float[Array, "P G T H Dh"]:
  """`attend_groups` by `jax.nn.dot_product_attention`.

  What a group has before is given to each of its rows: the library knows rows
  with keys of their own only.
  """
  prompts, group, length = query.shape[:3]

  def rows(x: Array) -> Array:
    return x.reshape(prompts * group, *x.shape[2:])

  def shared(x: Array) -> Array:
    whole = jnp.broadcast_to(x[:, None], (prompts, group, *x.shape[1:]))
    return rows(whole)

  def seen(x: Array) -> Array:
    return rows(jnp.broadcast_to(x, (prompts, group, length, x.shape[-1])))

  query, key, value, mask = rows(query), rows(key), rows(value), seen(mask)
  mix: Any = jax.nn.dot_product_attention  # its type names its kernels
  pieces = []
  for first, last in blocks(length):
    keys, values = key[:, :last], value[:, :last]
    sees = mask[:, first:last, :last]
    if before is not None:
      keys = jnp.concatenate([shared(before.key), keys], axis=1)
      values = jnp.concatenate([shared(before.value), values], axis=1)
      sees = jnp.concatenate([seen(before.mask)[:, first:last], sees], axis=2)
    # Float32 operands are multiplied as such, as everywhere.
    with jax.default_matmul_precision("highest"):
      mixed = mix(
        _even(query[:, first:last], 1),
        _even(keys, 1),
        _even(values, 1),
        mask=_even(sees, 1, 2)[:, None],
        implementation=kernel,
      )
    pieces.append(mixed[:, : last - first])
  mixed = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)
  return mixed.reshape(prompts, group, *mixed.shape[1:])


def _even(x: Array, *axes: int) -> Array:
  """With zeros behind axes of odd length: cuDNN's gradient wants even ones."""
  odd = [(0, x.shape[i] % 2 if i in axes else 0) for i in range(x.ndim)]
  return jnp.pad(x, odd)
