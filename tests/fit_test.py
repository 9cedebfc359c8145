import json
import pathlib
import subprocess
import sys

import pytest
from absl import flags as absl_flags
from absl.testing import flagsaver

from scalerl_jax import fit

ROOT = pathlib.Path(__file__).parents[1]
CURVES = ROOT / "tests" / "fixtures" / "curves"
LAPTOP = CURVES / "n_cispo_s0.csv"

absl_flags.FLAGS.mark_as_parsed()


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


def test_unidentified_is_an_answer():
  answer = _door(f"--curve={LAPTOP}", "--max_compute=6.5e11")
  assert answer.returncode == 0, answer.stderr
  assert answer.stdout.startswith("asymptote: unidentified (")


@pytest.mark.parametrize(
  ("flags", "sentence"),
  [
    ({}, "--curve must name a file"),
    ({"curve": "lost.csv"}, "lost.csv: there is no such file"),
    ({"curve": str(LAPTOP), "forecast_at": ["soon"]}, "--forecast_at must be"),
    ({"curve": str(LAPTOP), "max_compute": 1e11}, "at least 6 points"),
    ({"curve": str(LAPTOP), "initial": 16.0}, "initial must be in"),
    ({"curve": str(LAPTOP), "series": "b"}, "--series needs a column"),
    ({"curve": str(LAPTOP), "compute_column": "b"}, "'b' for --compute_column"),
    ({"curve": str(LAPTOP), "out": str(LAPTOP)}, "File exists"),
  ],
)
def test_bad_input_is_one_sentence(flags, sentence, capsys):
  with flagsaver.flagsaver(**flags), pytest.raises(SystemExit) as stopped:
    fit.main(["fit"])
  assert stopped.value.code == 2
  error = capsys.readouterr().err
  assert sentence in error
  assert len(error.splitlines()) == 1


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
