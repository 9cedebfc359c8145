"""Scalars of TensorBoard event files, read without TensorBoard.

Only what a curve needs: the framing of records, and the fields of an event
that hold a tag, a step and a number. Images, histograms and graphs are skipped.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple


class Scalar(NamedTuple):
  """One number that was logged."""

  tag: str
  step: int
  wall_time: float  # Seconds since 1970.
  value: float


def _crc_table() -> tuple[int, ...]:
  table = []
  for byte in range(256):
    for _ in range(8):
      byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    table.append(byte)
  return tuple(table)


_CRC = _crc_table()


def _masked_crc(data: bytes) -> int:
  """CRC-32C, rotated and shifted as the format stores it."""
  crc = 0xFFFFFFFF
  for byte in data:
    crc = _CRC[(crc ^ byte) & 0xFF] ^ crc >> 8
  crc ^= 0xFFFFFFFF
  return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def is_event_file(head: bytes) -> bool:
  """Whether a file begins with a record of events.

  Args:
    head: at least its first 12 bytes.
  """
  return len(head) >= 12 and (
    struct.unpack_from("<I", head, 8)[0] == _masked_crc(head[:8])
  )


def _records(data: bytes) -> Iterator[bytes]:
  """The records; one that is cut off at the end is left out."""
  at = 0
  while at + 12 <= len(data):
    if not is_event_file(data[at : at + 12]):
      raise ValueError(f"the record at byte {at} is damaged")
    end = at + 12 + struct.unpack_from("<Q", data, at)[0]
    if end + 4 > len(data):
      return
    yield data[at + 12 : end]
    at = end + 4


def _varint(data: bytes, at: int) -> tuple[int, int]:
  value = shift = 0
  while True:
    if at >= len(data) or shift > 63:
      raise ValueError("a field is cut off")
    value |= (data[at] & 0x7F) << shift
    at, shift = at + 1, shift + 7
    if data[at - 1] < 0x80:
      return value, at


def _fields(data: bytes) -> Iterator[tuple[int, int, bytes | int]]:
  """Number, wire type and content of each field of a message."""
  at = 0
  while at < len(data):
    key, at = _varint(data, at)
    kind = key & 7
    if kind == 0:
      value, at = _varint(data, at)
      yield key >> 3, kind, value
      continue
    if kind == 2:
      size, at = _varint(data, at)
    elif kind in (1, 5):
      size = 8 if kind == 1 else 4
    else:
      raise ValueError(f"a field has the unknown type {kind}")
    if at + size > len(data):
      raise ValueError("a field is cut off")
    yield key >> 3, kind, data[at : at + size]
    at += size


def _tensor(data: bytes) -> float | None:
  """The number of a tensor of one float: how TensorFlow 2 logs a scalar."""
  size, found = {1: 4, 2: 8}, None  # DT_FLOAT, DT_DOUBLE
  dtype = 0
  for number, _, content in _fields(data):
    if number == 1 and isinstance(content, int):
      dtype = content
    elif number in (4, 5, 6) and isinstance(content, bytes) and content:
      found = content
  if found is None or len(found) != size.get(dtype):
    return None
  return struct.unpack("<f" if dtype == 1 else "<d", found)[0]


def _value(data: bytes) -> tuple[str, float] | None:
  tag, value = "", None
  for number, kind, content in _fields(data):
    if not isinstance(content, bytes):
      continue
    if number == 1 and kind == 2:
      tag = content.decode("utf-8", "replace")
    elif number == 2 and kind == 5:
      value = struct.unpack("<f", content)[0]
    elif number == 8 and kind == 2:
      value = _tensor(content)
  return None if value is None else (tag, float(value))


def read_scalars(data: bytes) -> list[Scalar]:
  """All scalars of an event file, in the order in which they were logged.

  Both forms are read: `simple_value` (PyTorch, tensorboardX, clu) and a tensor
  of one float (TensorFlow 2). A last record that is still being written is left
  out.

  Args:
    data: the file's bytes.

  Raises:
    ValueError: with the reason, for bytes that are not such a file.

  Reference:
    TensorFlow's `record_writer` (length, its CRC-32C, data, its CRC-32C; the
    data's is not checked here) and `event.proto`, `summary.proto`.
  """
  scalars = []
  for record in _records(data):
    wall_time, step, summary = 0.0, 0, b""
    for number, kind, content in _fields(record):
      if number == 1 and kind == 1 and isinstance(content, bytes):
        wall_time = struct.unpack("<d", content)[0]
      elif number == 2 and isinstance(content, int):
        step = content - (1 << 64) if content >> 63 else content
      elif number == 5 and isinstance(content, bytes):
        summary = content
    for _, _, content in _fields(summary):  # Its only field is `value`.
      found = _value(content) if isinstance(content, bytes) else None
      if found:
        scalars.append(Scalar(found[0], step, wall_time, found[1]))
  return scalars
