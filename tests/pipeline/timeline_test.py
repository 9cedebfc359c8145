"""The timeline: a whole file after every step, bounded, true to the work."""

import json
import threading

import pytest

from scalerl_jax.pipeline.timeline import TRACKS, Timeline
from tests.pipeline import parts

DEVICES = ("sampler", "learner", "weights")


def _read(path):
  """Spans of a file, by track, in order of their start."""
  events = json.loads(path.read_text())
  names = {
    event["tid"]: event["args"]["name"]
    for event in events
    if event["name"] == "thread_name"
  }
  assert tuple(names.values()) == TRACKS
  spans = {track: [] for track in TRACKS}
  for event in events:
    if event["ph"] == "X":
      spans[names[event["tid"]]].append(event)
  for track in spans.values():
    track.sort(key=lambda span: span["ts"])
  return spans


def test_a_span_is_in_microseconds_on_its_track(tmp_path):
  timeline = Timeline(tmp_path / "t.json")
  timeline.add("learner", "update", 7.5, 7.75, step=3)
  timeline.add("host", "collate", 7.25, 7.375)
  timeline.close()
  spans = _read(tmp_path / "t.json")
  (update,), (collate,) = spans["learner"], spans["host"]
  assert update["dur"] == 250_000.0
  assert collate["dur"] == 125_000.0
  assert update["ts"] - collate["ts"] == pytest.approx(250_000.0)
  assert update["args"] == {"step": 3}


def test_the_file_is_whole_after_every_step_and_ends_with_the_last(tmp_path):
  path = tmp_path / "t.json"
  timeline = Timeline(path, steps=3)
  for step in range(5):
    timeline.add("learner", f"update {step}", step, step + 0.5)
    timeline.step()
    # Not closed: what a kill would leave.
    told = [span["name"] for span in _read(path)["learner"]]
    assert told == [f"update {n}" for n in range(min(step + 1, 3))]


def test_a_file_cut_anywhere_keeps_the_spans_before_the_cut(tmp_path):
  path = tmp_path / "t.json"
  timeline = Timeline(path)
  for n in range(4):
    timeline.add("host", f"span {n}", n, n + 1.0)
  timeline.close()
  text = path.read_text()
  for cut in range(len(text)):
    # As the viewers do: one event a line, the last one perhaps in pieces.
    lines = text[:cut].split("\n")[1:-1]
    events = [json.loads(line.rstrip(",")) for line in lines if line != "]"]
    assert len(events) == max(text[:cut].count("\n") - 1, 0)


def test_without_a_path_nothing_is_kept():
  timeline = Timeline(None)
  timeline.add("host", "x", 0.0, 1.0)
  with timeline.span("y"):
    pass
  timeline.step()
  timeline.close()


def test_no_file_of_an_earlier_run_is_lost_to_one_that_does_nothing(tmp_path):
  path = tmp_path / "t.json"
  path.write_text("[]")
  Timeline(path).close()
  assert path.read_text() == "[]"


def test_what_raises_leaves_no_span(tmp_path):
  timeline = Timeline(tmp_path / "t.json")
  with timeline.span("good"):
    pass
  with pytest.raises(ArithmeticError), timeline.span("bad"):
    raise ArithmeticError
  timeline.close()
  spans = _read(tmp_path / "t.json")["host"]
  assert [span["name"] for span in spans] == ["good"]


def test_any_thread_may_add(tmp_path):
  timeline = Timeline(tmp_path / "t.json", steps=1000)

  def add():
    for n in range(200):
      timeline.add("verification", "verify", n, n + 1.0)

  threads = [threading.Thread(target=add) for _ in range(3)]
  for thread in threads:
    thread.start()
  while any(thread.is_alive() for thread in threads):
    timeline.step()
  timeline.close()
  assert len(_read(tmp_path / "t.json")["verification"]) == 600


@pytest.mark.parametrize("schedule", ["logical", "wall"])
def test_spans_of_a_run_do_not_overlap_and_add_up(schedule, tmp_path):
  path = tmp_path / "t.json"
  pipeline = parts.make_pipeline(
    schedule=schedule, steps=5, timeline=Timeline(path, steps=100)
  )
  parts.finish(pipeline)
  pipeline.timeline.close()
  spans = _read(path)
  for track in TRACKS:
    assert spans[track]
    for one, later in zip(spans[track], spans[track][1:], strict=False):
      assert one["ts"] + one["dur"] <= later["ts"] + 0.01
  for track in DEVICES:
    watch = getattr(pipeline, f"{track}_watch")
    busy = [s["dur"] for s in spans[track] if s["name"] != "idle"]
    assert sum(busy) == pytest.approx(1e6 * watch.busy_seconds, abs=1.0)
    assert len(busy) == watch.pieces.total()
  # What they tell is what was counted.
  totals = pipeline.totals
  chunks = [s["args"] for s in spans["sampler"] if s["name"] == "chunk"]
  assert len(chunks) == totals.chunks
  assert sum(chunk["steps"] for chunk in chunks) == totals.decode_steps
  assert sum(chunk["tokens"] for chunk in chunks) == totals.drawn_tokens
  updates = [s["args"] for s in spans["learner"] if s["name"] == "update"]
  assert [update["step"] for update in updates] == [1, 2, 3, 4, 5]
  done = sum(update["micro_batches"] for update in updates)
  assert done == totals.micro_batches
  published = [
    s["args"]["version"] for s in spans["weights"] if s["name"] == "publish"
  ]
  assert published == [*range(6)]
  judged = sum(s["args"]["completions"] for s in spans["verification"])
  assert judged == pipeline.groups.admitted * parts.G
  prefilled = [s["args"] for s in spans["sampler"] if s["name"] == "prefill"]
  assert sum(p["prompts"] for p in prefilled) == pipeline.groups.admitted
