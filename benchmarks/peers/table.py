"""The table of a comparison: medians, spreads, ratios, targets.

Functions of measurements; nothing here runs an engine.
"""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

REFERENCE = "ours_float32"


class Measured(NamedTuple):
  """Repeats of one engine on one workload."""

  seconds: list[float]
  tokens: int
  extra: dict[str, float] = {}  # noqa: RUF012 - never written to


# Engine -> workload -> what was measured.
Results = dict[str, dict[str, Measured]]


class Target(NamedTuple):
  """A speed that ours is to have, as a multiple of another's.

  The other one is the fastest of `others` on this workload.
  """

  workload: str
  ours: str
  others: tuple[str, ...]
  least: float


class Floor(NamedTuple):
  """A number of ours that has a least value."""

  workload: str
  ours: str
  name: str
  least: float


FLOAT32, DOTS = "ours_float32", "ours_bfloat16_dots"
TARGETS = (
  Target("sampling", FLOAT32, ("tunix_float32",), 2.2),
  Target("sampling", FLOAT32, ("transformers_float32",), 1.7),
  Target("sampling", FLOAT32, ("limit_float32",), 0.85),
  Target("sampling", DOTS, ("tunix_float32", "tunix_bfloat16"), 2.8),
  Target("long_tail", FLOAT32, ("tunix_float32",), 4.0),
  Target("long_tail", FLOAT32, ("transformers_float32",), 3.0),
  Target("step", FLOAT32, ("tunix_float32",), 1.7),
  Target("step", FLOAT32, ("trl_float32",), 1.7),
  Target("step", DOTS, ("tunix_float32", "tunix_bfloat16"), 2.0),
  Target("step", DOTS, ("trl_float32", "trl_bfloat16"), 2.0),
  Target("step", FLOAT32, ("limit_float32",), 0.85),
  Target("step", DOTS, ("limit_bfloat16_dots",), 0.85),
)
FLOORS = (Floor("long_tail", FLOAT32, "occupancy_while_waiting", 0.9),)


class Ratio(NamedTuple):
  """How much faster ours is, and how far repeats differ in that.

  `low` and `high` are of ratios within a repeat, whose runs are neighbours
  in time.
  """

  value: float
  low: float
  high: float


def ratio(ours: Sequence[float], other: Sequence[float]) -> Ratio:
  """Seconds of another engine over ours: above 1 where ours is faster.

  Args:
    ours: seconds of each repeat.
    other: seconds of the same repeats.

  Example:
    >>> ratio([1.0, 2.0, 4.0], [3.0, 4.0, 6.0])
    Ratio(value=2.0, low=1.5, high=3.0)
  """
  pairs = [b / a for a, b in zip(ours, other, strict=True)]
  value = statistics.median(other) / statistics.median(ours)
  return Ratio(value, min(pairs), max(pairs))


def _cell(results: Results, engine: str, workload: str) -> str:
  found = results[engine].get(workload)
  if found is None:
    return ""
  middle = statistics.median(found.seconds)
  text = (
    f"{middle:.2f} s [{min(found.seconds):.2f}, {max(found.seconds):.2f}]"
    f" {found.tokens / middle / 1e3:.2f} k/s"
  )
  ours = results.get(REFERENCE, {}).get(workload)
  if ours is not None:
    text += f" {middle / statistics.median(ours.seconds):.2f}x"
  return text


def rows(results: Results) -> list[str]:
  """Lines of the table: an engine a row, a workload a column.

  A cell is the median with the fastest and the slowest repeat, thousands of
  tokens a second, and the time as a multiple of `ours_float32`'s.

  Args:
    results: of every engine.
  """
  workloads = list(
    dict.fromkeys(w for found in results.values() for w in found)
  )
  table = [["", *workloads]]
  table += [
    [engine, *(_cell(results, engine, workload) for workload in workloads)]
    for engine in results
  ]
  widths = [max(map(len, column)) for column in zip(*table, strict=True)]
  return [
    "  ".join(
      cell.ljust(width) for cell, width in zip(row, widths, strict=True)
    ).rstrip()
    for row in table
  ]


def verdicts(results: Results) -> list[dict[str, object]]:
  """Every target whose engines were all measured, with what was reached.

  Args:
    results: of every engine.

  Returns:
    Records: `claim`, `target`, `value`, `met`; of a ratio also `low` and
    `high`, its spread over repeats.
  """
  found: list[dict[str, object]] = []
  for workload, ours, others, least in TARGETS:
    measured = {
      name: results[name][workload].seconds
      for name in (ours, *others)
      if workload in results.get(name, {})
    }
    if len(measured) < 1 + len(others):
      continue
    fastest = min(others, key=lambda name: statistics.median(measured[name]))
    reached = ratio(measured[ours], measured[fastest])
    found.append(
      {
        "claim": f"{workload}: {ours}/{fastest}",
        "target": least,
        "value": reached.value,
        "low": reached.low,
        "high": reached.high,
        "met": reached.value >= least,
      }
    )
  for workload, ours, name, least in FLOORS:
    one = results.get(ours, {}).get(workload)
    if one is not None and name in one.extra:
      found.append(
        {
          "claim": f"{workload}: {name} of {ours}",
          "target": least,
          "value": one.extra[name],
          "met": one.extra[name] >= least,
        }
      )
  return found


def lines(results: Results) -> list[str]:
  """The verdicts as text, one a line.

  Args:
    results: of every engine.
  """
  told = []
  for record in verdicts(results):
    spread = (
      f" [{record['low']:.2f}, {record['high']:.2f}]" if "low" in record else ""
    )
    told.append(
      f"{record['claim']} {record['value']:.2f}x{spread}"
      f" (target {record['target']}){'' if record['met'] else ' MISSED'}"
    )
  return told
