import builtins
import json
import re

import numpy as np
import pytest

from scalerl_jax.scaling import fit, forecast, interactive, report, verdict
from tests.browser import Browser

COMPUTE = np.linspace(0.0, 40.0, 41)
EVIL = "</script><script>document.title='taken'</script><b>&"
NAMES = ["plain", EVIL]


def _pass_rate(asymptote, seed):
  law = (asymptote - 0.2) / (1.0 + (8.0 / np.maximum(COMPUTE, 1e-9)) ** 2.0)
  noise = np.random.default_rng(seed).normal(scale=0.006, size=41)
  return 0.2 + law + noise


@pytest.fixture(scope="module")
def shown():
  """Two runs: one fitted whole and tested back, one fitted on its half."""
  first, second = _pass_rate(0.8, 0), _pass_rate(0.7, 1)
  whole = fit.fit_curve(COMPUTE, first)
  half = fit.fit_curve(COMPUTE[:21], second[:21])
  return [
    report.ShownCurve(
      NAMES[0],
      COMPUTE,
      first,
      whole,
      forecast.first_part(COMPUTE, first),
      (forecast.forecast_from(whole, 80.0),),
      "GPU-hours",
    ),
    report.ShownCurve(NAMES[1], COMPUTE, second, half, unit="GPU-hours"),
  ]


@pytest.fixture(scope="module")
def page(shown, tmp_path_factory):
  """The file that a browser opens."""
  folder = tmp_path_factory.mktemp("page")
  notes = interactive.write_report(
    folder, shown, title=f"two runs {EVIL}", lead=["who wins"]
  )
  assert notes == ()
  return folder / "report.html"


def _data(text):
  pattern = r'<script type="application/json">(.*?)</script>'
  return json.loads(re.search(pattern, text, re.S).group(1))


def test_data_are_the_points_and_what_was_fitted_there(shown):
  data = _data(interactive.interactive_fragment(shown, still=""))
  assert (data["unit"], data["level"]) == ("GPU-hours", 0.9)
  for run, curve in zip(data["runs"], shown, strict=True):
    assert run["name"] == curve.name
    np.testing.assert_allclose(run["x"], curve.compute, rtol=1e-5)
    np.testing.assert_allclose(run["y"], curve.pass_rate, rtol=1e-5)
    for name, values in zip(
      ("mean", "low", "high"), curve.fit.predict(COMPUTE, 0.9), strict=True
    ):
      np.testing.assert_allclose(run[name], values, rtol=1e-5)
    seen = curve.compute <= curve.fit.compute[-1]
    assert run["fitted"] == seen.tolist()
    assert run["grid"]["x"][0] == 0.0
    assert run["grid"]["x"][-1] >= 80.0  # as far as the farthest forecast
  (told,) = data["runs"][0]["forecasts"]
  assert told["mean"] == shown[0].forecasts[0].mean
  assert told["x"] == 80.0
  part = data["runs"][0]["backtest"]
  assert part["measured"] == shown[0].backtest.measured
  assert part["last"] == 20.0
  assert part["fitted"] == (COMPUTE <= 20.0).tolist()
  assert data["runs"][1]["backtest"] is None


def test_asymptote_is_drawn_only_where_it_is_identified(shown):
  flat = np.full(41, 0.4)
  unknown = shown[0]._replace(pass_rate=flat, fit=fit.fit_curve(COMPUTE, flat))
  fragment = interactive.interactive_fragment([shown[0], unknown], still="")
  first, second = _data(fragment)["runs"]
  assert first["asymptote"] == shown[0].fit.params.asymptote
  assert second["asymptote"] is None


def test_a_panel_for_each_question(shown):
  one = interactive.interactive_fragment(shown, still="")
  assert re.findall(r"data-panel=(\w+)", one) == [
    *("curve", "residuals", "backtest")
  ]
  line = interactive.backtest_line(shown[0])
  told = shown[0].backtest.forecast
  assert (
    f"forecast as {told.mean:.3f} [{told.low:.3f}, {told.high:.3f}]" in line
  )
  assert line in one
  untested = interactive.interactive_fragment(shown[1:], still="")
  assert "backtest" not in re.findall(r"data-panel=(\w+)", untested)
  assert "too few" in interactive.backtest_line(shown[1])


def test_names_are_text_whatever_they_hold(page):
  text = page.read_text()
  assert "<script>document" not in text
  assert "<b>" not in text
  # Scripts: the data, and ours.
  assert len(re.findall("<script", text)) == 2
  assert len(re.findall("</script>", text)) == 2


def test_page_loads_nothing_and_runs_one_script(page):
  text = page.read_text()
  (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
  assert policy.startswith("default-src 'none'; ")
  assert re.search(r"script-src 'sha256-[\w+/=]{44}'$", policy)
  assert "http:" not in text
  assert "https:" not in text
  assert not re.search(r'(src|href)="(?!data:image/png;base64,)', text)
  bare = report.page("none", ["<p>no curve</p>"])
  assert "<script" not in bare
  assert "script-src" not in bare


def test_asymptote_line_comes_first(shown, page):
  text = page.read_text()
  lines = re.findall(r'<p class="verdict">(.*?)</p>', text)
  assert lines[0] == f"plain: {verdict.asymptote_line(shown[0].fit)}"
  assert "asymptote: " in lines[1]
  order = [lines[0], lines[1], "<p>who wins</p>", "<table", "<section"]
  places = [text.index(part) for part in order]
  assert places == sorted(places)
  alone = interactive.verdicts_fragment(shown[:1])
  assert f'<p class="verdict">{verdict.asymptote_line(shown[0].fit)}' in alone


def test_table_holds_every_parameter_of_every_run(shown):
  rows = interactive.parameters_fragment(shown)
  for curve in shown:
    for name, value, low, high in verdict.parameter_rows(curve.fit):
      assert f"<th>{name}</th>" in rows
      assert f"<td>{value:.4g}\n{low:.4g} to {high:.4g}</td>" in rows


def test_figures_stand_beside_the_page(page):
  assert (page.parent / "fit.png").read_bytes().startswith(b"\x89PNG")
  drawn = (page.parent / "fit.svg").read_text()
  assert drawn.startswith("<?xml")
  assert "compute (GPU-hours)" in drawn


def test_long_runs_are_thinned_and_put_in_order(shown):
  many = np.linspace(40.0, 0.0, 2001)
  rates = np.interp(many, COMPUTE, shown[0].pass_rate)
  long = shown[0]._replace(compute=many, pass_rate=rates, backtest=None)
  fragment = interactive.interactive_fragment([long], still="")
  (run,) = _data(fragment)["runs"]
  assert len(run["x"]) == len(run["mean"]) == 600
  assert (run["x"][0], run["x"][-1]) == (0.0, 40.0)
  assert (np.diff(run["x"]) > 0).all()
  np.testing.assert_allclose(
    run["y"], np.interp(run["x"], COMPUTE, shown[0].pass_rate), atol=1e-3
  )
  assert "plain: 600 of 2001 evaluations are drawn." in fragment


def test_units_do_not_share_a_figure(shown, tmp_path):
  other = shown[1]._replace(name="other", unit="steps")
  with pytest.raises(ValueError, match=r"one unit of compute, got .*steps"):
    interactive.interactive_fragment([shown[0], other], still="")
  interactive.write_report(tmp_path, [shown[0], other], title="two units")
  text = (tmp_path / "report.html").read_text()
  assert text.count('<section class="curves">') == 2
  assert "GPU-hours" in (tmp_path / "fit.svg").read_text()
  assert "steps" in (tmp_path / "fit_2.svg").read_text()


def test_page_is_whole_without_matplotlib(shown, tmp_path, monkeypatch):
  found = builtins.__import__

  def missing(name, *args, **kwargs):
    if name.split(".")[0] == "matplotlib":
      raise ImportError(name)
    return found(name, *args, **kwargs)

  monkeypatch.setattr(builtins, "__import__", missing)
  (note,) = interactive.write_report(tmp_path, shown[:1], title="alone")
  assert note.startswith("fit.png and fit.svg are left out: ")
  assert "scalerl-jax[plot]" in note
  assert not (tmp_path / "fit.png").exists()
  text = (tmp_path / "report.html").read_text()
  assert len(_data(text)["runs"]) == 1
  assert report.parameters_fragment(shown[0].fit, unit="GPU-hours") in text
  assert "drawn by the page's own JavaScript" in text


def test_without_javascript_there_is_the_figure(shown):
  still = interactive.interactive_fragment(shown[:1])
  assert 'src="data:image/png;base64,' in still
  given = interactive.interactive_fragment(shown[:1], still="<p>picture</p>")
  assert '<div class="still"><p>picture</p></div>' in given


@pytest.mark.parametrize(
  ("arguments", "sentence"),
  [
    ({"shown": []}, "at least one curve"),
    ({"level": 90.0}, "level must be in"),
  ],
)
def test_bad_input_is_one_sentence(shown, arguments, sentence):
  arguments = {"shown": shown, "still": ""} | arguments
  with pytest.raises(ValueError, match=sentence):
    interactive.interactive_fragment(**arguments)


PANEL = "document.querySelector('.panel.{}')"
POINT = PANEL + ".querySelectorAll('.point')[{}]"
TIP = PANEL + ".querySelector('.tip').textContent"
TICKS = (
  "[...document.querySelectorAll('.panel.{} .tick')].map(e => e.textContent)"
)
COUNT = "document.querySelectorAll('.panel.{} .{}').length"


def _axis(value):
  return f"document.querySelector('input[value={value}]')"


@pytest.mark.slow
def test_page_works_in_a_browser(shown, page, tmp_path):
  with Browser(tmp_path) as browser:
    browser.open(page)
    assert browser.value("document.title") == f"two runs {EVIL}"
    assert browser.value("document.querySelector('.still')") is None
    assert browser.value("document.querySelectorAll('.panel').length") == 3
    assert browser.value(COUNT.format("curve", "point")) == 82

    # Hover shows values: run, compute, pass rate, fitted mean and band.
    for kind, source in (
      ("curve", shown[0].fit),
      ("residuals", shown[0].fit),
      ("backtest", shown[0].backtest.fit),
    ):
      browser.hover(POINT.format(kind, 30), dx=2)
      mean, low, high = source.predict(30.0, 0.9)
      assert browser.value(TIP.format(kind)).split("\n") == [
        "plain",
        "compute 30 (GPU-hours)",
        f"pass rate {shown[0].pass_rate[30]:.4f}",
        f"fitted mean {mean:.4f}",
        f"90 % band {low:.4f} to {high:.4f}",
        "not shown to the fit" if kind == "backtest" else "fitted",
      ]
    browser.hover(POINT.format("curve", 80))
    assert browser.value(TIP.format("curve")).startswith(EVIL)
    browser.hover("document.querySelector('h1')")
    assert browser.value(TIP.format("curve")) == ""

    # The axis toggle changes the ticks of every panel.
    before = [browser.value(TICKS.format(k)) for k in ("curve", "residuals")]
    spots = browser.value(
      f"{POINT.format('curve', 5)}.getAttribute('transform')"
    )
    browser.click(_axis("linear"))
    after = [browser.value(TICKS.format(k)) for k in ("curve", "residuals")]
    assert before[0] != after[0]
    assert before[1] != after[1]
    steps = np.diff([float(tick) for tick in after[0]])
    assert len(steps) > 2
    np.testing.assert_allclose(steps, steps[0])
    assert spots != browser.value(
      f"{POINT.format('curve', 5)}.getAttribute('transform')"
    )
    browser.press("ArrowLeft")  # the radio buttons answer to the keyboard
    assert browser.value(TICKS.format("curve")) == before[0]

    # The legend switches runs off and on, by mouse and by keyboard.
    button = "document.querySelectorAll('.legend button')[1]"
    browser.click(button)
    assert browser.value(COUNT.format("curve", "point")) == 41
    assert browser.value(f"{button}.getAttribute('aria-pressed')") == "false"
    browser.press(" ")
    assert browser.value(COUNT.format("curve", "point")) == 82
    first = "document.querySelectorAll('.legend button')[0]"
    for off in (button, first):
      browser.click(off)
    assert browser.value(COUNT.format("curve", "point")) == 0
    for on in (button, first):
      browser.click(on)

    # The points can be read with the arrow keys alone.
    browser.value(f"{PANEL.format('curve')}.querySelector('svg').focus()")
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    assert "compute 1 (GPU-hours)" in browser.value(TIP.format("curve"))
    browser.press("ArrowDown")
    assert browser.value(TIP.format("curve")).startswith(EVIL)
    browser.press("Escape")
    assert browser.value(TIP.format("curve")) == ""

    # A phone: nothing sticks out.
    browser.call(
      "Emulation.setDeviceMetricsOverride",
      **{"width": 360, "height": 700, "deviceScaleFactor": 2, "mobile": True},
    )
    assert browser.value("document.documentElement.scrollWidth") <= 360
    assert browser.value(COUNT.format("curve", "point")) == 82

    assert browser.complaints() == []
    ours = page.as_uri()
    assert ours in browser.requests()
    assert not [
      url for url in browser.requests() if url != ours and url[:5] != "data:"
    ]


def test_browser_says_what_it_is_for_when_it_is_missing(tmp_path, monkeypatch):
  monkeypatch.setenv("PATH", str(tmp_path))
  with pytest.raises(pytest.fail.Exception, match="apt-get install chromium"):
    Browser(tmp_path)


@pytest.mark.slow
def test_browser_tells_what_a_bad_page_does(tmp_path):
  # The witness of the two empty lists above.
  bad = tmp_path / "bad.html"
  bad.write_text(
    "<script>fetch('http://127.0.0.1:9/x').catch(() => 0); no_such()</script>"
  )
  with Browser(tmp_path / "profile") as browser:
    browser.open(bad)
    browser.value("new Promise(r => setTimeout(r, 200))")
    assert "http://127.0.0.1:9/x" in browser.requests()
    assert browser.complaints()
