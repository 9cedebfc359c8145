"""A study's numbers as plain text, with what they do not say."""

from collections.abc import Mapping, Sequence
from typing import Any

from scalerl_jax.run.report import UNITS
from scalerl_jax.scaling import compare

_NAMES = {
  "asymptote": "A",
  "exponent": "B",
  "midpoint": "C_mid",
  "end": "pass rate at end",
}


def _number(quantity: str, value: float, *, signed: bool = False) -> str:
  if quantity == "midpoint":
    return f"{value:.3g}"
  digits = 2 if quantity == "exponent" else 3
  return f"{value:{'+' if signed else ''}.{digits}f}"


def _cell(quantity: str, found: Mapping | None, *, paired: bool = False) -> str:
  if found is None:
    return "-"
  signed = paired and found["kind"] != "ratio"
  ends = [
    None if found[end] is None else _number(quantity, found[end], signed=signed)
    for end in ("low", "high")
  ]
  text = _number(quantity, found["mean"], signed=signed)
  text = f"x{text}" if paired and not signed else text
  if None not in ends:
    text = f"{text} [{ends[0]}, {ends[1]}]"
  if found["count"] == 1 and ends[0] is not None:
    text += "*"
  verdict = found.get("verdict")
  return f"{text} {verdict}" if verdict else text


def _grid(rows: Sequence[Sequence[str]]) -> list[str]:
  """Columns as wide as their widest cell."""
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return [
    "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
    for row in rows
  ]


def _runs(rows: Mapping[str, Any]) -> list[str]:
  """A line for each curve whose asymptote is unknown."""
  return [
    f"{name}, seed {run['seed']}: A unidentified ({'; '.join(run['reasons'])})"
    for name, row in rows.items()
    for run in row["runs"]
    if not run["identified"]
  ]


def _refits(rows: Mapping[str, Any], reference: str) -> list[str]:
  lines = []
  for name, row in rows.items():
    same = row.get("same_asymptote")
    if same is None:
      continue
    told = [
      f"{side} B {values['exponent']:.2f}, C_mid {values['midpoint']:.3g}"
      for side, values in same["variants"].items()
    ]
    lines.append(
      f"{name} and {reference}, A = {same['asymptote']:.3f} in both:"
      f" {'; '.join(told)}"
    )
  if not lines:
    return []
  head = (
    f"A of these differ by less than {compare.MARGIN}; B again, with the"
    " averaged A held:"
  )
  return ["", head, *lines]


def _paired(rows: Mapping[str, Any], reference: str, level: float) -> list[str]:
  others = {name: row for name, row in rows.items() if "paired" in row}
  if not others:
    return []
  counts = [
    found["count"]
    for row in others.values()
    for found in row["paired"].values()
    if found is not None
  ]
  lines = [
    "",
    f"minus {reference}, seed by seed (C_mid: ratio); {level:.0%} t-interval"
    " over pairs:",
    *_grid(
      [
        ["variant", *_NAMES.values(), "pairs"],
        *(
          [
            name,
            *(_cell(q, row["paired"][q], paired=True) for q in _NAMES),
            str(row["paired"]["end"]["count"] if row["paired"]["end"] else 0),
          ]
          for name, row in others.items()
        ),
      ]
    ),
  ]
  if min(counts, default=0) < compare.VERDICT_PAIRS:
    lines.append(
      f"With fewer than {compare.VERDICT_PAIRS} pairs intervals only: no"
      " verdict is given on which variant is better."
    )
  return lines


def section_lines(section: Mapping[str, Any]) -> list[str]:
  """One held-out set against one axis."""
  rows, level = section["variants"], section["level"]
  table = [["variant", *_NAMES.values(), "seeds"]]
  starred = False
  for name, row in rows.items():
    seeds = row["seeds"]
    fitted = seeds["asymptote"]["count"] if seeds["asymptote"] else 0
    total = len(row["runs"])
    cells = [_cell(q, seeds[q]) for q in _NAMES]
    starred |= any(cell.endswith("*") for cell in cells)
    table.append(
      [
        name,
        *cells,
        str(total) if fitted == total else f"{total}, A of {fitted}",
      ]
    )
  lines = [
    f"held-out set {section['heldout']}, against {section['axis']}"
    f" ({UNITS[section['axis']]})",
    f"mean and {level:.0%} t-interval over seeds; C_mid: geometric mean",
    "",
    *_grid(table),
  ]
  if starred:
    lines.append(
      "* one seed: the fit's own interval, which says nothing of how seeds"
      " differ"
    )
  unknown = _runs(rows)
  if unknown:
    lines += [
      "",
      "left out of the means of A, B and C_mid, which that may bias:",
      *unknown,
    ]
  lines += _refits(rows, section["reference"])
  return lines + _paired(rows, section["reference"], level)


def study_lines(record: Mapping[str, Any]) -> list[str]:
  """The whole table.

  Args:
    record: what `table.json` holds.
  """
  seeds = ", ".join(map(str, record["seeds"]))
  lines = [f"study {record['study']}, seeds {seeds}"]
  if record["smoke"]:
    lines.append("smoke: tiny runs that show nothing but that they run")
  if record["note"]:
    lines.append(f"note: {record['note']}")
  lines += [
    f"missing: {name} ({why})" for name, why in record["missing"].items()
  ]
  for section in record["sections"]:
    lines += ["", *section_lines(section)]
  return lines
