"""What ran when: `trace.json`, which ui.perfetto.dev and chrome://tracing open.

The JSON array of trace events. Bounded by a number of steps, and a whole file
after every step, so that a killed run leaves one that opens.
"""

import collections
import contextlib
import io
import json
import pathlib
import time
from collections.abc import Iterator
from typing import Any

# From top to bottom: two devices' work, then what the host does.
TRACKS = ("sampler", "learner", "weights", "verification", "host")
_TAIL = b"\n]\n"


class Timeline:
  """Spans of named tracks, written a step at a time.

  Times are those of `time.perf_counter`, told relative to the first moment.
  Any thread may add spans; one thread counts the steps.

  Args:
    path: the file, replaced if it exists; None: nothing is kept or written.
    steps: steps after which nothing is added any more, at least 1.

  Example:
    >>> import json, pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   path = pathlib.Path(folder) / "trace.json"
    ...   timeline = Timeline(path, steps=1)
    ...   timeline.add("learner", "update", 1.0, 1.5, step=7)
    ...   timeline.step()
    ...   events = json.loads(path.read_text())
    >>> events[-1]["name"], events[-1]["dur"], events[-1]["args"]
    ('update', 500000.0, {'step': 7})

  Reference:
    Trace Event Format (Google), "complete" events; microseconds.
  """

  def __init__(self, path: pathlib.Path | None, *, steps: int = 1):
    self._path, self._steps_left = path, steps
    self._zero = time.perf_counter()
    self._pending: collections.deque[dict[str, Any]] = collections.deque()
    self._file: io.FileIO | None = None

  def add(
    self, track: str, name: str, start: float, end: float, **told: Any
  ) -> None:
    """A span of `track`, one of `TRACKS`, in seconds; `told` is shown."""
    if self._path is None:
      return
    self._pending.append(
      {
        "name": name,
        "ph": "X",
        "ts": round((start - self._zero) * 1e6, 3),
        "dur": round((end - start) * 1e6, 3),
        "pid": 0,
        "tid": TRACKS.index(track),
        "args": told,
      }
    )

  @contextlib.contextmanager
  def span(self, name: str, track: str = "host", **told: Any) -> Iterator[None]:
    """The time spent inside; what raises leaves no span."""
    start = time.perf_counter()
    yield
    self.add(track, name, start, time.perf_counter(), **told)

  def step(self) -> None:
    """A step has ended: writes its spans; closes after the last one."""
    self._write()
    self._steps_left -= 1
    if self._steps_left <= 0:
      self.close()

  def close(self) -> None:
    """Writes what is left and ends; a second call does nothing."""
    self._write()
    self._path = None
    if self._file is not None:
      self._file.close()
      self._file = None

  def _write(self) -> None:
    # Another thread may add more meanwhile.
    events = [self._pending.popleft() for _ in range(len(self._pending))]
    if self._path is None or not events:
      return
    if self._file is None:
      # Not before there is something: an earlier run's file may lie there.
      self._file = io.FileIO(self._path, "w")
      self._file.write(b"[\n" + _lines(_names()) + _TAIL)
    # One write, which a kill does not cut in two.
    self._file.seek(-len(_TAIL), io.SEEK_END)
    self._file.write(b",\n" + _lines(events) + _TAIL)


def _names() -> list[dict[str, Any]]:
  """Events that name the tracks and put them in order."""
  found: list[dict[str, Any]] = []
  for tid, track in enumerate(TRACKS):
    at = {"ph": "M", "pid": 0, "tid": tid}
    found.append(at | {"name": "thread_name", "args": {"name": track}})
    order = {"sort_index": tid}
    found.append(at | {"name": "thread_sort_index", "args": order})
  return found


def _lines(events: list[dict[str, Any]]) -> bytes:
  return ",\n".join(map(json.dumps, events)).encode()
