import json
import pathlib
import subprocess
import sys

import pytest

from scalerl_jax import fit

ROOT = pathlib.Path(__file__).parents[1]
CURVES = ROOT / "tests" / "fixtures" / "curves"
LAPTOP = CURVES / "n_cispo_s0.csv"


def _door(*flags):
  return subprocess.run(
    [sys.executable, "-m", "scalerl_jax.fit", *map(str, flags)],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )


def test_answers_first_with_the_asymptote_and_writes_its_files(tmp_path):
  out = tmp_path / "a" / "b"
  answer = _door(
    f"--curve={LAPTOP}",
    "--max_compute=2.2e12",
    "--forecast_at=3e12,4.2e12",
    "--forecast_at=9e12",
    f"--out={out}",
  )
  assert answer.returncode == 0, answer.stderr
  assert answer.stderr == ""
  lines = answer.stdout.splitlines()
  assert lines[0].startswith("asymptote: 0.9")
  assert "compute is column compute_flops" in lines[1]
  forecasts = [line for line in lines if line.startswith("forecast at ")]
  assert len(forecasts) == 3
  record = json.loads((out / "fit.json").read_text())
  assert record["identified"] is True
  assert f"asymptote: {record['params']['asymptote']:.3f}" in lines[0]
  end = record["forecasts"][1]
  # The run ended at .921, which the fit has not seen.
  assert end["low"] < 0.921 < end["high"]
  assert f"forecast at 4.2e+12: {end['mean']:.3f}" in forecasts[1]
  assert (out / "fit.png").read_bytes().startswith(b"\x89PNG")
  page = (out / "report.html").read_text()
  assert lines[0] in page
  assert "first half" in page


def test_unidentified_is_an_answer(capsys):
  fit.main([f"--curve={LAPTOP}", "--max_compute=6.5e11"])  # exits with 0
  assert capsys.readouterr().out.startswith("asymptote: unidentified (")


@pytest.mark.parametrize(
  ("flags", "sentence"),
  [
    ([], "--curve must name a file"),
    (["--curve=lost.csv"], "lost.csv: there is no such file"),
    ([f"--curve={LAPTOP}", "--forecast_at=soon"], "--forecast_at must be"),
    ([f"--curve={LAPTOP}", "--max_compute=1e11"], "at least 6 points"),
    ([f"--curve={LAPTOP}", "--initial=16"], "initial must be in"),
    ([f"--curve={LAPTOP}", "--initial=low"], "argument --initial: invalid"),
    ([f"--curve={LAPTOP}", "--series=b"], "--series needs a column"),
    ([f"--curve={LAPTOP}", "--compute_column=b"], "'b' for --compute_column"),
    ([f"--curve={LAPTOP}", f"--out={LAPTOP}"], "--out must be a folder"),
    ([f"--curve={LAPTOP}", "--level=1"], "--level must be in (0, 1)"),
    ([f"--curve={LAPTOP}", "--level=nan"], "--level must be in (0, 1)"),
    ([f"--curve={LAPTOP}", "--budget=0"], "--budget must be a compute above"),
    ([f"--curve={LAPTOP},,b.csv"], "--curve must name files between its com"),
    ([f"--curve={LAPTOP},{LAPTOP}"], "must be named once"),
    ([f"--curve={LAPTOP},lost.csv"], "lost.csv: there is no such file"),
    ([f"--cuve={LAPTOP}"], "did you mean --curve?"),
  ],
)
def test_bad_input_is_one_sentence(flags, sentence, capsys):
  with pytest.raises(SystemExit) as stopped:
    fit.main(flags)
  assert stopped.value.code == 2
  error = capsys.readouterr().err
  assert sentence in error
  assert len(error.splitlines()) == 1


def test_an_out_that_cannot_be_written_is_refused_before_the_fit(
  monkeypatch, capsys
):
  def fitted(*_, **__):
    raise AssertionError("a fit was made")

  monkeypatch.setattr(fit.fit, "fit_curve", fitted)
  with pytest.raises(SystemExit):
    fit.main([f"--curve={LAPTOP}", f"--out={LAPTOP}/a"])
  assert "(Not a directory); name another." in capsys.readouterr().err


def _wide(path, headers="step,weak,strong"):
  """Two runs, the second the better, with compute 0 evaluated twice."""
  lines = [headers, "0,0.1,0.1"]
  for i in range(16):
    step = 10 * i
    gain = step**2 / (step**2 + 50**2)
    noise = 0.004 * (-1) ** i
    lines.append(
      f"{step},{0.1 + 0.5 * gain + noise},{0.1 + 0.7 * gain + noise}"
    )
  path.write_text("\n".join(lines) + "\n")


def test_several_curves_get_a_block_each_and_are_compared(tmp_path, capsys):
  path, out = tmp_path / "two, wide.csv", tmp_path / "out"
  _wide(path)
  fit.main([f"--curve={path}", "--budget=200", f"--out={out}"])
  text = capsys.readouterr().out
  weak, strong, comparison = text.split("\n\n")
  for block, name in ((weak, "weak"), (strong, "strong")):
    lines = block.splitlines()
    assert lines[0].startswith("asymptote: ")
    assert lines[1] == f"  curve {name}"
    assert "pass rates are columns weak, strong" in lines[2]
  assert comparison.startswith(
    "strong beats weak at 200 step with probability >0.99 (.7"
  )
  records = json.loads((out / "fit.json").read_text())
  assert [record["curve"]["name"] for record in records] == ["weak", "strong"]
  for record in records:
    low, high = record["intervals"]["0.9"]["initial"]
    assert high - low > 1e-3  # Two equal points at compute 0 are not exact.
  assert "strong beats weak" in (out / "report.html").read_text()


def test_seeds_of_recipes_are_compared_as_recipes(tmp_path, capsys):
  path = tmp_path / "wide.csv"
  names = "a_s0/acc,b_s0/acc"
  _wide(path, f"step,{names}")
  lines = path.read_text().splitlines()
  lines = [f"{line},{line.split(',', 1)[1]}" for line in lines[1:]]
  header = f"step,{names},{names.replace('s0', 's1')}"
  path.write_text("\n".join([header, *lines]))
  fit.main([f"--curve={path}"])
  lines = capsys.readouterr().out.split("\n\n")[-1].splitlines()
  assert lines[:2] == ["a: 2 seeds, a_s0, a_s1", "b: 2 seeds, b_s0, b_s1"]
  assert lines[2].startswith("b beats a at 150 step with probability ")
  fit.main([f"--curve={path}", "--series=b_s0,b_s1"])
  lines = capsys.readouterr().out.split("\n\n")[-1].splitlines()
  assert lines[0] == "2 seeds of b:"
  assert lines[1].startswith("  mean pass rate at step 150: 0.7")


def test_runs_on_different_axes_are_not_compared(tmp_path, capsys):
  paths = [tmp_path / "a.csv", tmp_path / "b.csv"]
  _wide(paths[0], "step,pass_rate,x")
  _wide(paths[1], "tokens,pass_rate,x")
  fit.main([f"--curve={paths[0]},{paths[1]}", "--level=.8"])
  text = capsys.readouterr().out
  assert "80 % interval" in text
  assert text.splitlines()[-1] == (
    "not compared: compute must be one column, and it is step in a, tokens in "
    "b; name one with --compute_column"
  )


def test_bad_input_exits_with_2_and_no_traceback():
  answer = _door("more.csv")
  assert answer.returncode == 2
  assert answer.stdout == ""
  assert answer.stderr == (
    "arguments must be flags, got 'more.csv'; write --curve=more.csv.\n"
  )


def test_fitting_alone_loads_nothing_of_the_training_program():
  code = (
    "import sys; import scalerl_jax.scaling.fit, scalerl_jax.scaling.report, "
    "scalerl_jax.scaling.curves, scalerl_jax.scaling.forecast; "
    "print([m for m in ('flax', 'optax', 'absl', 'orbax', 'matplotlib') "
    "if m in sys.modules])"
  )
  found = subprocess.run(
    [sys.executable, "-c", code],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  assert found.stdout.strip() == "[]"
