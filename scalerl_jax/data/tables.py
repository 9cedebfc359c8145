"""Questions of Parquet files, read by pyarrow."""

import os
from collections.abc import Mapping
from typing import Any

from scalerl_jax.data.prompts import COLUMNS, Columns, Line, make_lines


def read_parquet(
  path: str | os.PathLike, columns: Columns = COLUMNS
) -> list[Line]:
  """Reads a row a question; whole numbers are answers, too.

  Args:
    path: the file.
    columns: the names of the columns of prompt and answer; a third one,
      "difficulty", is read where there is one.

  Raises:
    ValueError: no such file or column, no row, a row that breaks the rule, or
      a prompt that occurs twice.
  """
  import pyarrow
  import pyarrow.parquet

  name = os.fspath(path)
  try:
    file = pyarrow.parquet.ParquetFile(name)
  except (OSError, pyarrow.ArrowException) as error:
    raise ValueError(
      f"task.path must name a Parquet file that can be read, got {name!r}"
      f" ({str(error).splitlines()[0]})"
    ) from error
  with file:
    known = file.schema_arrow.names
    for column in columns:
      if column not in known:
        raise ValueError(
          f"{name} must have the columns {', '.join(columns)}, got no"
          f" {column!r} among {known}; set task.prompt_column and"
          " task.answer_column"
        )
    wanted = [n for n in (*columns, "difficulty") if n in known]
    rows = file.read(columns=wanted).to_pylist()
  records = ((f"row {n}", plain_record(row)) for n, row in enumerate(rows))
  return make_lines(name, records, columns)


def plain_record(row: Mapping[str, Any]) -> dict[str, Any]:
  """A record of a typed file as JSON would have it: text is text.

  Bytes are decoded here, once; whole numbers become text, except as a
  difficulty.

  >>> plain_record(
  ...   {"answer": 12, "prompt": b"3 \\xc3\\x97 4?", "difficulty": 2}
  ... )
  {'answer': '12', 'prompt': '3 × 4?', 'difficulty': 2}
  """

  def plain(key: str, value: Any) -> Any:
    if isinstance(value, bytes):
      return value.decode("utf-8", errors="replace")
    if isinstance(value, int) and not isinstance(value, bool):
      return value if key == "difficulty" else str(value)
    return value

  return {key: plain(key, value) for key, value in row.items()}
