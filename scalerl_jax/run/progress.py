"""What a person sees while it runs: a live line, or plain lines in a log."""

import math
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

# Between two lines where there is no terminal.
PLAIN_SECONDS = 10.0
_REFRESHES = 4  # a second
_BAR_WIDTH = 32


class Progress:
  """A bar, what was last told, and the time left; a context manager.

  On a terminal it redraws itself in place. Elsewhere it prints a line at the
  first update, at most one each 10 seconds, one when asked to, and the last.

  Args:
    total: steps until the end.
    label: what is going on.
    plain: whether to print plain lines; None to look at the stream.
    stream: text file or terminal to write to; standard output by default.
  """

  def __init__(
    self,
    total: int,
    label: str,
    *,
    plain: bool | None = None,
    stream: Any = None,
  ):
    self.total, self.label = total, label
    self._stream = sys.stdout if stream is None else stream
    if plain is None:
      plain = not self._stream.isatty() or os.environ.get("TERM") == "dumb"
    self.plain = plain
    self._step = 0
    self._fields: dict[str, str] = {}
    # Time left is told from the pace since the first update: what comes before
    # it (compilation, and the steps before a resume) says nothing of the rest.
    self._first: tuple[int, float] | None = None
    self._last_line = -math.inf
    self._live: Live | None = None

  def __enter__(self) -> "Progress":
    if not self.plain:
      self._live = Live(
        console=Console(file=self._stream),
        get_renderable=self._render,
        refresh_per_second=_REFRESHES,
      )
      self._live.start()
    return self

  def __exit__(self, *error: object) -> None:
    if self._live is not None:
      self._live.stop()  # draws once more
      self._live = None

  def update(
    self, step: int, fields: Mapping[str, str], *, now: bool = False
  ) -> None:
    """Tells how far it is.

    Args:
      step: steps done.
      fields: name to text, in the order shown.
      now: print a plain line whatever the time; a terminal redraws anyway.
    """
    self._step, self._fields = step, dict(fields)
    if self._first is None:
      self._first = (step, time.monotonic())
    due = time.monotonic() - self._last_line >= PLAIN_SECONDS
    if self.plain and (now or due or step >= self.total):
      self._last_line = time.monotonic()
      parts = [f"{self.label} {step}/{self.total}", *self._told()]
      self.say(" | ".join([*parts, self._left()]))

  def say(self, text: str) -> None:
    """Prints a line that stays, above the live one."""
    if self._live is not None:
      self._live.console.print(text, markup=False, highlight=False)
    else:
      print(text, file=self._stream, flush=True)

  def _told(self) -> list[str]:
    return [f"{name} {text}" for name, text in self._fields.items()]

  def _left(self) -> str:
    if self._step >= self.total:
      return "done"
    if self._first is None or self._step <= self._first[0]:
      return "time left unknown"
    pace = (time.monotonic() - self._first[1]) / (self._step - self._first[0])
    return f"{clock(pace * (self.total - self._step))} left"

  def _render(self) -> RenderableType:
    row = Table.grid(padding=(0, 1))
    row.add_row(
      Text(self.label, style="bold"),
      ProgressBar(
        total=max(self.total, 1), completed=self._step, width=_BAR_WIDTH
      ),
      Text(f"{self._step}/{self.total}"),
      Text(self._left(), style="dim"),
    )
    if not self._fields:
      return row
    told = Text(" · ").join(
      Text.assemble((f"{name} ", "dim"), text)
      for name, text in self._fields.items()
    )
    return Group(row, told)


def clock(seconds: float) -> str:
  """Seconds as `m:ss` or `h:mm:ss`.

  >>> clock(71), clock(3671)
  ('1:11', '1:01:11')
  """
  minutes, second = divmod(round(seconds), 60)
  hours, minute = divmod(minutes, 60)
  return (
    f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
  )


def quantity(number: float) -> str:
  """A number with three digits and k, M, G or T.

  >>> quantity(412_345), quantity(87)
  ('412k', '87')
  """
  for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
    if abs(number) >= 0.9995 * factor:
      return f"{number / factor:.3g}{letter}"
  return f"{number:.3g}"


def run_fields(
  metrics: Mapping[str, Any], heldout: float | None = None
) -> dict[str, str]:
  """What the live line of a run shows, from a line of `metrics.jsonl`.

  Args:
    metrics: of the newest step; what it does not hold is not shown.
    heldout: the newest held-out pass rate.

  Example:
    >>> run_fields({"train_pass_rate": 0.4, "staleness_mean": 3.25}, 0.375)
    {'pass rate': '0.375 (train 0.400)', 'staleness': '3.2'}
  """

  def known(*names: str) -> bool:
    return all(metrics.get(name) is not None for name in names)

  rates = [] if heldout is None else [f"{heldout:.3f}"]
  if known("train_pass_rate"):
    rates.append(f"(train {metrics['train_pass_rate']:.3f})")
  fields = {"pass rate": " ".join(rates)} if rates else {}
  speed = "time/sampler_tokens_per_second"
  if known(speed):
    fields["tokens/s"] = quantity(metrics[speed])
  if known("staleness_mean"):
    fields["staleness"] = f"{metrics['staleness_mean']:.1f}"
  forecast = ("forecast/mean", "forecast/low", "forecast/high")
  if known(*forecast):
    mean, low, high = (metrics[name] for name in forecast)
    fields["forecast"] = f"{mean:.3f} [{low:.2f}, {high:.2f}]"
  return fields
