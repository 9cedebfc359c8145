"""The schedule of a run, a JSON line an event: what a replay would follow."""

import json
import pathlib
from typing import Any, TextIO


class Journal:
  """Appends events to `journal.jsonl`; counters only, no time of the wall.

  Events: `admit` (group, uid, first_sample, version), `chunk` (number,
  version), `update` (step, groups), `publish` (version).

  Args:
    path: the file; events after `chunk` are cut when it exists already.
    chunk: decoded chunks of the state that the run goes on from.
  """

  def __init__(self, path: pathlib.Path, *, chunk: int = 0):
    kept = []
    if path.exists():
      for line in path.read_text().splitlines():
        if json.loads(line)["at_chunk"] > chunk:
          break
        kept.append(line + "\n")
    path.write_text("".join(kept))
    self._file: TextIO = path.open("a")

  def write(self, event: str, at_chunk: int, **fields: Any) -> None:
    """One event at a chunk count."""
    line = {"event": event, "at_chunk": at_chunk, **fields}
    self._file.write(json.dumps(line) + "\n")

  def flush(self) -> None:
    """Everything written so far, onto the disk."""
    self._file.flush()

  def close(self) -> None:
    """Flushes and closes."""
    self._file.close()
