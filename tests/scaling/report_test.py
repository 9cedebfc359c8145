import base64
import io
import re

import numpy as np
import pytest

from scalerl_jax.scaling import fit, forecast, report, verdict

COMPUTE = np.linspace(0.0, 40.0, 41)
PASS_RATE = 0.2 + 0.6 / (1.0 + (8.0 / np.maximum(COMPUTE, 1e-9)) ** 2.0)
PASS_RATE += np.random.default_rng(0).normal(scale=0.006, size=41)
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def fitted():
  return fit.fit_curve(COMPUTE[:21], PASS_RATE[:21])


@pytest.mark.parametrize(
  ("name", "start"), [("curve.png", PNG), ("curve.svg", b"<?xml")]
)
def test_plot_is_written(tmp_path, fitted, name, start):
  path = tmp_path / name
  report.plot_curve(
    path, COMPUTE, PASS_RATE, fitted, end=40.0, unit="steps", title="t"
  )
  assert path.read_bytes().startswith(start)


def test_plot_shows_what_was_fitted_and_what_was_not(tmp_path, fitted):
  path = tmp_path / "curve.svg"
  report.plot_curve(path, COMPUTE, PASS_RATE, fitted, end=40.0, unit="steps")
  drawn = path.read_text()
  for words in (
    "evaluations fitted",
    "evaluations not shown to the fit",
    "at compute 0",
    "90 % band",
    "forecast of the end",
    "compute (steps)",
  ):
    assert f"<!-- {words}" in drawn
  report.plot_curve(
    path, fitted.compute, fitted.pass_rate, fitted, unit="steps"
  )
  drawn = path.read_text()
  assert "evaluations not shown" not in drawn
  assert "forecast of the end" not in drawn


def test_fragments_stand_alone(fitted):
  figure = report.curve_fragment(
    COMPUTE, PASS_RATE, fitted, caption="a < b", unit="steps"
  )
  (data,) = re.findall(r'src="data:image/png;base64,([^"]+)"', figure)
  assert base64.b64decode(data).startswith(PNG)
  assert "a &lt; b" in figure
  table = report.parameters_fragment(fitted, unit="steps")
  for name, value, low, high in verdict.parameter_rows(fitted):
    assert f"<td>{name}</td>" in table
    assert f"<td>{value:.4g}</td><td>{low:.4g} to {high:.4g}</td>" in table
  assert verdict.asymptote_line(fitted) in table
  shown = forecast.forecast_from(fitted, 40.0)
  rows = report.forecasts_fragment([shown], unit="steps")
  assert f"<td>40</td><td>{shown.mean:.3f}</td>" in rows
  page = report.page("<run>", [figure, table, rows])
  assert page.startswith("<!doctype html>")
  assert "<title>&lt;run&gt;</title>" in page
  assert not re.search(r'(src|href)="(?!data:)', page)


def test_buffer_is_png(fitted):
  buffer = io.BytesIO()
  report.plot_curve(buffer, COMPUTE, PASS_RATE, fitted)
  assert buffer.getvalue().startswith(PNG)
