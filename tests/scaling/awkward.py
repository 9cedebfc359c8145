"""Files as people save them: how each is read, or why it is refused."""

import json

ROWS = [(10 * i, round(0.1 + 0.05 * i, 2)) for i in range(9)]
HALF = [(x, y / 2) for x, y in ROWS]
PERCENT = [(x, round(100 * y, 2)) for x, y in ROWS]


def csv(rows, header="compute,pass_rate", delimiter=","):
  lines = [header] if header else []
  rows = [delimiter.join(map(str, row)) for row in rows]
  return "\n".join(lines + rows) + "\n"


def jsonl(records):
  return "\n".join(map(json.dumps, records)) + "\n"


def _german(value):
  return f"{value:,}".translate(str.maketrans(",.", ".,"))


# name: text, the curves by name ("" for the only one), what the notes tell.
HANDLED = {
  "a comma-separated file": (csv(ROWS), {"": ROWS}, "column compute,"),
  "semicolons": (
    csv(ROWS, "compute;pass_rate", ";"),
    {"": ROWS},
    "column pass_rate",
  ),
  "tabs": (
    csv(ROWS, "GPU Hours\tPass Rate", "\t"),
    {"": ROWS},
    "compute is column GPU Hours, pass rate is column Pass Rate",
  ),
  "spaces": (csv(ROWS, None, "  "), {"": ROWS}, "column compute"),
  "numpy's header": (
    csv(ROWS, "# step accuracy", " "),
    {"": ROWS},
    "compute is column step, pass rate is column accuracy",
  ),
  "comments above": (
    "# run 7\n\n" + csv(ROWS, "step,accuracy"),
    {"": ROWS},
    "column step",
  ),
  "a markdown table": (
    "| step | accuracy |\n|--|--|\n"
    + "".join(f"| {x} | {y} |\n" for x, y in ROWS),
    {"": ROWS},
    "1 row left out with text for a number (such as '--'): lines 2",
  ),
  "Excel's separator line": (
    "sep=;\n" + csv(ROWS, "step;acc", ";"),
    {"": ROWS},
    "column acc",
  ),
  "a byte order mark": ("\ufeff" + csv(ROWS), {"": ROWS}, "column compute,"),
  "UTF-16": (csv(ROWS).encode("utf-16"), {"": ROWS}, "column compute,"),
  "Windows lines": (
    csv(ROWS).replace("\n", "\r\n").encode(),
    {"": ROWS},
    "column pass_rate",
  ),
  "blank lines and quotes": (
    csv(ROWS, '"compute","pass_rate"').replace("\n", "\n\n"),
    {"": ROWS},
    "column compute,",
  ),
  "spaces before quotes": (
    csv([(f'"{x}"', f' "{y}"') for x, y in ROWS], '"step", "accuracy"'),
    {"": ROWS},
    "column accuracy",
  ),
  "no header": (csv(ROWS, None), {"": ROWS}, "column compute,"),
  "an index without a name": (
    csv([(i, *row) for i, row in enumerate(ROWS)], ",step,accuracy"),
    {"": ROWS},
    "column step",
  ),
  "a delimiter at the end": (
    csv([(*row, "") for row in ROWS], "step,accuracy,"),
    {"": ROWS},
    "column step",
  ),
  "thousands separators": (
    csv([(f'"{1000 * x:,}"', y) for x, y in ROWS], "tokens,accuracy"),
    {"": [(1000 * x, y) for x, y in ROWS]},
    "column tokens",
  ),
  "thousands by spaces": (
    csv([(f"{1000 * x:,}".replace(",", "\u202f"), y) for x, y in ROWS]),
    {"": [(1000 * x, y) for x, y in ROWS]},
    "column compute,",
  ),
  "decimal commas": (
    csv([(_german(1000 * x), _german(y)) for x, y in ROWS], "flops;acc", ";"),
    {"": [(1000 * x, y) for x, y in ROWS]},
    "a comma is read as the decimal sign",
  ),
  "percent signs": (
    csv([(x, f"{y} %") for x, y in PERCENT]),
    {"": ROWS},
    "have a % sign and are read as percent",
  ),
  "percent below 1": (
    csv([(x, f"{y}%") for x, y in ROWS]),
    {"": [(x, y / 100) for x, y in ROWS]},
    "have a % sign",
  ),
  "percent by the name": (
    csv([(x, 3 * y) for x, y in ROWS], "step,accuracy (%)"),
    {"": [(x, 3 * y / 100) for x, y in ROWS]},
    "read as percent, as accuracy (%) says",
  ),
  "percent by the values": (
    csv(PERCENT),
    {"": ROWS},
    "pass rates reach 50, so the file is read as percent",
  ),
  "a score of 100": (
    csv(PERCENT, "step,score"),
    {"": ROWS},
    "so the file is read as percent",
  ),
  "any order": (csv(ROWS[::-1]), {"": ROWS}, "rows put in order of compute"),
  "repeated compute": (
    csv([*ROWS[:3], (20, 0.3), *ROWS[3:]]),
    {"": [*ROWS[:3], (20, 0.3), *ROWS[3:]]},
    "1 row repeating a compute already there, kept as evaluations of their own",
  ),
  "compute 0 twice": (
    csv([ROWS[0], *ROWS]),
    {"": [ROWS[0], *ROWS]},
    "2 rows at compute 0, kept as a measurement of R_0",
  ),
  "empty and NaN": (
    csv([*ROWS[:2], (15, ""), (16, "NaN"), ("", 0.3), ("inf", 0.3), *ROWS[2:]]),
    {"": ROWS},
    "4 rows left out without a number for compute or pass rate: lines 4, 5, 6,",
  ),
  "text": (
    csv([*ROWS, (90, "high"), ("total", 0.5)]),
    {"": ROWS},
    "2 rows left out with text for a number (such as 'high'): lines 11, 12",
  ),
  "a row that is still written": (
    csv([*ROWS, (90,)]).rstrip(),
    {"": ROWS},
    "1 row left out without a number for compute or pass rate: lines 11",
  ),
  "rows of runs and seeds": (
    csv(
      [
        (run, seed, x, y / half)
        for run, half in (("a", 1), ("b", 2))
        for seed in (0, 1)
        for x, y in ROWS
      ],
      "run,seed,step,accuracy",
    ),
    {"a/0": ROWS, "a/1": ROWS, "b/0": HALF, "b/1": HALF},
    "4 curves (a/0, a/1, b/0, b/1), told apart by column run and seed",
  ),
  "a run that is too short": (
    csv(
      [("a", *row) for row in ROWS] + [("b", *row) for row in ROWS[:5]],
      "run,step,accuracy",
    ),
    {"a": ROWS},
    "left out for want of usable points: b (5 usable points of 5 rows)",
  ),
  "checkpoints are not runs": (
    csv([(f"ckpt-{x}", x, y) for x, y in ROWS], "model,step,accuracy"),
    {"": ROWS},
    "column step",
  ),
  "a column a run": (
    csv([(x, y, y / 2) for x, y in ROWS], "step,cispo,gspo"),
    {"cispo": ROWS, "gspo": HALF},
    "no name is a usual one, so each is read as one run",
  ),
  "a pass rate a run": (
    csv([(x, y, y / 2) for x, y in ROWS], "step,s0/pass_rate,s1/pass_rate"),
    {"s0": ROWS, "s1": HALF},
    "pass rates are columns s0/pass_rate, s1/pass_rate",
  ),
  "JSON lines among other metrics": (
    jsonl(
      [
        record
        for x, y in ROWS
        for record in (
          {"step": x, "eval": {"pass_rate": y}},
          {"step": x + 5, "loss": 0.3},
        )
      ]
    ),
    {"": ROWS},
    "9 rows left out without a number for compute or pass rate: lines 2, 4, 6",
  ),
  "JSON lines that are still written": (
    jsonl({"step": x, "pass_rate": y} for x, y in ROWS) + '{"step": 90, "pa',
    {"": ROWS},
    "line 10 is cut off and left out",
  ),
  "a JSON list": (
    json.dumps([{"step": x, "pass_rate": y} for x, y in ROWS]),
    {"": ROWS},
    "column step",
  ),
  "JSON columns": (
    json.dumps(
      {
        "run": "a",
        **dict(zip(("step", "acc"), zip(*ROWS, strict=True), strict=True)),
      }
    ),
    {"": ROWS},
    "column acc",
  ),
  "tokens of each step": (
    csv([(x, 5000 - x, y) for x, y in ROWS], "step,tokens,accuracy"),
    {"": ROWS},
    "column tokens does not grow with the step, so it is no total",
  ),
  "TensorBoard's CSV export": (
    csv([(1.7e9 + x, x, y) for x, y in ROWS], "Wall time,Step,Value"),
    {"": ROWS},
    "compute is column Step, pass rate is column Value",
  ),
}

# name: text, the sentence after the file's name (a regular expression).
REFUSED = {
  "an empty file": ("", "the file is empty"),
  "white space": (" \n\n", "the file is empty"),
  "comments only": ("# a\n# b\n", "holds no rows"),
  "bytes": (b"PK\x03\x04\xff\xfe\x00\x01", "must be text"),
  "Latin-1": ("step,naïve accuracy\n".encode("latin-1"), "must be text"),
  "a header only": ("compute,pass_rate\n", "0 usable points of 0 rows; 6 are"),
  "five points": (csv(ROWS[:5]), "5 usable points of 5 rows; 6 are needed"),
  "four of nine": (
    csv(ROWS[:4] + [(x, "") for x in range(5)]),
    r"4 usable points of 9 rows; 6 are needed \(5 rows left out .* lines 6, 7",
  ),
  "one compute": (
    csv([(5, y) for _, y in ROWS]),
    "9 points at 1 values of comp",
  ),
  "negative compute": (
    csv([*ROWS, (-5, 0.5)]),
    "line 11: compute must be at least 0, got -5",
  ),
  "a negative reward": (
    csv([(x, 2 * y - 1) for x, y in ROWS], "step,reward"),
    r"line 2: reward must be a pass rate, at least 0 .*, got -0.8",
  ),
  "above 100": (
    csv([*ROWS, (90, 150)]),
    "line 11: .* or 100 percent, got 150",
  ),
  "an overshoot": (
    csv([*ROWS, (90, 1.02)]),
    "line 11: pass_rate must be at most 1, or clearly percent; .* got 1.02",
  ),
  "an overshoot of most": (
    csv([(x, 1 + y / 100) for x, y in ROWS]),
    "line 10: pass_rate must be at most 1, or clearly percent; .* got 1.005",
  ),
  "a reward with a bonus": (
    csv([(x, 10 * y) for x, y in ROWS], "step,reward"),
    "line 10: reward must be at most 1, or clearly percent; .* got 5",
  ),
  "rates, then percent": (
    csv([*ROWS, (90, 55)]),
    "line 11: pass_rate must be at most 1 when most values are",
  ),
  "percent signs on some": (
    csv([*((x, f"{y}%") for x, y in PERCENT), (90, 0.55)]),
    "line 11: pass_rate must be in percent like the other rows, .* got 0.55",
  ),
  "percent by name, not by value": (
    csv(ROWS, "step,accuracy_pct"),
    "line 10: accuracy_pct must be above 1 somewhere when its name",
  ),
  "unknown compute": (
    csv(ROWS, "effort,pass_rate"),
    "no column has a usual name of compute; the columns are effort, pass_rate; "
    "name one with --compute_column",
  ),
  "unknown pass rate": (
    csv(ROWS, "compute,luck"),
    "pass_rate; the columns are compute, luck; name one with --pass_rate_col",
  ),
  "unknown both": (
    csv(ROWS, "a,b"),
    "compute or pass_rate; .* --compute_column and --pass_rate_column",
  ),
  "metrics are not runs": (
    csv([(x, y, y) for x, y in ROWS], "step,policy_loss,entropy"),
    "usual name of pass_rate; the columns are step, policy_loss, entropy",
  ),
  "no header, three columns": (
    csv([(*row, 1) for row in ROWS], None),
    "line 1: without a header a file must have two columns, .* has 3",
  ),
  "a column twice": (csv(ROWS, "step,step"), "usual name of pass_rate"),
  "a pass rate twice": (
    csv([(x, y, y) for x, y in ROWS], "step,acc,acc"),
    "line 1: column names must differ, and 'acc' stands more than once",
  ),
  "thousands without quotes": (
    csv([(f"{1000 * x + 1000:,}", y) for x, y in ROWS], "tokens,accuracy"),
    "line 2: a row must have the header's 2 cells, got 3; put .* in quotes",
  ),
  "commas of two meanings": (
    csv([("1,234,567", "0,5"), *ROWS], "tokens;accuracy", ";"),
    "a comma must mean one thing in a file, .* '0,5' .* '1,234,567'",
  ),
  "an open quote": ('compute,pass_rate\n1,"0.1\n', "line 2: not a CSV row"),
  "an endless cell": (
    "compute,pass_rate\n" + "9" * 200_000 + ",1\n",
    "line 2: not a CSV row",
  ),
  "broken JSON lines": (
    '{"step": 1}\nnot json\n{"step": 2}\n',
    "line 2: each line must be one JSON object, got 'not json'",
  ),
  "a list among JSON lines": (
    '{"step": 1}\n[1, 2]\n',
    r"line 2: each line must be one JSON object, got '\[1, 2\]'",
  ),
  "a JSON list of numbers": (
    "[1, 2, 3]",
    "a JSON file must hold a list of obj",
  ),
  "too many digits": (
    '[{"step": ' + "9" * 5000 + "}]",
    "line 1: each line must",
  ),
  "too deep": ("[" * 100_000, "line 1: each line must be one JSON object"),
  "truths for numbers": (
    jsonl({"step": True, "pass_rate": y} for _, y in ROWS),
    r"0 usable points of 9 rows; .* \(such as 'True'\): lines 1, 2,",
  ),
  "lists for numbers": (
    jsonl({"step": [x], "pass_rate": y} for x, y in ROWS),
    r"0 usable points of 9 rows; .* \(such as '\[0\]'\)",
  ),
}
