"""What the house knows of a tokenizer, whoever made it; text piece by piece.

`pieces.py` has those that are trained on a task's text, `checkpoints.py` those
that come with a published model.
"""

import os
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Int32

_BROKEN = "\ufffd"  # how bytes that make no character are decoded


@runtime_checkable
class Tokenizer(Protocol):
  """Text to token ids and back.

  Masks are carried beside tokens, so the padding id may be an end token.
  """

  vocab_size: int  # ids that a policy may draw: 0 .. vocab_size-1
  pad_id: int
  eos_ids: tuple[int, ...]  # each ends a completion; the first ends our texts
  pieces: tuple[str, ...]  # names by id; with equal pieces two of them agree

  def encode(self, text: str) -> Int32[np.ndarray, " T"]:
    """Token ids of `text`; none is added before or behind."""
    ...

  def decode(self, tokens: Sequence[int] | Int[np.ndarray, " T"]) -> str:
    """The text of `tokens`; padding and end tokens leave no trace."""
    ...

  def decode_batch(
    self, tokens: Int[np.ndarray, "N T"], lengths: Int[np.ndarray, " N"]
  ) -> list[str]:
    """The texts of the first `lengths[i]` tokens of each row; fast."""
    ...

  def write_prompt(self, question: str) -> str:
    """The text of which a policy sees the tokens when it is asked."""
    ...

  def store(self, folder: str | os.PathLike) -> None:
    """Writes its files into `folder`."""
    ...


class TextStream:
  """Incremental detokenisation: text as its tokens come, whole characters.

  What has been given out joins to the decoded whole. A character whose bytes
  lie in several tokens waits for the last of them.

  >>> from scalerl_jax.data.pieces import PieceTokenizer
  >>> tokenizer = PieceTokenizer.train(["0123456789"], symbols=["+1"])
  >>> stream = TextStream(tokenizer)
  >>> [stream.push([token]) for token in tokenizer.encode("7+12").tolist()]
  ['7', '+1', '2']
  >>> stream.finish()
  ''
  """

  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer = tokenizer
    # Some decoders write a token's space only behind another token: the ones
    # that were given out last are decoded again.
    self._given: list[int] = []
    self._held: list[int] = []

  def push(self, tokens: Sequence[int]) -> str:
    """The text that these tokens complete; empty within a character."""
    self._held += tokens
    text = self._text()
    return "" if text.endswith(_BROKEN) else self._give(text)

  def finish(self) -> str:
    """What was held back, bytes that make no character as U+FFFD."""
    return self._give(self._text())

  def _text(self) -> str:
    before = self._tokenizer.decode(self._given)
    return self._tokenizer.decode(self._given + self._held)[len(before) :]

  def _give(self, text: str) -> str:
    if text:
      self._given, self._held = self._held, []
    return text
