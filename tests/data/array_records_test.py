"""Datasets in ArrayRecord: written and read without TensorFlow."""

import json
import subprocess
import sys

import pytest

from scalerl_jax.data.array_records import (
  main,
  read_array_records,
  write_array_records,
)
from scalerl_jax.data.prompts import Columns, Line

LINES = [
  Line(f"{n} × {n} = ?" if n else "naïve\n北京", str(n * n), n / 2)
  for n in range(50)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return write_array_records(LINES, tmp_path_factory.mktemp("sets"))


def test_lines_come_back_in_their_order(folder):
  assert read_array_records(folder) == LINES
  assert folder.parts[-2:] == ("questions", "1.0.0")
  assert any("array_record" in path.name for path in folder.iterdir())


def test_features_are_named(folder):
  swapped = read_array_records(folder, Columns("prompt", "prompt"))
  assert [line.answer for line in swapped] == [line.prompt for line in LINES]
  with pytest.raises(ValueError, match=r"record 0: .*no 'problem' among"):
    read_array_records(folder, Columns("problem", "answer"))


def test_the_split_is_named(folder):
  with pytest.raises(ValueError, match=r"task\.split .* got 'test'; it has tr"):
    read_array_records(folder, split="test")


def test_no_dataset_is_one_sentence(tmp_path):
  with pytest.raises(ValueError, match=r"task\.path must name the folder of a"):
    read_array_records(tmp_path)


def test_another_format_is_one_sentence(folder, tmp_path):
  copy = tmp_path / "1.0.0"
  copy.mkdir()
  for path in folder.iterdir():
    if path.suffix == ".json":
      values = json.loads(path.read_text())
      if "fileFormat" in values:
        values["fileFormat"] = "tfrecord"
      (copy / path.name).write_text(json.dumps(values))
  with pytest.raises(ValueError, match="must be stored as ArrayRecord, got"):
    read_array_records(copy)


def test_a_jsonl_file_becomes_a_dataset(tmp_path, monkeypatch, capsys):
  path = tmp_path / "My-Set.jsonl"
  rows = [{"prompt": line.prompt, "answer": line.answer} for line in LINES]
  path.write_text("\n".join(map(json.dumps, rows)))
  monkeypatch.setattr(sys, "argv", ["", str(path), str(tmp_path / "sets")])
  main()
  told = capsys.readouterr().out.split()[-1]
  assert told.endswith("my_set/1.0.0")
  found = read_array_records(told)
  assert [line[:2] for line in found] == [line[:2] for line in LINES]
  monkeypatch.setattr(sys, "argv", [""])
  with pytest.raises(SystemExit, match="FOLDER"):
    main()


def test_tensorflow_is_not_asked_for(folder):
  code = (
    "import sys\n"
    "from scalerl_jax.data.array_records import read_array_records\n"
    f"print(len(read_array_records({str(folder)!r})))\n"
    "print('tensorflow' in sys.modules)"
  )
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  assert done.stdout.split() == ["50", "False"]
