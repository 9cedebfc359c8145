"""Parquet files, good and bad."""

import pyarrow as pa
import pyarrow.parquet
import pytest

from scalerl_jax.data.prompts import Columns, Line
from scalerl_jax.data.tables import read_parquet


def write(tmp_path, **columns):
  path = tmp_path / "questions.parquet"
  pyarrow.parquet.write_table(pa.table(columns), path)
  return path


def test_rows_are_read_in_order(tmp_path):
  path = write(
    tmp_path,
    prompt=["1+1", "é=?", "3"],
    answer=["2", "x=3", "b\nc"],
    other=[1, 2, 3],
  )
  assert read_parquet(path) == [
    Line("1+1", "2"),
    Line("é=?", "x=3"),
    Line("3", "b\nc"),
  ]


def test_columns_are_named_and_typed(tmp_path):
  path = write(
    tmp_path,
    problem=[b"3 \xc3\x97 4?", b"5"],
    value=[12, -5],
    difficulty=[2, 1],
  )
  assert read_parquet(path, Columns("problem", "value")) == [
    Line("3 × 4?", "12", 2.0),
    Line("5", "-5", 1.0),
  ]


@pytest.mark.parametrize(
  ("columns", "message"),
  [
    ({"prompt": ["a"]}, r"the columns prompt, answer, got no 'answer' among"),
    ({"prompt": ["a", "a"], "answer": ["1", "2"]}, r"row 1: .*first on row 0"),
    ({"prompt": ["a", None], "answer": ["1", "2"]}, r"row 1: .*got None as"),
    ({"prompt": ["a"], "answer": [1.5]}, r"row 0: .*got 1\.5 as 'answer'"),
    ({"prompt": ["a"], "answer": [True]}, r"got True as 'answer'"),
    ({"prompt": pa.array([], "string"), "answer": []}, r"got an empty file"),
  ],
)
def test_a_bad_file_is_one_sentence(tmp_path, columns, message):
  with pytest.raises(ValueError, match=message):
    read_parquet(write(tmp_path, **columns))


def test_no_file_is_one_sentence(tmp_path):
  (tmp_path / "text").write_text("1+1")
  for name in ("text", "nothing"):
    with pytest.raises(ValueError, match=r"must name a Parquet file .*got"):
      read_parquet(tmp_path / name)
