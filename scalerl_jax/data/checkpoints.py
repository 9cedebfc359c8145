"""The tokenizer of a published checkpoint, read from its folder.

A Hugging Face folder: `tokenizer.json`, and what `tokenizer_config.json`,
`generation_config.json`, `config.json` and the chat template say.
"""

import json
import os
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Int, Int32

from scalerl_jax.data.chat import ChatTemplate

_FILES = (
  "tokenizer.json",
  "tokenizer_config.json",
  "generation_config.json",
  "config.json",
  "chat_template.jinja",
)
_UNKNOWN = "\ufffd"


class CheckpointTokenizer:
  """Text to token ids and back, as the checkpoint's own tokenizer does it.

  Special tokens that stand in a text are encoded as themselves: that is how a
  chat template writes them.
  """

  def __init__(self, folder: str | os.PathLike):
    """Reads the tokenizer of a checkpoint's folder.

    End tokens are those of `generation_config.json` and `config.json`, and
    `eos_token` of `tokenizer_config.json`, which comes first. Without a
    padding token of its own the first end token pads.

    Raises:
      ValueError: no such folder or `tokenizer.json`, a file that cannot be
        read, no end token, one outside the vocabulary, more tokens than the
        model has rows for, or a chat template that is not Jinja.
    """
    self.folder = pathlib.Path(folder)
    self._tokenizer = _read_tokenizer(self.folder)
    config, generation, settings = (
      self._read_json(name)
      for name in (
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
      )
    )
    config = {**config, **config.get("text_config", {})}
    self._special_tokens = _special_tokens(settings)
    self.vocab_size: int = self._vocab_size(config)
    self.eos_ids: tuple[int, ...] = self._ends(
      generation.get("eos_token_id"), config.get("eos_token_id")
    )
    self.pad_id: int = self._padding(
      generation.get("pad_token_id"), config.get("pad_token_id")
    )
    self._silent = np.array([*self.eos_ids, self.pad_id])
    names = (self._tokenizer.id_to_token(i) for i in range(self.vocab_size))
    # A model may have more rows than there are tokens.
    self.pieces: tuple[str, ...] = tuple(
      f"<unused {i}>" if name is None else name for i, name in enumerate(names)
    )
    self._template = self._chat_template(settings.get("chat_template"))

  @property
  def has_chat(self) -> bool:
    """Whether the checkpoint has a chat template."""
    return self._template is not None

  def chat(
    self,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
  ) -> str:
    """A conversation as text, by the checkpoint's template.

    Args:
      messages: each with its "role" and "content", oldest first.
      add_generation_prompt: whether the text ends where the model is to speak.

    Raises:
      ValueError: there is no template, or it fails on these messages.
    """
    if self._template is None:
      raise ValueError(
        "a conversation must have a chat template, got none in"
        f" {str(self.folder)!r}; use a checkpoint that was tuned on"
        " conversations"
      )
    return self._template.render(
      messages, add_generation_prompt=add_generation_prompt
    )

  def write_prompt(self, question: str) -> str:
    """The question as a user's message; for a base model, as a text begins."""
    if self._template is not None:
      return self.chat([{"role": "user", "content": question}])
    begin = self._special_tokens.get("bos_token", "")
    # Asked of the tokenizer itself: most that have the token do not want it.
    first = self._tokenizer.encode("a", add_special_tokens=True).ids[:1]
    wanted = first == [self._tokenizer.token_to_id(begin)]
    return begin + question if wanted else question

  def encode(self, text: str) -> Int32[np.ndarray, " T"]:
    """Token ids of `text`; no begin or end token is added."""
    found = self._tokenizer.encode(text, add_special_tokens=False)
    return np.array(found.ids, np.int32)

  def decode(self, tokens: Sequence[int] | Int[np.ndarray, " T"]) -> str:
    """The text of `tokens`; padding and end tokens leave no trace.

    Bytes that make no character, and ids that are no token, become U+FFFD.
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
    inside = np.arange(tokens.shape[1]) < lengths[:, None]
    outside = inside & ((tokens < 0) | (tokens >= self.vocab_size))
    if outside.any():
      raise ValueError(
        f"tokens to decode must be in 0..{self.vocab_size - 1}, got"
        f" {int(tokens[outside][0])}"
      )
    inside &= ~np.isin(tokens, self._silent)
    rows = [
      row[keep].tolist() for row, keep in zip(tokens, inside, strict=True)
    ]
    nameless = inside & (tokens >= self._tokens)
    texts = self._tokenizer.decode_batch(rows, skip_special_tokens=False)
    for row in np.flatnonzero(nameless.any(axis=1)).tolist():
      texts[row] = self._decode_around(rows[row])
    return texts

  def store(self, folder: str | os.PathLike) -> None:
    """Copies its files into `folder`, below `tokenizer/`."""
    into = pathlib.Path(folder) / "tokenizer"
    into.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
      if (self.folder / name).exists():
        part = into / f"{name}.{os.getpid()}.part"
        shutil.copyfile(self.folder / name, part)
        part.replace(into / name)

  def _decode_around(self, tokens: list[int]) -> str:
    """The text of tokens some of which the tokenizer has no name for."""
    texts, run = [], []
    for token in tokens:
      if token < self._tokens:
        run.append(token)
        continue
      texts += [self._tokenizer.decode(run, skip_special_tokens=False)]
      texts += [_UNKNOWN]
      run = []
    texts += [self._tokenizer.decode(run, skip_special_tokens=False)]
    return "".join(texts)

  def _vocab_size(self, config: Mapping[str, Any]) -> int:
    # Ids may have gaps: the largest decides, not their number.
    vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
    self._tokens = max(vocabulary.values()) + 1
    rows = config.get("vocab_size", self._tokens)
    if self._tokens > rows:
      raise ValueError(
        f"the tokenizer of {str(self.folder)!r} must fit into the model's"
        f" {rows} embeddings (vocab_size of config.json), got"
        f" {self._tokens} tokens; use the tokenizer that belongs to the model"
      )
    return int(rows)

  def _ends(self, *listed: int | list[int] | None) -> tuple[int, ...]:
    found = [self._id(self._special_tokens.get("eos_token"))]
    for ids in listed:
      found += ids if isinstance(ids, list) else [ids]
    ends = tuple(dict.fromkeys(i for i in found if i is not None))
    if not ends or not all(0 <= end < self.vocab_size for end in ends):
      raise ValueError(
        f"the tokenizer of {str(self.folder)!r} must have an end token among"
        f" its {self.vocab_size} tokens, got {ends or 'none'}; name one as"
        " eos_token_id in generation_config.json"
      )
    return ends

  def _padding(self, *listed: int | None) -> int:
    for pad in (self._id(self._special_tokens.get("pad_token")), *listed):
      # Some checkpoints say -1 where they have none.
      if pad is not None and 0 <= pad < self.vocab_size:
        return pad
    return self.eos_ids[0]

  def _id(self, text: str | None) -> int | None:
    return None if text is None else self._tokenizer.token_to_id(text)

  def _chat_template(self, listed: Any) -> ChatTemplate | None:
    path = self.folder / "chat_template.jinja"
    if path.exists():
      source = path.read_text(encoding="utf-8")
    elif isinstance(listed, list):  # several, by name
      named = {entry["name"]: entry["template"] for entry in listed}
      source = named.get("default")
    else:
      source = listed
    if source is None:
      return None
    return ChatTemplate(source, self._special_tokens)

  def _read_json(self, name: str) -> dict[str, Any]:
    path = self.folder / name
    if not path.exists():
      return {}
    try:
      found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
      raise ValueError(
        f"{str(path)!r} must hold JSON, got something else ({error}); fetch"
        " the checkpoint again"
      ) from error
    if not isinstance(found, dict):
      raise ValueError(
        f"{str(path)!r} must hold a JSON object, got {type(found).__name__};"
        " fetch the checkpoint again"
      )
    return found


def load_tokenizer(checkpoint: str | os.PathLike) -> CheckpointTokenizer:
  """The tokenizer of a checkpoint: a folder, or a name on the hub.

  A name is fetched once, without weights, and kept in the hub's own cache.

  Raises:
    ValueError: neither a folder nor a name that can be fetched, or what
      `CheckpointTokenizer` refuses.
  """
  if os.path.isdir(checkpoint):
    return CheckpointTokenizer(checkpoint)
  import huggingface_hub

  try:
    folder = huggingface_hub.snapshot_download(
      os.fspath(checkpoint), allow_patterns=list(_FILES)
    )
  except (OSError, ValueError) as error:  # no such name, no network
    raise ValueError(
      "a checkpoint must be a folder or a name on the hub like 'owner/name',"
      f" got {os.fspath(checkpoint)!r} ({str(error).splitlines()[0]})"
    ) from error
  return CheckpointTokenizer(folder)


def _read_tokenizer(folder: pathlib.Path) -> tokenizers.Tokenizer:
  path = folder / "tokenizer.json"
  try:
    text = path.read_text(encoding="utf-8")
    found = tokenizers.Tokenizer.from_str(text)
  except Exception as error:  # the library raises Exception itself
    raise ValueError(
      f"a checkpoint's folder must hold a tokenizer.json, got {str(folder)!r}"
      f" ({error}); fetch the checkpoint with its tokenizer"
    ) from error
  # Some files keep the settings of the batch they were saved with.
  found.no_truncation()
  found.no_padding()
  return found


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
  """Texts of `bos_token` and the like; some files hold objects instead."""
  return {
    name: value["content"] if isinstance(value, dict) else value
    for name, value in settings.items()
    if name.endswith("_token") and isinstance(value, str | dict)
  }
