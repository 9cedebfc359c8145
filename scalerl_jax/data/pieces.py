"""Small sentencepiece tokenizers, trained on a task's own text.

Every character of the text is a piece, and so is every packed symbol. Encoding
is exact: a text comes back from its tokens, or it is refused.
"""

import io
import os
from collections.abc import Iterable, Sequence

import numpy as np
import sentencepiece
from jaxtyping import Int, Int32

_SPACE = "\u2581"  # how sentencepiece writes a space inside its pieces
_UNKNOWN = "\ufffd"


class PieceTokenizer:
  """Text to token ids and back, around one sentencepiece model.

  >>> tokenizer = PieceTokenizer.train(["0123456789"], symbols=["+1", "="])
  >>> tokenizer.decode(tokenizer.encode("7+1=8"))
  '7+1=8'
  >>> len(tokenizer.encode("7+1=8"))  # "+1" is one token
  4
  """

  def __init__(self, model: bytes):
    """Reads a serialized sentencepiece model.

    Its control pieces are the padding piece and the end pieces: every other
    control piece ends a completion.
    """
    self._model = model
    self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = range(self._processor.vocab_size())
    self.vocab_size: int = len(pieces)
    self.pad_id: int = self._processor.pad_id()
    self.eos_ids: tuple[int, ...] = tuple(
      piece
      for piece in pieces
      if self._processor.is_control(piece)
      and piece not in (self.pad_id, self._processor.bos_id())
    )
    if self.pad_id < 0 or not self.eos_ids:
      raise ValueError(
        "a tokenizer's model must have a padding piece and an end piece, got"
        f" pad_id {self.pad_id} and end pieces {self.eos_ids}; train it with"
        " PieceTokenizer.train"
      )
    # The name of each id; two tokenizers with equal pieces agree.
    self.pieces: tuple[str, ...] = tuple(
      self._processor.id_to_piece(piece) for piece in pieces
    )
    self._texts = np.array([self._text(piece) for piece in pieces], object)

  @classmethod
  def train(
    cls,
    texts: Iterable[str],
    path: str | os.PathLike | None = None,
    *,
    symbols: Sequence[str] = (),
    end_symbols: Sequence[str] = (),
  ) -> "PieceTokenizer":
    """Trains on `texts`: a piece for each symbol and each other character.

    Deterministic: the same texts and symbols give the same bytes. Ids: padding
    0, end 1, unknown 2, further end symbols, symbols in the given order, then
    characters by falling frequency.

    Args:
      texts: what will be encoded; a character that is not here has no piece.
      path: where the model is stored (whole or not at all); None: nowhere.
      symbols: texts that become one token each, wherever they occur.
      end_symbols: names of further end tokens beside `</s>`; no text encodes
        to them.

    Raises:
      ValueError: `texts` hold nothing that `symbols` do not cover.
    """
    texts = list(texts)
    # Sentencepiece drops these characters unless they are symbols.
    spaces = {c for text in texts for c in text if c.isspace() and c != " "}
    symbols = list(dict.fromkeys([*symbols, *sorted(spaces)]))
    model = io.BytesIO()
    try:
      sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        model_type="char",
        vocab_size=1_000_000,  # an upper bound, with the next line
        hard_vocab_limit=False,
        character_coverage=1.0,
        user_defined_symbols=symbols,
        control_symbols=list(end_symbols),
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        max_sentence_length=2**30,  # longer ones would be skipped in silence
        num_threads=1,
        minloglevel=2,  # errors only
      )
    except RuntimeError as error:
      raise ValueError(
        "a tokenizer's texts must hold at least one character that no symbol"
        f" covers, got {len(texts)} texts and {len(symbols)} symbols"
        f" (sentencepiece: {error})"
      ) from error
    tokenizer = cls(model.getvalue())
    if path is not None:
      tokenizer.save(path)
    return tokenizer

  @classmethod
  def load(cls, path: str | os.PathLike) -> "PieceTokenizer":
    """Reads a stored model.

    Raises:
      ValueError: there is no file at `path`, or it is no sentencepiece model.
    """
    try:
      with open(path, "rb") as file:
        return cls(file.read())
    except (OSError, RuntimeError) as error:
      raise ValueError(
        "a tokenizer's path must name a stored sentencepiece model, got"
        f" {os.fspath(path)!r} ({error})"
      ) from error

  def save(self, path: str | os.PathLike) -> None:
    """Stores the model at `path`, whole or not at all."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    part = f"{os.fspath(path)}.{os.getpid()}.part"
    with open(part, "wb") as file:
      file.write(self._model)
    os.replace(part, path)

  def store(self, folder: str | os.PathLike) -> None:
    """Stores the model in `folder`, as `tokenizer.model`."""
    self.save(os.path.join(folder, "tokenizer.model"))

  def encode(self, text: str) -> Int32[np.ndarray, " T"]:
    """Token ids of `text`, with no end and no begin token added.

    Raises:
      ValueError: a piece of `text` is not in the vocabulary.
    """
    tokens = np.array(self._processor.encode(text), np.int32)
    unknown = np.flatnonzero(tokens == self._processor.unk_id())
    if unknown.size or _SPACE in text:
      piece = _SPACE
      if unknown.size:
        piece = self._processor.encode(text, out_type=str)[unknown[0]]
      raise ValueError(
        f"text to encode must be made of the tokenizer's {self.vocab_size}"
        f" pieces, got {text!r} with the unknown piece {piece!r}; train the"
        " tokenizer on such text or change the text"
      )
    return tokens

  def decode(self, tokens: Sequence[int] | Int[np.ndarray, " T"]) -> str:
    """The text of `tokens`; padding and end tokens leave no trace.

    Stops at nothing: cut at the completion's length first.
    """
    row = np.asarray(tokens, np.int32).reshape(1, -1)
    return self.decode_batch(row, np.array([row.shape[1]], np.int32))[0]

  def decode_batch(
    self, tokens: Int[np.ndarray, "N T"], lengths: Int[np.ndarray, " N"]
  ) -> list[str]:
    """The texts of the first `lengths[i]` tokens of each row; fast.

    Raises:
      ValueError: an id among those tokens is outside the vocabulary.
    """
    # Whatever lies beyond a row's length may be anything: read it as padding.
    inside = np.arange(tokens.shape[1]) < lengths[:, None]
    tokens = np.where(inside, tokens, self.pad_id)
    outside = (tokens < 0) | (tokens >= self.vocab_size)
    if outside.any():
      raise ValueError(
        f"tokens to decode must be in 0..{self.vocab_size - 1}, got"
        f" {int(tokens[outside][0])}"
      )
    return ["".join(row) for row in self._texts[tokens].tolist()]

  def write_prompt(self, question: str) -> str:
    """The question itself: these tokenizers know no conversation."""
    return question

  def _text(self, piece: int) -> str:
    if self._processor.is_control(piece):
      return ""
    if self._processor.is_unknown(piece):
      return _UNKNOWN
    return self._processor.id_to_piece(piece).replace(_SPACE, " ")
