"""Incremental detokenisation, over both kinds of tokenizers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.data.checkpoints import CheckpointTokenizer
from scalerl_jax.data.pieces import PieceTokenizer
from scalerl_jax.data.tokenizers import TextStream, Tokenizer
from tests.fixtures.byte_tokenizer import save_byte_tokenizer


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
  folder = tmp_path_factory.mktemp("tokenizer") / "checkpoint"
  return CheckpointTokenizer(save_byte_tokenizer(folder))


@settings(max_examples=60, deadline=None)
@given(
  tokens=st.lists(st.integers(0, 258), max_size=12), size=st.integers(1, 3)
)
def test_parts_join_to_the_whole_whatever_the_bytes(
  byte_tokenizer, tokens, size
):
  stream = TextStream(byte_tokenizer)
  parts = [
    stream.push(tokens[at : at + size]) for at in range(0, len(tokens), size)
  ]
  assert "".join([*parts, stream.finish()]) == byte_tokenizer.decode(tokens)


@settings(max_examples=60, deadline=None)
@given(text=st.text("a é京🚀\u0301", max_size=9))
def test_no_part_ends_within_a_character(byte_tokenizer, text):
  stream = TextStream(byte_tokenizer)
  parts = [
    stream.push([token]) for token in byte_tokenizer.encode(text).tolist()
  ]
  assert "".join(parts) == text  # so nothing is held at the end
  assert stream.finish() == ""
  assert not any("\ufffd" in part for part in parts)


def test_a_character_waits_for_its_last_byte(byte_tokenizer):
  stream = TextStream(byte_tokenizer)
  parts = [
    stream.push([token]) for token in byte_tokenizer.encode("a🚀b").tolist()
  ]
  assert parts == ["a", "", "", "", "🚀", "b"]


def test_half_a_character_is_given_out_at_the_end_only(byte_tokenizer):
  stream = TextStream(byte_tokenizer)
  assert stream.push(byte_tokenizer.encode("🚀")[:2].tolist()) == ""
  assert stream.finish() == "\ufffd"


def test_end_tokens_leave_no_trace(byte_tokenizer):
  stream = TextStream(byte_tokenizer)
  tokens = [*byte_tokenizer.encode("a").tolist(), *byte_tokenizer.eos_ids]
  assert [stream.push([token]) for token in tokens] == ["a", ""]


def test_both_kinds_have_the_interface(byte_tokenizer):
  for tokenizer in (byte_tokenizer, PieceTokenizer.train(["01"])):
    assert isinstance(tokenizer, Tokenizer)
    assert len(tokenizer.pieces) == tokenizer.vocab_size
    assert tokenizer.decode(tokenizer.encode("0 1".replace(" ", ""))) == "01"
