import json

import numpy as np
import pytest

from scalerl_jax.scaling import curves

ROWS = [(10 * i, 0.1 + 0.05 * i) for i in range(9)]


def _csv(rows, header="compute,pass_rate"):
  lines = [header] if header else []
  return "\n".join(lines + [",".join(map(str, row)) for row in rows]) + "\n"


@pytest.fixture
def write(tmp_path):
  def write(text, name="curve.csv"):
    path = tmp_path / name
    if isinstance(text, bytes):
      path.write_bytes(text)
    else:
      path.write_text(text, encoding="utf-8")
    return path

  return write


def _assert_rows(curve, rows=ROWS):
  x, y = zip(*rows, strict=True)
  np.testing.assert_allclose(curve.compute, x)
  np.testing.assert_allclose(curve.pass_rate, y)


@pytest.mark.parametrize(
  "header",
  [
    "flops_full,pass_rate",
    "GPU Hours,Accuracy",
    "compute_gpu_hours,eval/mean_at_16",
    "_step,val/reward_mean",
    "compute_flops,mean@16",
  ],
)
def test_usual_names_are_recognised_and_said(write, header):
  curve = curves.read_curve(write(_csv(ROWS, header)))
  _assert_rows(curve)
  x, y = header.split(",")
  assert (curve.compute_column, curve.pass_rate_column) == (x, y)
  assert curve.notes[0] == f"compute is column {x}, pass rate is column {y}"


def test_full_flops_come_before_steps(write):
  rows = [(i, 1e9 * x, y) for i, (x, y) in enumerate(ROWS)]
  curve = curves.read_curve(write(_csv(rows, "step,flops_full,pass_rate")))
  assert curve.compute_column == "flops_full"


def test_named_columns_win(write):
  rows = [(i, x, y, 1 - y) for i, (x, y) in enumerate(ROWS)]
  path = write(_csv(rows, "step,flops,pass_rate,other"))
  curve = curves.read_curve(
    path, compute_column="step", pass_rate_column="other"
  )
  _assert_rows(curve, [(i, 1 - y) for i, (_, y) in enumerate(ROWS)])


def test_two_numeric_columns_need_no_header(write):
  _assert_rows(curves.read_curve(write(_csv(ROWS, header=None))))


@pytest.mark.parametrize("delimiter", ["\t", ";"])
def test_other_delimiters(write, delimiter):
  _assert_rows(curves.read_curve(write(_csv(ROWS).replace(",", delimiter))))


def test_byte_order_mark_blank_lines_and_quotes(write):
  text = "\ufeff" + _csv(ROWS, '"compute","pass_rate"').replace("\n", "\n\n")
  _assert_rows(curves.read_curve(write(text)))


def test_jsonl_with_rows_of_other_metrics(write):
  records = [{"step": x, "eval/pass_rate": y} for x, y in ROWS]
  records.insert(2, {"step": 15, "loss": 0.3})
  text = "\n".join(map(json.dumps, records)) + "\n"
  curve = curves.read_curve(write(text, "metrics.jsonl"))
  _assert_rows(curve)
  assert any("1 rows left out" in n and "lines 3" in n for n in curve.notes)


def test_workdir_and_its_samples(write, tmp_path):
  header = "step,task,flops_full,pass_rate,prompts,samples_per_prompt"
  rows = [(i, "chain", x, y, 7, 4) for i, (x, y) in enumerate(ROWS)]
  write(_csv(rows, header))
  curve = curves.read_curve(tmp_path)
  _assert_rows(curve)
  np.testing.assert_array_equal(curve.trials, [28.0] * len(ROWS))


def test_samples_follow_the_order_of_compute(write):
  header = "compute,pass_rate,prompts,samples_per_prompt"
  rows = [(*row, i + 1, 3) for i, row in enumerate(ROWS)]
  curve = curves.read_curve(write(_csv(rows[::-1], header)))
  np.testing.assert_array_equal(curve.trials, 3.0 * np.arange(1, 10))


def test_several_series_are_told_apart(write):
  rows = [("a", *row) for row in ROWS] + [("b", x, y / 2) for x, y in ROWS]
  path = write(_csv(rows, "task,compute,pass_rate"))
  first = curves.read_curve(path)
  _assert_rows(first)
  assert any("2 curves (a, b)" in note for note in first.notes)
  second = curves.read_curve(path, series="b")
  _assert_rows(second, [(x, y / 2) for x, y in ROWS])
  with pytest.raises(curves.CurveError, match="no 'c' for --series"):
    curves.read_curve(path, series="c")


def test_percent_is_read_and_said(write):
  curve = curves.read_curve(write(_csv([(x, 100 * y) for x, y in ROWS])))
  _assert_rows(curve)
  assert any("percent" in note for note in curve.notes)


def test_unsorted_rows_are_sorted_and_said(write):
  curve = curves.read_curve(write(_csv(ROWS[::-1])))
  _assert_rows(curve)
  assert "rows put in order of compute" in curve.notes


def test_duplicates_are_kept_and_said(write):
  curve = curves.read_curve(write(_csv([*ROWS[:3], (20, 0.3), *ROWS[3:]])))
  _assert_rows(curve, [*ROWS[:3], (20, 0.3), *ROWS[3:]])
  assert any("1 rows repeat a compute" in note for note in curve.notes)


@pytest.mark.parametrize("missing", ["", "nan", "NaN", "None", "inf"])
def test_rows_without_a_number_are_counted_and_named(write, missing):
  rows = [*ROWS[:2], (15, missing), *ROWS[2:]]
  curve = curves.read_curve(write(_csv(rows)))
  _assert_rows(curve)
  assert any("1 rows left out" in n and "lines 4" in n for n in curve.notes)


@pytest.mark.parametrize(
  ("text", "sentence"),
  [
    ("", "the file is empty"),
    (" \n\n", "the file is empty"),
    (b"\xff\xfe\x00\x01", "must be text"),
    ("compute,pass_rate\n", "has 0"),
    (_csv(ROWS[:5]), "at least 6 usable points, and this file has 5"),
    (_csv([*ROWS[:5], (60, "")]), "and this file has 5"),
    (_csv([*ROWS, (90, "high")]), "line 11: pass_rate must be a number"),
    (_csv([*ROWS, ("ten", 0.5)]), "line 11: compute must be a number"),
    (_csv([*ROWS, (-5, 0.5)]), "line 11: compute must be at least 0"),
    (_csv([*ROWS, (90, -0.5)]), "line 11: pass_rate must be .* at least 0"),
    (_csv([*ROWS, (90, 1.5)]), "line 11: pass_rate must be at most 1 when"),
    (_csv([*ROWS, (90, 150)]), "line 11: .* or 100 percent, got 150"),
    (_csv([*ROWS, (90,)]), "line 11: a row must have .* 2 cells, got 1"),
    (_csv([(5, y) for _, y in ROWS]), "4 different values of compute"),
    (_csv(ROWS, "compute,compute"), "line 1: column names must differ"),
    (_csv([(*r, 1) for r in ROWS], None), "line 1: without a header"),
    (_csv(ROWS, "effort,pass_rate"), "effort, pass_rate; name one with --comp"),
    (_csv(ROWS, "compute,luck"), "luck; name one with --pass_rate_column"),
    ('{"step": 1}\nnot json\n', "line 2: each line must be one JSON object"),
    ('{"step": 1}\n[1, 2]\n', "line 2: each line must be one JSON object"),
    ('{"step": true, "pass_rate": 0.1}\n', "line 1: step must be a number"),
    ('{"step": [1], "pass_rate": 0.1}\n', "line 1: step must be a number"),
    ('compute,pass_rate\n1,"0.1\n', "line 2: not a CSV row"),
    ("compute,pass_rate\n" + "9" * 200_000 + ",1\n", "line 2: not a CSV row"),
  ],
)
def test_awkward_files_get_one_sentence(write, text, sentence):
  path = write(text)
  with pytest.raises(curves.CurveError, match=sentence) as caught:
    curves.read_curve(path)
  assert str(caught.value).startswith(str(path))
  assert "\n" not in str(caught.value)


def test_missing_file_and_folder_without_a_curve(tmp_path):
  with pytest.raises(curves.CurveError, match="there is no such file"):
    curves.read_curve(tmp_path / "lost.csv")
  with pytest.raises(curves.CurveError, match=r"must hold curve\.csv"):
    curves.read_curve(tmp_path)


def test_unknown_named_column_lists_the_columns(write):
  path = write(_csv(ROWS))
  with pytest.raises(curves.CurveError, match="'x' for --compute_column"):
    curves.read_curve(path, compute_column="x")
  with pytest.raises(curves.CurveError, match="'y' for --pass_rate_column"):
    curves.read_curve(path, pass_rate_column="y")
  with pytest.raises(curves.CurveError, match="needs a column task or run"):
    curves.read_curve(path, series="a")
