"""JSONL files, good and bad; the split; padded supervised texts."""

import json

import numpy as np
import pytest

from scalerl_jax.data import prompts
from scalerl_jax.data.prompts import Line
from scalerl_jax.types import Prompt

GOOD = '{"prompt": "1+1", "answer": "2"}'


def prompt(uid, text, length=3):
  return Prompt(uid, text, np.zeros(length, np.int32), "0")


def write(tmp_path, *lines, end="\n"):
  path = tmp_path / "questions.jsonl"
  path.write_bytes(
    b"\n".join(x if isinstance(x, bytes) else x.encode() for x in lines)
    + end.encode()
  )
  return path


@pytest.mark.parametrize("end", ["", "\n", "\n\n", "\r\n"])
def test_lines_are_read_in_order_and_blank_ones_pass(tmp_path, end):
  texts = [("1+1", "2"), ("é=?", "x=3"), ("2\u20283", "b\nc")]
  rows = [
    json.dumps({"answer": a, "id": 7, "prompt": p}, ensure_ascii=False)
    for p, a in texts
  ]
  path = write(tmp_path, rows[0], "", rows[1], "  ", rows[2], end=end)
  assert prompts.read_jsonl(path) == [Line(*pair) for pair in texts]


def test_difficulty_is_read_where_a_line_has_it(tmp_path):
  given = ["", "0", "3", "-2.5", "1e3"]
  rows = [
    f'{{"prompt": "{i}", "answer": "0"' + (d and f', "difficulty": {d}') + "}"
    for i, d in enumerate(given)
  ]
  lines = prompts.read_jsonl(write(tmp_path, *rows))
  assert [line.difficulty for line in lines] == [0.0, 0.0, 3.0, -2.5, 1000.0]
  assert all(type(line.difficulty) is float for line in lines)


NO_NUMBERS = {
  "text": '"hard"',
  "number in text": '"3"',
  "null": "null",
  "truth": "true",
  "list": "[1]",
  "not a number": "NaN",
  "infinity": "-Infinity",
  "beyond float": "1e999",
  "integer beyond float": "1" + "0" * 400,
}


@pytest.mark.parametrize("name", NO_NUMBERS)
def test_a_difficulty_that_is_no_finite_number_is_refused(tmp_path, name):
  bad = GOOD[:-1].replace("1+1", "2") + f', "difficulty": {NO_NUMBERS[name]}}}'
  path = write(tmp_path, GOOD, bad)
  with pytest.raises(ValueError, match="must be a finite number") as refusal:
    prompts.read_jsonl(path)
  message = str(refusal.value)
  assert message.startswith(f'{path}, line 2: "difficulty" must be')
  assert len(message) < len(str(path)) + 200


BAD_LINES = {
  "not JSON": ("1+1 = 2", "must be a JSON object"),
  "cut": ('{"prompt": "1+1", "ans', "must be a JSON object"),
  "list": ('["1+1", "2"]', "got list"),
  "no answer": ('{"prompt": "3"}', "got no 'answer' among ['prompt']"),
  "number": ('{"prompt": "3", "answer": 2}', "got 2 as 'answer'"),
  "empty prompt": ('{"prompt": " ", "answer": "2"}', "got ' ' as 'prompt'"),
  "not UTF-8": (b'{"prompt": "\xff", "answer": "2"}', "in UTF-8"),
  "nested": ("[" * 100_000, "must be a JSON object"),
  "endless": ('{"difficulty": ' + "1" * 5000 + "}", "must be a JSON object"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named_with_file_number_and_rule(tmp_path, name):
  line, rule = BAD_LINES[name]
  path = write(tmp_path, GOOD, "", line)
  with pytest.raises(ValueError, match="must be a JSON object") as refusal:
    prompts.read_jsonl(path)
  message = str(refusal.value)
  assert message.startswith(f"{path}, line 3: ")
  assert rule in message
  assert "\n" not in message


def test_a_prompt_twice_is_named_with_both_lines(tmp_path):
  again = '{"prompt": "1+1", "answer": "3"}'
  path = write(tmp_path, "", GOOD, '{"prompt": "0", "answer": "0"}', again)
  with pytest.raises(ValueError, match=r"line 4: .*'1\+1'.*first on line 2"):
    prompts.read_jsonl(path)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_refused(tmp_path, content):
  path = write(tmp_path, content)
  with pytest.raises(ValueError, match=r"at least one line.*got an empty file"):
    prompts.read_jsonl(path)


def test_a_missing_file_is_refused(tmp_path):
  with pytest.raises(ValueError, match=r"task\.path must name a JSONL file"):
    prompts.read_jsonl(tmp_path / "none.jsonl")


def test_split_takes_both_ends_and_refuses_too_few():
  lines = [Line(text, "0") for text in "abcdefg"]
  train, heldout = prompts.split_lines(lines, train=4, heldout=3)
  assert train == lines[:4]
  assert heldout == lines[4:]
  with pytest.raises(ValueError, match=r"\(5 \+ 3 = 8\).*at most the 7"):
    prompts.split_lines(lines, train=5, heldout=3)


def test_prompts_beyond_the_budget_are_counted():
  rows = [prompt(0, "a", 5), prompt(1, "b", 6), prompt(2, "c", 9)]
  prompts.check_lengths(rows, 9)
  with pytest.raises(ValueError, match=r"got 2 of 3.*longest with 9 .*'c'"):
    prompts.check_lengths(rows, 5)


def test_a_heldout_prompt_that_is_trained_on_is_refused():
  train = [prompt(0, "a"), prompt(1, "b")]
  prompts.check_split(train, {"x": [prompt(2, "c")], "y": [prompt(3, "c")]})
  with pytest.raises(ValueError, match="'b' in held-out set 'y'"):
    prompts.check_split(train, {"x": [prompt(2, "c")], "y": [prompt(3, "b")]})


@pytest.mark.parametrize("uids", [(0, 0, 1), (0, 1, 1), (0, 1, 0)])
def test_a_uid_is_used_once(uids):
  a, b, c = (prompt(uid, text) for uid, text in zip(uids, "abc", strict=True))
  with pytest.raises(ValueError, match="uids must be unique"):
    prompts.check_split([a, b], {"x": [c]})


def test_padded_texts_hold_prompt_completion_padding():
  batch = prompts.pad_texts(
    [np.array([5, 6], np.int32), np.array([7], np.int32)],
    [np.array([8, 1], np.int32), np.array([9, 9, 1], np.int32)],
    width=5,
    pad_id=1,  # as the end token: the mask does not look at ids
  )
  assert batch.tokens.tolist() == [[5, 6, 8, 1, 1], [7, 9, 9, 1, 1]]
  assert batch.mask.astype(int).tolist() == [[0, 0, 1, 1, 0], [0, 1, 1, 1, 0]]
  assert batch.lengths.tolist() == [4, 4]
