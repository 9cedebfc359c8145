import numpy as np
import pytest

from scalerl_jax.scaling import columns, series, tables


def _table(header, rows):
  names = header.split(",")
  records = (
    (i, dict(zip(names, row, strict=True))) for i, row in enumerate(rows, 2)
  )
  return tables.from_records("t", records)


def _series(values, name="acc"):
  table = _table(f"step,{name}", list(enumerate(values)))
  return table, [series.Series("", None, "", name, table.rows)]


def _scale(values, name="acc"):
  return series.scale(*_series(values, name), comma=False)[0]


def test_keys_are_the_columns_that_part_rows_further():
  rows = [
    (run, f"id-{run}", "same", seed, step, 0.5)
    for run in "ab"
    for seed in (0, 1)
    for step in range(3)
  ]
  table = _table("run,run_id,model,seed,step,acc", rows)
  assert series.keys(table) == ["run", "seed"]
  assert series.keys(table, ["run"]) == ["run_id", "seed"]
  each = _table("name,step,acc", [(f"s{i}", i, 0.5) for i in range(4)])
  assert series.keys(each) == []


def test_rows_are_split_by_run_and_column():
  table = _table(
    "run,task,step,eval/x/acc,eval/y/acc",
    [(run, "t" + run, i, 0.1, 0.2) for run in "ab" for i in range(5)],
  )
  keys = series.keys(table)
  found = series.split(table, keys, columns.choose(table, keys=keys))
  assert [one.label for one in found] == ["a/x", "a/y", "b/x", "b/y"]
  assert [one.task for one in found] == ["x", "y", "x", "y"]
  assert [len(one.rows) for one in found] == [5] * 4
  picked = series.pick(table, found, "y, a/x")
  assert [one.label for one in picked] == ["a/y", "b/y", "a/x"]


def test_seeds_of_a_recipe_are_told_by_column_or_name():
  rows = [(r, s, i, 0.1) for r in "ab" for s in (3, 4) for i in range(5)]
  table = _table("run,seed,step,acc", rows)
  found = series.split(table, ["run", "seed"], columns.choose(table))
  assert [one.label for one in found] == ["a/3", "a/4", "b/3", "b/4"]
  assert [one.recipe for one in found] == ["a", "a", "b", "b"]
  table = _table("run,step,acc", [("a_seed1", 1, 0.1), ("b", 1, 0.1)])
  found = series.split(table, ["run"], columns.choose(table))
  assert [one.recipe for one in found] == ["a", None]
  assert series.without_seed("cispo-s10") == "cispo"
  assert series.without_seed("s0") == ""
  for name in ("loss10", "v1.2", "run 3", "as3"):
    assert series.without_seed(name) is None


def test_the_only_run_may_be_asked_for():
  table = _table("run,step,acc", [("a", i, 0.1) for i in range(5)])
  found = series.split(table, [], columns.choose(table))
  assert series.pick(table, found, "a") == found
  for asked in ("b", ""):
    with pytest.raises(tables.CurveError, match="for --series; it holds a"):
      series.pick(table, found, asked)


@pytest.mark.parametrize(
  ("values", "name", "scale"),
  [
    ([0.1, 0.5, 1.0], "acc", 1.0),
    ([0, 0, 0], "acc", 1.0),
    ([0, 0, 0], "acc (%)", 1.0),
    ([10, 50, 100], "acc", 100.0),
    ([0.5, 1.5, 2.5], "acc", 100.0),
    ([0.1, 0.2, 1.5], "acc (%)", 100.0),
    (["10%", "0.5%", "1%"], "acc", 100.0),
    ([5, 10, 20], "reward", 100.0),
    ([None, "", 0.5], "acc", 1.0),
  ],
)
def test_the_scale_is_one_for_the_file(values, name, scale):
  assert _scale(values, name) == scale


@pytest.mark.parametrize(
  ("values", "name", "sentence"),
  [
    ([0.1, 0.5, 1.001], "acc", "line 4: acc must be at most 1, or clearly"),
    ([1.1, 1.2, 2.0], "acc", "line 4: acc must be at most 1, or clearly"),
    ([5, 9, 10], "reward", "line 4: reward must be at most 1, or clearly"),
    ([0.1, 50, 0.2], "acc", "line 3: acc must be at most 1 when most"),
    ([0.1, -0.5, 0.2], "acc", "line 3: acc must be a pass rate, at least 0"),
    ([10, 100.5, 20], "acc", "line 3: acc must be .* at most 1, or 100"),
    (["10%", 0.5, "20%"], "acc", "line 3: acc must be in percent like the"),
    ([0.1, 0.5, 0.2], "acc %", "line 3: acc % must be above 1 somewhere"),
  ],
)
def test_values_of_two_scales_are_refused(values, name, sentence):
  with pytest.raises(tables.CurveError, match=sentence):
    _scale(values, name)


def test_the_scale_looks_at_all_curves_of_the_file():
  table, found = _series([0.1, 0.2, 0.3])
  other = tuple(
    row._replace(cells={"acc": 100 * row.cells["acc"]}) for row in table.rows
  )
  both = [*found, found[0]._replace(rows=other)]
  with pytest.raises(tables.CurveError, match="at most 1 when most values are"):
    series.scale(table, [*both, found[0]], comma=False)
  np.testing.assert_array_equal(
    series.numbers(table, both[1], "acc", comma=False), [10.0, 20.0, 30.0]
  )
