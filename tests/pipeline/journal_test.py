"""The journal: one line an event, cut back to the state that goes on."""

import json

from scalerl_jax.pipeline.journal import Journal


def _lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_event_is_a_line_with_its_chunk(tmp_path):
  path = tmp_path / "journal.jsonl"
  journal = Journal(path)
  journal.write("publish", 0, version=0)
  journal.write("admit", 0, group=0, uid=7, first_sample=3, version=0)
  journal.flush()
  expected = [
    {"event": "publish", "at_chunk": 0, "version": 0},
    {
      "event": "admit",
      "at_chunk": 0,
      "group": 0,
      "uid": 7,
      "first_sample": 3,
      "version": 0,
    },
  ]
  assert _lines(path) == expected
  journal.write("update", 5, step=1, groups=[3, 1, 4])
  journal.close()
  update = {"event": "update", "at_chunk": 5, "step": 1, "groups": [3, 1, 4]}
  assert _lines(path) == [*expected, update]


def test_events_after_the_state_are_cut_and_new_ones_follow(tmp_path):
  path = tmp_path / "journal.jsonl"
  journal = Journal(path)
  for chunk in (0, 1, 1, 2, 3, 3, 5):
    journal.write("chunk", chunk, version=0)
  journal.close()
  again = Journal(path, events=4)
  again.write("chunk", 3, version=9)
  again.close()
  assert [line["at_chunk"] for line in _lines(path)] == [0, 1, 1, 2, 3]
  assert _lines(path)[-1]["version"] == 9


def test_a_new_run_starts_an_empty_journal(tmp_path):
  path = tmp_path / "journal.jsonl"
  Journal(path).close()
  assert path.read_text() == ""
  path.write_text('{"event": "chunk", "at_chunk": 1}\n')
  Journal(path).close()
  assert path.read_text() == ""
