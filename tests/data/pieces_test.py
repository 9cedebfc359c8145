"""Tokenizers: exact round trips, fixed ids, batch decode equal to decode."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.data.pieces import PieceTokenizer

SYMBOLS = ["+a", "*0", "a,b", "=", "."]


@pytest.fixture(scope="module")
def tokenizer():
  return PieceTokenizer.train(
    ["0ab1", "two words\n\tand 3 lines\r\n"],
    symbols=SYMBOLS,
    end_symbols=["<|end|>"],
  )


def test_ids_are_pad_end_unknown_ends_symbols_characters(tokenizer):
  assert tokenizer.pieces[:9] == (
    *("<pad>", "</s>", "<unk>", "<|end|>"),
    *SYMBOLS,
  )
  assert tokenizer.pad_id == 0
  assert tokenizer.eos_ids == (1, 3)
  assert tokenizer.vocab_size == len(tokenizer.pieces)
  assert len(set(tokenizer.pieces)) == tokenizer.vocab_size


def test_symbols_are_one_token_wherever_they_stand(tokenizer):
  tokens = tokenizer.encode("1+a*0a,b=.a")
  assert tokens.dtype == np.int32
  expected = ["1", "+a", "*0", "a,b", "=", ".", "a"]
  assert [tokenizer.pieces[token] for token in tokens] == expected


@settings(max_examples=100, deadline=None)
@given(st.text("01ab3w \n\t\r=.", max_size=30))
def test_text_comes_back_exactly(tokenizer, text):
  assert tokenizer.decode(tokenizer.encode(text)) == text


def test_same_input_gives_the_same_bytes(tmp_path):
  for name in ("first", "second"):
    PieceTokenizer.train(["0123", "cab"], tmp_path / name, symbols=["+1", "="])
  first = (tmp_path / "first").read_bytes()
  assert first == (tmp_path / "second").read_bytes()
  assert sorted(p.name for p in tmp_path.iterdir()) == ["first", "second"]


def test_equally_frequent_characters_are_in_order():
  shuffled = PieceTokenizer.train(["f0a1"], symbols=["="])
  assert shuffled.pieces[4:] == ("0", "1", "a", "f")


def test_training_and_loading_say_nothing(capfd, tmp_path):
  path = tmp_path / "deep" / "tokenizer.model"
  trained = PieceTokenizer.train(["0123"], path, symbols=["="])
  loaded = PieceTokenizer.load(path)
  assert loaded.pieces == trained.pieces
  assert loaded.eos_ids == trained.eos_ids
  np.testing.assert_array_equal(loaded.encode("3=0"), trained.encode("3=0"))
  assert capfd.readouterr() == ("", "")


def test_long_texts_are_not_skipped():
  tokenizer = PieceTokenizer.train(["x" * 10_000 + "y"])
  assert tokenizer.decode(tokenizer.encode("yx")) == "yx"


def test_batch_decode_equals_decode_and_ignores_what_lies_beyond(tokenizer):
  rng = np.random.default_rng(0)
  tokens = rng.integers(tokenizer.vocab_size, size=(7, 5)).astype(np.int32)
  lengths = np.array([0, 1, 2, 3, 4, 5, 5], np.int32)
  expected = [
    tokenizer.decode(row[:length].tolist())
    for row, length in zip(tokens, lengths, strict=True)
  ]
  tokens[np.arange(5) >= lengths[:, None]] = -77
  assert tokenizer.decode_batch(tokens, lengths) == expected


def test_decode_agrees_with_pieces_and_drops_pad_and_ends(tokenizer):
  zero, one = (int(tokenizer.encode(c).item()) for c in "01")
  row = [zero, 0, one, 1, zero, 3, one]
  assert tokenizer.decode(row) == "0101"
  assert tokenizer.decode([2, one]) == "\ufffd1"  # an unknown piece, sampled


def test_end_pieces_cannot_be_written(tokenizer):
  for text in ("</s>", "<pad>", "<|end|>"):
    with pytest.raises(ValueError, match="unknown piece '<"):
      tokenizer.encode(text)


@pytest.mark.parametrize(
  ("text", "piece"), [("10?b", "?"), ("éé0", "éé"), ("0\u2581", "\u2581")]
)
def test_unknown_text_is_refused_with_text_and_piece(tokenizer, text, piece):
  with pytest.raises(ValueError, match="must be made of") as refusal:
    tokenizer.encode(text)
  assert repr(text) in str(refusal.value)
  assert f"unknown piece {piece!r}" in str(refusal.value)


@pytest.mark.parametrize("token", [-1, 10_000])
def test_ids_outside_the_vocabulary_are_refused(tokenizer, token):
  with pytest.raises(ValueError, match=f"must be in 0.*got {token}"):
    tokenizer.decode([4, token])


def test_texts_that_symbols_cover_are_refused():
  with pytest.raises(ValueError, match="no symbol covers, got 1 texts"):
    PieceTokenizer.train(["=="], symbols=["="])


def test_bad_files_are_refused(tmp_path):
  with pytest.raises(ValueError, match="must name a stored sentencepiece"):
    PieceTokenizer.load(tmp_path / "nothing")
  (tmp_path / "junk").write_bytes(b"no model")
  with pytest.raises(ValueError, match="must name a stored sentencepiece"):
    PieceTokenizer.load(tmp_path / "junk")
