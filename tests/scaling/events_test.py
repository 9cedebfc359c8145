import struct

import numpy as np
import pytest
import tensorboardX
from tensorboardX.proto import event_pb2, summary_pb2, tensor_pb2
from tensorboardX.record_writer import masked_crc32c

from scalerl_jax.scaling import events


def _written(folder, scalars):
  """The bytes of a file that tensorboardX wrote."""
  with tensorboardX.SummaryWriter(str(folder)) as writer:
    for tag, value, step in scalars:
      writer.add_scalar(tag, value, step, walltime=1000.0 + step)
  (file,) = folder.glob("*tfevents*")
  return file.read_bytes()


def _framed(event):
  """A record as TensorFlow frames it, by tensorboardX's own checksum."""
  data = event.SerializeToString()
  head = struct.pack("<Q", len(data))
  return b"".join(
    (
      head,
      struct.pack("<I", masked_crc32c(head)),
      data,
      struct.pack("<I", masked_crc32c(data)),
    )
  )


def test_what_tensorboardx_writes_is_read_back(tmp_path):
  scalars = [("eval/pass_rate", 0.1 * i, 10 * i) for i in range(7)]
  scalars += [("loss", -1.5, 3), ("long", 2.0, 2**40), ("naïve/tag", 1e-30, 5)]
  found = events.read_scalars(_written(tmp_path, scalars))
  assert [(s.tag, s.step) for s in found] == [(t, n) for t, _, n in scalars]
  assert [s.wall_time for s in found] == [1000.0 + n for *_, n in scalars]
  want = np.array([v for _, v, _ in scalars], np.float32)
  np.testing.assert_array_equal([s.value for s in found], want)


def test_other_summaries_are_skipped(tmp_path):
  with tensorboardX.SummaryWriter(str(tmp_path)) as writer:
    writer.add_histogram("h", np.arange(99.0), 1)
    writer.add_text("t", "words", 1)
    writer.add_scalar("s", 0.5, 1)
  (file,) = tmp_path.glob("*tfevents*")
  assert [s.tag for s in events.read_scalars(file.read_bytes())] == ["s"]


@pytest.mark.parametrize(
  ("tensor", "value"),
  [
    ({"dtype": 1, "float_val": [0.25]}, 0.25),
    ({"dtype": 1, "tensor_content": struct.pack("<f", 0.25)}, 0.25),
    ({"dtype": 2, "double_val": [0.1]}, 0.1),
    ({"dtype": 1, "float_val": [0.25, 0.5]}, None),
    ({"dtype": 7, "string_val": [b"abcd"]}, None),
    ({"dtype": 3, "tensor_content": b"abcd"}, None),
  ],
)
def test_tensors_of_one_float_are_scalars(tensor, value):
  proto = tensor_pb2.TensorProto(**tensor)
  summary = summary_pb2.Summary(
    value=[summary_pb2.Summary.Value(tag="a", tensor=proto)]
  )
  event = event_pb2.Event(wall_time=2.0, step=-1, summary=summary)
  found = events.read_scalars(_framed(event))
  assert [s.value for s in found] == ([] if value is None else [value])
  assert all(s.step == -1 for s in found)


def test_every_cut_gives_the_records_before_it(tmp_path):
  scalars = [("a", float(i), i) for i in range(3)]
  data = _written(tmp_path, scalars)
  whole = events.read_scalars(data)
  counts = []
  for size in range(len(data)):
    found = events.read_scalars(data[:size])
    assert found == whole[: len(found)]
    counts.append(len(found))
  assert counts == sorted(counts)
  assert counts[-1] == len(whole) - 1


def test_damage_is_told(tmp_path):
  data = _written(tmp_path, [("a", 0.5, 1)])
  assert events.is_event_file(data)
  assert not events.is_event_file(b"compute,pass_rate\n")
  assert not events.is_event_file(data[:11])
  broken = data[:3] + bytes([data[3] ^ 1]) + data[4:]
  with pytest.raises(ValueError, match="the record at byte 0 is damaged"):
    events.read_scalars(broken)
  for content in (
    b"\x2a\x7f",
    b"\x0f",
    b"\xff" * 12,
    b"\x09ab",
    b"\x2a\x02\x0a\x05",
  ):
    head = struct.pack("<Q", len(content))
    record = head + struct.pack("<I", masked_crc32c(head)) + content + b"crc "
    with pytest.raises(ValueError, match="a field"):
      events.read_scalars(record)
