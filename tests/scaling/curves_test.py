import string

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from scalerl_jax.scaling import curves
from tests.scaling.awkward import HALF, HANDLED, REFUSED, ROWS, csv


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
  np.testing.assert_allclose(curve.pass_rate, y, rtol=1e-6)


@pytest.mark.parametrize("case", HANDLED)
def test_awkward_files_are_read_and_the_handling_is_told(write, case):
  text, expected, note = HANDLED[case]
  found = curves.read_curves(write(text))
  names = ["curve"] if list(expected) == [""] else list(expected)
  assert [curve.name for curve in found] == names
  for curve, rows in zip(found, expected.values(), strict=True):
    _assert_rows(curve, rows)
  told = found[0].notes
  assert any(note in one for one in told), told


@pytest.mark.parametrize("case", REFUSED)
def test_awkward_files_are_refused_in_one_sentence(write, case):
  text, sentence = REFUSED[case]
  path = write(text)
  with pytest.raises(curves.CurveError, match=sentence) as caught:
    curves.read_curves(path)
  assert str(caught.value).startswith(str(path))
  assert len(str(caught.value).splitlines()) == 1


def test_the_choice_is_the_first_note(write):
  path = write(
    csv([(i, x, y) for i, (x, y) in enumerate(ROWS)], "step,flops,acc")
  )
  first = curves.read_curve(path).notes[0]
  assert first == "compute is column flops, pass rate is column acc"


def test_named_columns_win(write):
  rows = [(i, x, y, 1 - y) for i, (x, y) in enumerate(ROWS)]
  path = write(csv(rows, "step,flops,pass_rate,other"))
  curve = curves.read_curve(
    path, compute_column="step", pass_rate_column="other"
  )
  _assert_rows(curve, [(i, 1 - y) for i, (_, y) in enumerate(ROWS)])
  both = curves.read_curves(path, pass_rate_column="pass_rate,other")
  assert [curve.name for curve in both] == ["pass_rate", "other"]
  _assert_rows(both[0])


def test_unknown_named_columns_list_the_columns(write):
  path = write(csv(ROWS))
  for asked in ("x", "", "compute,x"):
    with pytest.raises(curves.CurveError, match="are compute, pass_rate"):
      curves.read_curve(path, compute_column=asked)
  with pytest.raises(curves.CurveError, match="'y' for --pass_rate_column"):
    curves.read_curve(path, pass_rate_column="y")
  with pytest.raises(curves.CurveError, match="needs a column task or run"):
    curves.read_curve(path, series="a")
  with pytest.raises(curves.CurveError, match="must be two columns"):
    curves.read_curve(
      path, pass_rate_column="compute", compute_column="compute"
    )


def test_series_are_chosen_by_name(write):
  rows = [("a", *row) for row in ROWS] + [("b", x, y / 2) for x, y in ROWS]
  path = write(csv(rows, "task,compute,pass_rate"))
  assert [c.task for c in curves.read_curves(path)] == ["a", "b"]
  first = curves.read_curve(path)
  _assert_rows(first)
  assert "this is a, --series names another" in first.notes
  _assert_rows(curves.read_curve(path, series="b"), HALF)
  assert [c.name for c in curves.read_curves(path, series="b, a")] == ["b", "a"]
  with pytest.raises(
    curves.CurveError, match="no 'c' for --series; it holds a"
  ):
    curves.read_curves(path, series="a,c")


def test_samples_follow_the_order_of_compute(write):
  header = "compute,pass_rate,prompts,samples_per_prompt"
  rows = [(*row, i + 1, 3) for i, row in enumerate(ROWS)]
  curve = curves.read_curve(write(csv(rows[::-1], header)))
  np.testing.assert_array_equal(curve.trials, 3.0 * np.arange(1, 10))
  rows[4] = (*ROWS[4], "", 3)
  assert curves.read_curve(write(csv(rows, header))).trials is None


def test_several_files_are_told_apart_by_their_paths(tmp_path, write):
  for folder in ("a", "b"):
    (tmp_path / folder).mkdir()
    write(csv(ROWS), f"{folder}/curve.csv")
  paths = [tmp_path / "a" / "curve.csv", tmp_path / "b" / "curve.csv"]
  found = curves.read_curves(paths)
  assert [curve.name for curve in found] == ["a/curve", "b/curve"]
  write(csv([(x, y, y) for x, y in ROWS], "step,p,q"), "wide.csv")
  found = curves.read_curves([paths[0], tmp_path / "wide.csv"])
  assert [curve.name for curve in found] == ["curve", "wide: p", "wide: q"]
  same = [write(csv(ROWS), f"run.{end}") for end in ("v1", "v2")]
  assert [c.name for c in curves.read_curves(same)] == ["run.v1", "run.v2"]
  seeds = [write(csv(ROWS), f"a_s{i}.csv") for i in range(2)]
  assert [c.recipe for c in curves.read_curves(seeds)] == ["a", "a"]
  with pytest.raises(curves.CurveError, match="must be named once"):
    curves.read_curves([paths[0], paths[0]])
  with pytest.raises(curves.CurveError, match="got none"):
    curves.read_curves([])


def test_seeds_of_files_with_several_curves_are_of_one_recipe(write):
  wide = csv([(x, y, y) for x, y in ROWS], "step,eval/p/acc,eval/q/acc")
  paths = [write(wide, f"a_s{i}.csv") for i in range(2)]
  found = curves.read_curves(paths)
  assert [c.name for c in found] == ["a_s0: p", "a_s0: q", "a_s1: p", "a_s1: q"]
  assert [c.recipe for c in found] == ["a: p", "a: q"] * 2
  assert [c.task for c in found] == ["p", "q"] * 2


def test_long_names_of_runs_stay_apart(write):
  long = "r" * 200
  rows = [(long + end, *row) for end in "ab" for row in ROWS]
  found = curves.read_curves(write(csv(rows, "run,step,acc")))
  assert [c.name for c in found] == [long + "a", long + "b"]
  found = curves.read_curves(
    write(csv(rows, "run,step,acc")), series=long + "b"
  )
  assert [c.name for c in found] == [long + "b"]


def test_what_is_no_file_is_refused(tmp_path):
  for path, sentence in (
    (tmp_path / "lost.csv", "there is no such file"),
    (tmp_path, r"a folder must hold curve\.csv, TensorBoard event files or tr"),
    ("a\0b", "cannot be read"),
    ("a" * 5000, "cannot be read"),
  ):
    with pytest.raises(curves.CurveError, match=sentence):
      curves.read_curves(path)


def _in_one_sentence(path, **asked):
  """A file is read as what a fit can take, or refused in one sentence."""
  try:
    found = curves.read_curves(path, **asked)
  except curves.CurveError as refusal:
    sentence = str(refusal)
  else:
    sentence = ""
  if sentence:
    assert len(sentence.splitlines()) == 1
    return
  for curve in found:
    assert len(curve.compute) >= 6
    assert (curve.compute >= 0).all()
    assert (np.diff(curve.compute) >= 0).all()
    assert ((curve.pass_rate >= 0) & (curve.pass_rate <= 1)).all()
    assert all(len(note.splitlines()) == 1 for note in curve.notes)


_few = hypothesis.settings(
  max_examples=60,
  deadline=None,
  derandomize=True,
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)


@_few
@hypothesis.given(st.text(alphabet=string.printable + "\x85\u2028é%٣"))
def test_garbage_never_gives_a_traceback(write, text):
  _in_one_sentence(write(text))


@_few
@hypothesis.given(st.binary(max_size=60))
def test_bytes_never_give_a_traceback(write, data):
  _in_one_sentence(write(data))


@_few
@hypothesis.given(
  st.sampled_from(sorted(HANDLED)),
  st.lists(
    st.tuples(
      st.integers(0, 400),
      st.sampled_from([*',;\t"{}[]%\n-#.e |', "9", "\x1c", ""]),
    ),
    max_size=6,
  ),
  st.sampled_from([None, "step", "a,b", ""]),
)
def test_damaged_files_never_give_a_traceback(write, case, changes, column):
  text = HANDLED[case][0]
  text = text if isinstance(text, str) else text.decode("utf-8", "replace")
  for at, new in changes:
    at %= len(text) + 1
    text = text[:at] + new + text[at + 1 :]
  path = write(text)
  _in_one_sentence(path)
  _in_one_sentence(path, pass_rate_column=column)
