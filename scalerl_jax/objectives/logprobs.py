"""From logits to the chosen token's log-prob: one way for both sides.

The sampler draws from the warped logits and the learner scores under the same
ones, so a ratio of 1 means the same policy and not the same settings.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from scalerl_jax.objectives.checks import check_shape


def warp_logits(
  logits: Float[Array, "*B V"],
  *,
  temperature: float = 1.0,
  top_k: int | None = None,
  top_p: float | None = None,
) -> Float[Array, "*B V"]:
  """Logits of the distribution that is really sampled from, in float32.

  z/τ, then all but the `top_k` largest cut, then all but the smallest set
  whose probability reaches `top_p` cut. Cut tokens get −inf; the kept ones are
  renormalised by whoever takes the softmax. Ties at the border are kept.

  Args:
    logits: of the model.
    temperature: τ, above 0.
    top_k: tokens kept, 1 or more; `None` keeps all.
    top_p: probability kept, in (0, 1]; `None` keeps all.

  Raises:
    ValueError: a setting outside its domain.

  >>> warp_logits(jnp.array([1.0, 3.0, 2.0]), temperature=0.5, top_k=2)
  Array([-inf,   6.,   4.], dtype=float32)
  """
  if not temperature > 0:
    raise ValueError(f"temperature must be above 0, got {temperature}")
  if top_k is not None and top_k < 1:
    raise ValueError(f"top_k must be 1 or more (None: off), got {top_k}")
  if top_p is not None and not 0 < top_p <= 1:
    raise ValueError(f"top_p must be in (0, 1] (None: off), got {top_p}")
  logits = logits.astype(jnp.float32)
  if temperature != 1.0:
    logits = logits / temperature
  if top_k is not None and top_k < logits.shape[-1]:
    border = jax.lax.top_k(logits, top_k)[0][..., -1:]
    logits = jnp.where(logits < border, -jnp.inf, logits)
  if top_p is not None and top_p < 1:
    ordered = -jnp.sort(-logits, axis=-1)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    # A token stays if the more probable ones do not reach top_p without it.
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    border = jnp.min(
      jnp.where(before < top_p, ordered, jnp.inf), axis=-1, keepdims=True
    )
    logits = jnp.where(logits < border, -jnp.inf, logits)
  return logits


def token_logps(
  logits: Float[Array, "*B V"], tokens: Int[Array, "*B"]
) -> Float[Array, "*B"]:
  """log π of the chosen tokens: z[token] − logsumexp(z), float32, nats.

  Args:
    logits: unnormalised; warped if the tokens were drawn from warped ones.
    tokens: ids in 0 .. V−1.

  Returns:
    Log-probs, one a token; not masked. A token cut to −inf has −inf.

  Raises:
    ValueError: not one token for each row of logits.

  >>> token_logps(jnp.zeros((1, 4)), jnp.array([2])).round(4)
  Array([-1.3863], dtype=float32)
  """
  check_shape("tokens", tokens, logits.shape[:-1])
  logits = logits.astype(jnp.float32)
  # A select and a sum, not a gather: the gradient of a gather is a scatter,
  # which costs more than the head itself on a CPU.
  index = jnp.expand_dims(
    jnp.arange(logits.shape[-1]), tuple(range(tokens.ndim))
  )
  chosen = jnp.sum(jnp.where(index == tokens[..., None], logits, 0.0), axis=-1)
  return chosen - jax.nn.logsumexp(logits, axis=-1)


def entropy(logits: Float[Array, "*B V"]) -> Float[Array, "*B"]:
  """Shannon entropy −Σ p log p of each distribution, float32, nats.

  A token cut to −inf has probability 0 and adds exactly 0.

  Args:
    logits: unnormalised.

  Returns:
    Entropies in [0, log V]; not masked.

  >>> entropy(jnp.array([0.0, 0.0, -jnp.inf])).round(4)
  Array(0.6931, dtype=float32)
  """
  # log Σe − Σe·d / Σe, where d = z − max z and e = exp d: one exponential a
  # logit, the one that a log-sum-exp takes too.
  logits = logits.astype(jnp.float32)
  below = logits - jnp.max(logits, axis=-1, keepdims=True)
  # Two wheres: the gradient of 0·(−inf) would be NaN.
  cut = below == -jnp.inf
  below = jnp.where(cut, 0.0, below)
  mass = jnp.where(cut, 0.0, jnp.exp(below))
  total = mass.sum(axis=-1)
  return jnp.log(total) - jnp.sum(mass * below, axis=-1) / total


def score_in_chunks(
  score: Callable[[Array, Array], tuple[Array, ...]],
  hidden: Float[Array, "B T D"],
  tokens: Int[Array, "B T"],
  *,
  chunk: int,
) -> tuple[Float[Array, "B T"], ...]:
  """`score(hidden, tokens)` a few columns at a time, to bound its memory.

  A score turns D numbers a token into V logits and these into one or two. All
  tokens at once hold B·T·V floats, and the backward pass as many again; here
  a piece holds about `chunk`·V, and the backward pass computes it once more
  instead of keeping it. Pieces are cut along T, so that each device keeps the
  rows that it has.

  Args:
    score: of `[B, t, D]` and `[B, t]`, a tuple of `[B, t]`; one token must
      not look at another.
    hidden: states before the head.
    tokens: the token scored at each.
    chunk: tokens a piece, of all B rows together, a column or more; 0 takes
      all at once and recomputes nothing.

  Returns:
    As `score` of the whole; not masked.

  Raises:
    ValueError: `chunk` below 0.

  >>> hidden, tokens = jnp.ones((2, 3, 4)), jnp.zeros((2, 3), jnp.int32)
  >>> score_in_chunks(lambda h, _: (h.sum(axis=-1),), hidden, tokens, chunk=4)[
  ...   0
  ... ]
  Array([[4., 4., 4.],
         [4., 4., 4.]], dtype=float32)
  """
  if chunk < 0:
    raise ValueError(f"chunk must be 0 (all at once) or more, got {chunk}")
  rows, length = tokens.shape
  pieces = -(-length // max(chunk // rows, 1)) if chunk else 1
  if pieces <= 1:
    return score(hidden, tokens)
  columns = -(-length // pieces)  # as even as can be: the last is padded
  pieces = -(-length // columns)

  def cut(values: Array) -> Array:
    """[B, T, ...] -> [pieces, B, columns, ...]."""
    missing = pieces * columns - length
    pad = ((0, 0), (0, missing)) + ((0, 0),) * (values.ndim - 2)
    values = jnp.pad(values, pad)
    values = values.reshape(rows, pieces, columns, *values.shape[2:])
    return jnp.moveaxis(values, 1, 0)

  # A loop's body is compiled apart from the other pass: nothing to merge.
  once_more = jax.checkpoint(score, prevent_cse=False)
  scored = jax.lax.map(
    lambda piece: once_more(*piece), (cut(hidden), cut(tokens))
  )
  return jax.tree.map(
    lambda x: jnp.moveaxis(x, 0, 1).reshape(rows, -1)[:, :length], scored
  )
