"""Forced interruption: a phrase that ends the thinking, then an answer budget.

What is forced was not drawn: it is flagged, has log-prob 0 and no weight in
the loss, but the policy reads it like any token. Decided in the decode loop.
"""

import dataclasses
from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from scalerl_jax.config import LengthConfig
from scalerl_jax.data.tokenizers import Tokenizer
from scalerl_jax.sampling.slots import SlotState, Thinking, record

# Where a completion's thinking budget is drawn; no token has this position.
BUDGET_POSITION = np.uint32(2**32 - 1)


@dataclasses.dataclass(frozen=True)
class Interruption:
  """When thinking is interrupted, by what, and what is left for the answer.

  Hashable: compiled programs depend on it.
  """

  min_thinking: int  # tokens; each completion draws its thinking budget
  max_thinking: int  # uniformly from min .. max, both ends included
  answer_tokens: int  # allowed after the end of thinking, drawn or forced
  phrase_ids: tuple[int, ...]  # what is forced; ends with `end_ids`
  end_ids: tuple[int, ...]  # thinking ends when these are the newest tokens

  def check(
    self, eos_ids: Collection[int], *, max_completion_tokens: int
  ) -> None:
    """Refuses what could not be forced as it is meant.

    Args:
      eos_ids: tokens that end a completion.
      max_completion_tokens: completion tokens allowed.

    Raises:
      ValueError: a phrase that does not end with the end ids, or holds them
        earlier, or holds an end token; budgets that do not fit.
    """
    phrase, end = self.phrase_ids, self.end_ids
    if not end or phrase[-len(end) :] != end:
      raise ValueError(
        "length.phrase must end with the tokens of length.thinking_end"
        f" {end}, got the tokens {phrase}; choose texts that the tokenizer"
        " cuts there"
      )
    starts = range(len(phrase) - len(end))
    if any(phrase[i : i + len(end)] == end for i in starts):
      raise ValueError(
        "length.phrase must hold the tokens of length.thinking_end"
        f" {end} only at its end, got the tokens {phrase}; take the earlier"
        " ones out"
      )
    ending = [piece for piece in phrase if piece in eos_ids]
    if ending:
      raise ValueError(
        "length.phrase must hold no token that ends a completion, got the"
        f" tokens {phrase} with the end token {ending[0]}; take it out"
      )
    needed = self.max_thinking + len(phrase) + self.answer_tokens
    if needed > max_completion_tokens:
      raise ValueError(
        "length.max_thinking_tokens + tokens of length.phrase +"
        " length.answer_tokens must be at most sampler.max_completion_tokens"
        f" ({max_completion_tokens}), got {self.max_thinking} + {len(phrase)}"
        f" + {self.answer_tokens} = {needed}; lower the thinking budget or"
        " raise the completion budget"
      )


def make_interruption(
  length: LengthConfig, tokenizer: Tokenizer, *, max_completion_tokens: int
) -> Interruption | None:
  """What the length control asks for, in tokens; None if it is another one.

  A text that is a piece of the tokenizer, as special tokens are, is forced and
  recognised as that one id.

  Args:
    length: which control, budgets, texts.
    tokenizer: encodes the texts; its end tokens may not be forced.
    max_completion_tokens: completion tokens allowed.

  Raises:
    ValueError: the tokenizer cannot encode the phrase or the end of thinking
      as promised, or what `Interruption.check` refuses.
  """
  if length.control != "interruption":
    return None
  interruption = Interruption(
    min_thinking=length.min_thinking_tokens,
    max_thinking=length.max_thinking_tokens,
    answer_tokens=length.answer_tokens,
    phrase_ids=_encode("length.phrase", length.phrase, tokenizer),
    end_ids=_encode("length.thinking_end", length.thinking_end, tokenizer),
  )
  interruption.check(
    tokenizer.eos_ids, max_completion_tokens=max_completion_tokens
  )
  return interruption


def _encode(name: str, text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
  """Ids of a text that is forced or looked for, exactly."""
  try:
    tokens = tuple(tokenizer.encode(text).tolist())
  except ValueError as error:
    raise ValueError(f"{name}: {error}") from error
  pieces = tokenizer.pieces
  if text in pieces and tokens != (pieces.index(text),):
    raise ValueError(
      f"{name} must be encoded as the tokenizer's own piece {text!r}"
      f" ({pieces.index(text)}), got the tokens {tokens}; make it a symbol of"
      " the tokenizer or change the text"
    )
  back = tokenizer.decode(tokens)
  if back != text:
    raise ValueError(
      f"{name} must come back from its tokens, got {text!r} of which"
      f" {tokens} make {back!r}; change the text"
    )
  return tokens


def thinking_budgets(
  keys: UInt32[Array, "S 2"], interruption: Interruption
) -> Int[Array, " S"]:
  """Tokens after which each completion is interrupted, if it still thinks.

  Uniform in min .. max; addressed by the completion's key like its tokens.
  """

  def one(data: Array) -> Array:
    key = jax.random.wrap_key_data(data, impl="threefry2x32")
    return jax.random.randint(
      jax.random.fold_in(key, BUDGET_POSITION),
      (),
      interruption.min_thinking,
      interruption.max_thinking + 1,
      jnp.int32,
    )

  return jax.vmap(one)(keys)


def first_ends(
  token: Int[Array, " S"], interruption: Interruption
) -> Int[Array, " S"]:
  """`Thinking.ended` of completions of one token, which was drawn."""
  single = len(interruption.end_ids) == 1
  ends = single & (token == interruption.end_ids[-1])
  return ends.astype(jnp.int32)


def answer_budget(
  budget: Int[Array, " S"],
  ended: Int[Array, " S"],
  interruption: Interruption,
) -> Int[Array, " S"]:
  """Completion tokens allowed: `answer_tokens` more once thinking ended."""
  answer = jnp.minimum(ended + interruption.answer_tokens, budget)
  return jnp.where(ended > 0, answer, budget)


def interrupt(
  state: SlotState,
  column: Int[Array, ""],
  token: Int[Array, " S"],
  logp: Float[Array, " S"],
  interruption: Interruption,
) -> tuple[Int[Array, " S"], Float[Array, " S"], Thinking]:
  """The tokens of a decode step, the phrase's in place of drawn ones.

  A phrase that was begun is written to its end, whatever it makes together
  with the tokens before it. Thinking ends once.

  Args:
    state: before the step.
    column: of the record rings, where the step writes.
    token: drawn.
    logp: of the drawn tokens, nats.
    interruption: static.

  Returns:
    Tokens, their behaviour log-probs (0 where forced), and what is remembered
    of thinking after the step; nothing changes where nobody writes.
  """
  thinking: Thinking = state.thinking
  phrase, end = interruption.phrase_ids, interruption.end_ids
  thinks = state.active & (thinking.ended == 0)
  place = state.length - thinking.budget  # in the phrase
  forced = thinks & (place >= 0)
  ids = jnp.asarray(phrase, jnp.int32)
  token = jnp.where(
    forced, jnp.take(ids, place, mode="clip").astype(token.dtype), token
  )
  drawn_end = (token == end[-1]) & (state.length + 1 >= len(end))
  for back in range(1, len(end)):
    earlier = jax.lax.dynamic_index_in_dim(
      state.tokens, (column - back) % state.tokens.shape[0], 0, keepdims=False
    )
    drawn_end &= earlier == end[-1 - back]
  ends = thinks & jnp.where(forced, place == len(phrase) - 1, drawn_end)
  return (
    token,
    jnp.where(forced, 0.0, logp),
    Thinking(
      budget=thinking.budget,
      ended=jnp.where(ends, state.length + 1, thinking.ended),
      forced=record(thinking.forced, column, forced, state.active),
    ),
  )
