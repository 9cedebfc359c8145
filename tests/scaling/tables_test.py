import json
import math

import hypothesis
import pytest
from hypothesis import strategies as st

from scalerl_jax.scaling import tables


@pytest.mark.parametrize(
  ("cell", "value"),
  [
    ("1,234", 1234.0),
    ("12,345,678.5", 12345678.5),
    ("-1 234 567", -1234567.0),
    ("1'234", 1234.0),
    ("1\u202f234", 1234.0),
    ("1e3", 1000.0),
    (" .5 ", 0.5),
    ("45 %", 45.0),
    (7, 7.0),
    (0.25, 0.25),
    ("1,23", None),
    ("0,123", None),
    ("1,2345", None),
    ("0x10", None),
    ("12:30", None),
    ("high", None),
    (True, None),
    ([1], None),
    (10**400, None),
  ],
)
def test_cells_are_numbers_or_text(cell, value):
  assert tables.number(cell) == value


@pytest.mark.parametrize(
  ("cell", "value"),
  [
    ("0,45", 0.45),
    ("-,5", -0.5),
    ("1.234,5", 1234.5),
    ("1.234", 1234.0),
    ("1.234.567", 1234567.0),
    ("1,5e9", 1.5e9),
    ("1.5e9", 1.5e9),
    ("45,5 %", 45.5),
    ("0.45", 0.45),
    ("1,2,3", None),
  ],
)
def test_cells_with_decimal_commas(cell, value):
  assert tables.number(cell, comma=True) == value


@pytest.mark.parametrize("cell", [None, "", " ", "NaN", "N/A", "null", "-"])
def test_missing_cells_are_nan(cell):
  assert math.isnan(tables.number(cell))


@hypothesis.settings(max_examples=50, deadline=None, derandomize=True)
@hypothesis.given(st.floats(allow_nan=False), st.booleans())
def test_what_python_writes_is_read_back(value, comma):
  assert tables.number(repr(value)) == value
  if math.isfinite(value) and abs(value) < 1e15:
    assert tables.number(f"{value:,.4f}") == float(f"{value:.4f}")


def _table(*cells):
  rows = ((i, {"a": cell}) for i, cell in enumerate(cells, 1))
  return tables.from_records("t", rows)


def test_a_comma_means_one_thing_in_a_file():
  assert tables.decimal_comma(_table("0,5", "1,234", 7), ["a"])
  assert not tables.decimal_comma(_table("1,234", "0.5", None), ["a"])
  assert not tables.decimal_comma(_table("1,234,567", "high, low"), ["a"])
  assert not tables.decimal_comma(_table("0,5"), ["b"])
  with pytest.raises(tables.CurveError, match=r"'0,5' \(line 2\) and .*line 1"):
    tables.decimal_comma(_table("1,234.5", "0,5"), ["a"])


def test_lines_of_a_file_are_those_of_an_editor():
  text = '# note\n\na,b\n1,"x\ny"\n\n2,z\n'
  table = tables.parse("t", text)
  assert table.columns == ("a", "b")
  assert [(row.line, row.cells["a"]) for row in table.rows] == [
    (4, "1"),
    (7, "2"),
  ]


def test_names_of_columns_are_on_one_line():
  table = tables.parse("t", '"a\n b\x1c",,c\n1,2,3\n')
  assert table.columns == ("a b", "column 2", "c")


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|", " "])
def test_delimiters_are_told_by_the_first_lines(delimiter):
  lines = [delimiter.join(cells) for cells in (("a", "b"), ("1", "2"))]
  table = tables.parse("t", "\n".join(lines))
  assert table.rows[0].cells == {"a": "1", "b": "2"}


def test_a_semicolon_in_a_name_parts_nothing():
  table = tables.parse("t", "step,note;x\n1,a\n2,b\n")
  assert table.columns == ("step", "note;x")


@pytest.mark.parametrize(
  "value",
  [
    [{"a": 1}, {"a": 2}],
    {"log_history": [{"a": 1}, {"a": 2}]},
    {"data": [{"a": 1}, {"a": 2}], "version": 3},
    {"history": {"a": [1, 2], "b": [3, 4]}},
    {"a": [1, 2], "b": [3, 4], "name": "x"},
  ],
)
def test_records_are_found_in_json(value):
  rows = tables.parse("t", json.dumps(value)).rows
  assert [row.cells["a"] for row in rows] == [1, 2]


def test_inner_objects_are_joined_by_a_slash():
  record = {"step": 1, "data": {"step": 9, "x/y": 2}, "eval": {"a": {"b": 3}}}
  (row,) = tables.parse("t", json.dumps(record)).rows
  assert row.cells == {"step": 1, "x/y": 2, "eval/a/b": 3}


def test_long_lists_of_names_are_counted():
  assert tables.listed("abc") == "a, b, c"
  assert tables.listed("abcd", most=2) == "a, b and 2 more"
  assert tables.plain("a\n\x1cb" + "c" * 99, most=6) == "a bcc…"
