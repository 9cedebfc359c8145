"""Tokenizers of checkpoints: `transformers` as the oracle, and bad folders."""

import json
import pathlib
import shutil

import numpy as np
import pytest

from scalerl_jax.data.checkpoints import CheckpointTokenizer, load_tokenizer
from scalerl_jax.data.tokenizers import Tokenizer
from tests.fixtures.byte_tokenizer import END, save_byte_tokenizer

SMOLLM2 = pathlib.Path(__file__).parents[1] / "fixtures/smollm2"
CASES = json.loads((SMOLLM2 / "reference.json").read_text())["cases"]


@pytest.fixture(scope="module")
def smollm2():
  return load_tokenizer(SMOLLM2)


@pytest.fixture
def folder(tmp_path):
  return save_byte_tokenizer(tmp_path / "checkpoint")


def write(folder, name, **values):
  (folder / f"{name}.json").write_text(json.dumps(values))


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_text_and_ids_are_those_of_transformers(smollm2, case):
  assert smollm2.chat(case["messages"]) == case["text"]
  tokens = smollm2.encode(case["text"])
  assert tokens.dtype == np.int32
  assert tokens.tolist() == case["input_ids"]
  shown = case["greedy_text"].replace("<|im_end|>", "")
  assert smollm2.decode(case["greedy"]) == shown


def test_a_question_is_a_users_message(smollm2):
  text = smollm2.write_prompt("What is 17 + 25?")
  assert text == CASES[0]["text"]
  assert smollm2.has_chat


def test_padding_may_be_an_end_token(smollm2):
  assert smollm2.pad_id == 2
  assert smollm2.eos_ids == (2,)
  assert smollm2.vocab_size == 49152
  assert isinstance(smollm2, Tokenizer)


def test_pieces_name_every_id(smollm2):
  assert len(smollm2.pieces) == smollm2.vocab_size
  assert len(set(smollm2.pieces)) == smollm2.vocab_size
  assert smollm2.pieces[1] == "<|im_start|>"


def test_ends_of_all_files_are_ends(folder):
  write(folder, "generation_config", eos_token_id=[5, 7], pad_token_id=3)
  write(folder, "config", eos_token_id=7, vocab_size=400, pad_token_id=-1)
  tokenizer = CheckpointTokenizer(folder)
  end = tokenizer.pieces.index(END)
  # The one that the tokenizer names ends our own texts.
  assert tokenizer.eos_ids == (end, 5, 7)
  assert tokenizer.pad_id == 3


def test_without_a_padding_token_the_end_pads(folder):
  write(folder, "config", pad_token_id=-1)
  tokenizer = CheckpointTokenizer(folder)
  assert tokenizer.pad_id == tokenizer.eos_ids[0]


def test_settings_may_hold_objects(folder):
  write(folder, "tokenizer_config", eos_token={"content": END, "special": True})
  tokenizer = CheckpointTokenizer(folder)
  assert tokenizer.pieces[tokenizer.eos_ids[0]] == END


def test_bytes_come_back(folder):
  tokenizer = CheckpointTokenizer(folder)
  text = "naïve café — 北京 🚀\n\tx  y"
  assert tokenizer.decode(tokenizer.encode(text)) == text
  assert tokenizer.decode(tokenizer.encode("🚀")[:-1]) == "\ufffd"


def test_batch_decode_reads_only_what_was_written(folder):
  write(folder, "config", vocab_size=400)
  tokenizer = CheckpointTokenizer(folder)
  one, two = tokenizer.encode("ab 1"), tokenizer.encode("京")
  tokens = np.full((3, 9), 399, np.int32)
  tokens[0, : len(one)], tokens[1, : len(two)] = one, two
  tokens[0, len(one)] = tokenizer.eos_ids[0]
  tokens[2, :3] = [one[0], 399, one[1]]
  lengths = np.array([len(one) + 1, len(two), 3])
  # 399 is a row of the model that no token has.
  assert tokenizer.decode_batch(tokens, lengths) == ["ab 1", "京", "a\ufffdb"]
  for outside in (400, -1):
    with pytest.raises(ValueError, match=rf"in 0\.\.399, got {outside}"):
      tokenizer.decode([outside])


def test_a_base_model_gets_its_begin_token(tmp_path):
  plain = CheckpointTokenizer(save_byte_tokenizer(tmp_path / "plain"))
  assert plain.write_prompt("1 + 1?") == "1 + 1?"
  assert not plain.has_chat
  begins = CheckpointTokenizer(
    save_byte_tokenizer(tmp_path / "begins", adds_begin=True)
  )
  assert begins.write_prompt("1 + 1?") == "<s>1 + 1?"
  begin = begins.pieces.index("<s>")
  assert begins.encode("<s>1").tolist().count(begin) == 1
  with pytest.raises(ValueError, match="must have a chat template, got none"):
    plain.chat([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
  "listed",
  [
    "T",
    [{"name": "rag", "template": "R"}, {"name": "default", "template": "T"}],
  ],
)
def test_the_template_may_stand_in_the_settings(folder, listed):
  write(folder, "tokenizer_config", eos_token=END, chat_template=listed)
  assert CheckpointTokenizer(folder).chat([]) == "T"
  (folder / "chat_template.jinja").write_text("file")
  assert CheckpointTokenizer(folder).chat([]) == "file"


def test_what_is_stored_is_the_same_tokenizer(tmp_path, smollm2):
  smollm2.store(tmp_path)
  smollm2.store(tmp_path)  # a resumed run stores again
  stored = CheckpointTokenizer(tmp_path / "tokenizer")
  assert stored.pieces == smollm2.pieces
  assert stored.write_prompt("a") == smollm2.write_prompt("a")
  assert not list(tmp_path.glob("**/*.part"))


def test_saved_padding_and_truncation_are_off(folder):
  values = json.loads((folder / "tokenizer.json").read_text())
  values["truncation"] = {
    "direction": "Right",
    "max_length": 3,
    "strategy": "LongestFirst",
    "stride": 0,
  }
  (folder / "tokenizer.json").write_text(json.dumps(values))
  assert len(CheckpointTokenizer(folder).encode("abcdefgh")) == 8


@pytest.mark.parametrize(
  ("files", "message"),
  [
    ({"tokenizer_config": "{}"}, r"must have an end token .* got none; "),
    ({"config": '{"eos_token_id": 999}'}, r"end token among its \d+ tokens"),
    ({"config": '{"vocab_size": 7}'}, r"7 embeddings .* got 259 tokens; "),
    ({"config": "{"}, r"config\.json' must hold JSON"),
    ({"config": "[1]"}, r"must hold a JSON object, got list"),
    ({"tokenizer": "{}"}, r"must hold a tokenizer\.json"),
  ],
)
def test_a_bad_folder_is_one_sentence(folder, files, message):
  for name, text in files.items():
    (folder / f"{name}.json").write_text(text)
  with pytest.raises(ValueError, match=message):
    load_tokenizer(folder)


def test_no_checkpoint_is_one_sentence(tmp_path):
  (tmp_path / "empty").mkdir()
  with pytest.raises(ValueError, match=r"must hold a tokenizer\.json, got"):
    load_tokenizer(tmp_path / "empty")
  with pytest.raises(ValueError, match=r"a folder or a name on the hub"):
    load_tokenizer(tmp_path / "nowhere")
  shutil.copytree(SMOLLM2, tmp_path / "broken")
  (tmp_path / "broken/chat_template.jinja").write_text("{% if")
  with pytest.raises(ValueError, match="valid Jinja"):
    load_tokenizer(tmp_path / "broken")
