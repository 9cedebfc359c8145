"""The schedule of a run, a JSON line an event: what a replay would follow."""

import json
import pathlib
from typing import Any, TextIO


class Journal:
  """Appends events to `journal.jsonl`; counters only, no time of the wall.

  Events: `admit` (group, uid, first_sample, version), `chunk` (number,
  version), `update` (step, groups), `publish` (version), `discard` (group).

  Args:
    path: the file; a new run starts it empty.
    events: how many the state that the run goes on from had written; what
      stands behind them is cut off.
  """

  def __init__(self, path: pathlib.Path, *, events: int = 0):
    lines = path.read_text().splitlines(keepends=True) if events else []
    path.write_text("".join(lines[:events]))
    self.events = events
    self._file: TextIO = path.open("a")

  def write(self, event: str, at_chunk: int, **fields: Any) -> None:
    """One event at a chunk count."""
    line = {"event": event, "at_chunk": at_chunk, **fields}
    self._file.write(json.dumps(line) + "\n")
    self.events += 1

  def flush(self) -> None:
    """Everything written so far, onto the disk."""
    self._file.flush()

  def close(self) -> None:
    """Flushes and closes."""
    self._file.close()
