"""Questions as a tensorflow-datasets folder, without TensorFlow.

Only builders that write ArrayRecord work without it, so there is one here, and
folders are read through `as_data_source`, at random.
"""

import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from scalerl_jax.data.prompts import (
  COLUMNS,
  Columns,
  Line,
  make_lines,
  read_jsonl,
)
from scalerl_jax.data.tables import plain_record

_READ_AT_ONCE = 4096  # records


def write_array_records(
  lines: Sequence[Line], folder: str | os.PathLike, *, name: str = "questions"
) -> pathlib.Path:
  """Builds a dataset of these lines, in their order, as the split "train".

  Args:
    lines: questions with answers.
    folder: of datasets; this one stands in `name/1.0.0` below it.
    name: of the dataset, in small letters.

  Returns:
    The dataset's own folder, which `task.path` may name.
  """
  import tensorflow_datasets as tfds

  features = tfds.features.FeaturesDict(
    {
      "prompt": tfds.features.Text(),
      "answer": tfds.features.Text(),
      "difficulty": tfds.features.Scalar(np.float64),
    }
  )

  def _info(self: Any) -> Any:
    # Kept in order: which ones are held out goes by their place.
    return tfds.core.DatasetInfo(
      builder=self, features=features, disable_shuffling=True
    )

  def _split_generators(self: Any, manager: Any) -> dict[str, Any]:
    del manager
    return {"train": self._generate_examples()}

  def _generate_examples(self: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    del self
    for number, line in enumerate(lines):
      yield (
        number,
        {
          "prompt": line.prompt,
          "answer": line.answer,
          "difficulty": line.difficulty,
        },
      )

  # A class of its own for each name: the name of a dataset is its class's.
  kind = type(
    "".join(part.capitalize() for part in name.split("_")),
    (tfds.core.GeneratorBasedBuilder,),
    {
      "VERSION": tfds.core.Version("1.0.0"),
      "__module__": __name__,
      "_info": _info,
      "_split_generators": _split_generators,
      "_generate_examples": _generate_examples,
    },
    skip_registration=True,
  )
  builder = kind(data_dir=os.fspath(folder), file_format="array_record")
  tfds.disable_progress_bar()
  builder.download_and_prepare()
  return pathlib.Path(builder.data_path)


def read_array_records(
  path: str | os.PathLike,
  columns: Columns = COLUMNS,
  *,
  split: str = "train",
) -> list[Line]:
  """Reads the questions of a prepared dataset that is stored as ArrayRecord.

  Args:
    path: the dataset's own folder, with `dataset_info.json`.
    columns: the features of prompt and answer; a third one, "difficulty", is
      read where there is one.
    split: of the dataset.

  Raises:
    ValueError: no such folder, split or feature, no record, a record that
      breaks the rule, or a prompt that occurs twice.
  """
  import tensorflow_datasets as tfds

  name = os.fspath(path)
  if not os.path.exists(os.path.join(name, "dataset_info.json")):
    raise ValueError(
      "task.path must name the folder of a prepared dataset, with its"
      f" dataset_info.json, got {name!r}"
    )
  builder: Any = tfds.builder_from_directory(name)
  if split not in builder.info.splits:
    raise ValueError(
      f"task.split must be a split of {name!r}, got {split!r}; it has "
      + ", ".join(builder.info.splits)
    )
  try:
    source: Any = builder.as_data_source(split)
  except (RuntimeError, ValueError) as error:
    raise ValueError(
      f"the dataset {name!r} must be stored as ArrayRecord, got"
      f" {builder.info.file_format} ({error}); build it again with"
      ' file_format="array_record"'
    ) from error
  return make_lines(name, _records(source), columns)


def _records(source: Any) -> Iterator[tuple[str, dict[str, Any]]]:
  for start in range(0, len(source), _READ_AT_ONCE):
    indices = range(start, min(start + _READ_AT_ONCE, len(source)))
    for index, record in zip(
      indices, source.__getitems__(list(indices)), strict=True
    ):
      plain = {
        key: value.item() if hasattr(value, "item") else value
        for key, value in record.items()
      }
      yield f"record {index}", plain_record(plain)


def main() -> None:
  """`python -m scalerl_jax.data.array_records FILE.jsonl FOLDER`."""
  if len(sys.argv) != 3:
    raise SystemExit(main.__doc__)
  name = pathlib.Path(sys.argv[1]).stem.lower().replace("-", "_")
  print(write_array_records(read_jsonl(sys.argv[1]), sys.argv[2], name=name))


if __name__ == "__main__":
  main()
