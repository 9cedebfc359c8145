import io

import pytest

from scalerl_jax.run import progress
from scalerl_jax.run.progress import Progress


class Terminal(io.StringIO):
  def isatty(self):
    return True


@pytest.fixture
def time(monkeypatch):
  """A clock that only the test moves."""

  class Clock:
    now = 100.0

    def monotonic(self):
      return self.now

  clock = Clock()
  monkeypatch.setattr(progress, "time", clock)
  return clock


@pytest.fixture
def terminal(monkeypatch):
  monkeypatch.setenv("TERM", "xterm-256color")
  monkeypatch.setenv("COLUMNS", "100")
  monkeypatch.delenv("NO_COLOR", raising=False)
  return Terminal()


def test_plain_lines_come_first_last_seldom_and_when_asked(time):
  stream = io.StringIO()
  with Progress(100, "training", stream=stream) as bar:
    for step in range(1, 101):
      bar.update(step, {"pass rate": "0.5"}, now=step == 7)
      time.now += 1.0
  lines = stream.getvalue().splitlines()
  steps = [int(line.split("/")[0].split()[1]) for line in lines]
  assert steps == [1, 7, *range(17, 98, 10), 100]


def test_plain_lines_hold_step_fields_and_time_left(time):
  stream = io.StringIO()
  with Progress(80, "training", plain=True, stream=stream) as bar:
    # What comes before the first update (here 100 s, 20 steps) tells nothing.
    time.now += 100.0
    bar.update(20, {"pass rate": "0.25", "staleness": "3.1"})
    time.now += 30.0
    bar.update(30, {"pass rate": "0.26", "staleness": "3.2"})
    bar.say("stopping [now]")
    bar.update(80, {})
  assert stream.getvalue().splitlines() == [
    "training 20/80 | pass rate 0.25 | staleness 3.1 | time left unknown",
    "training 30/80 | pass rate 0.26 | staleness 3.2 | 2:30 left",
    "stopping [now]",
    "training 80/80 | done",
  ]


def test_a_file_gets_no_control_characters(terminal, time):
  stream = io.StringIO()
  with Progress(3, "training", stream=stream) as bar:
    for step in (1, 2, 3):
      bar.update(step, {"loss": "0.1"}, now=True)
  assert "\x1b" not in stream.getvalue()
  assert "\r" not in stream.getvalue()


def test_a_terminal_shows_the_newest_and_keeps_what_was_said(terminal):
  with Progress(40, "warm start", stream=terminal) as bar:
    assert not bar.plain
    bar.update(10, {"loss": "2.000 nats"})
    bar.say("a word [of] warning")
    bar.update(40, {"loss": "1.250 nats"})
  drawn = terminal.getvalue()
  assert "a word [of] warning" in drawn
  last = drawn[drawn.rindex("warm start") :]
  assert "40/40" in last
  assert "1.250 nats" in last
  assert "done" in last


def test_a_terminal_is_left_as_it_was_after_an_error(terminal):
  def interrupted():
    with Progress(40, "training", stream=terminal) as bar:
      bar.update(1, {})
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    interrupted()
  assert terminal.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor


def test_a_dumb_terminal_gets_plain_lines(terminal, monkeypatch):
  monkeypatch.setenv("TERM", "dumb")
  assert Progress(3, "training", stream=terminal).plain


def test_the_live_line_of_a_run_tells_its_state():
  metrics = {
    "train_pass_rate": 0.51249,
    "staleness_mean": 3.04,
    "time/sampler_tokens_per_second": 131_234.0,
    "forecast/mean": 0.9321,
    "forecast/low": 0.896,
    "forecast/high": 0.9649,
  }
  fields = progress.run_fields(metrics, 0.4375)
  assert fields == {
    "pass rate": "0.438 (train 0.512)",
    "tokens/s": "131k",
    "staleness": "3.0",
    "forecast": "0.932 [0.90, 0.96]",
  }


def test_what_is_not_known_is_not_shown():
  assert progress.run_fields({"forecast/mean": None}) == {}
  assert progress.run_fields({}, 0.25) == {"pass rate": "0.250"}


@pytest.mark.parametrize(
  ("number", "text"),
  [
    (0, "0"),
    (7.256, "7.26"),
    (999, "999"),
    (1000, "1k"),
    (999_900, "1M"),
    (62_967, "63k"),
    (4.26e12, "4.26T"),
    (5e9, "5G"),
  ],
)
def test_quantities_have_three_digits(number, text):
  assert progress.quantity(number) == text


@pytest.mark.parametrize(
  ("seconds", "text"), [(0.2, "0:00"), (59.6, "1:00"), (36_001, "10:00:01")]
)
def test_clock_rounds_and_carries(seconds, text):
  assert progress.clock(seconds) == text
