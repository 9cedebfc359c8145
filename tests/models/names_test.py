"""Published tensors and ours: the same numbers in other places."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from scalerl_jax.models import names
from scalerl_jax.models.config import read_config
from scalerl_jax.models.names import Stored
from tests.models.parts import CHECKPOINTS, NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_published_tensor_is_known_with_its_shape(name):
  folder = CHECKPOINTS / name
  model = read_config(json.loads((folder / "config.json").read_text())).model
  published = load_file(folder / "model.safetensors")
  expected = {tensor: values.shape for tensor, values in published.items()}
  assert names.published_shapes(model, 97) == expected


PLACES = {
  "vector": (Stored("", names.VECTOR), (7,)),
  "table": (Stored("", names.IDENTITY), (7, 5)),
  "linear": (Stored("", names.LINEAR), (5, 7)),
  "into_heads": (Stored("", names.INTO_HEADS), (5, 3, 4)),
  "rotary_pairs": (Stored("", names.INTO_HEADS, interleaved=True), (5, 3, 4)),
  "from_heads": (Stored("", names.FROM_HEADS), (3, 4, 5)),
  "bias": (Stored("", ((0, 1),)), (3, 4)),
  "second_half": (Stored("", names.STACKED, 1, 2), (3, 5, 7)),
}


@pytest.mark.parametrize("place", PLACES)
def test_any_part_is_read_from_its_rectangle_alone(place):
  stored, shape = PLACES[place]
  ours = np.arange(np.prod(shape)).reshape(shape)
  published = names.to_published(ours, stored)
  other = -1 - published
  parts = [other] * stored.parts
  parts[stored.part] = published
  published = np.concatenate(parts, axis=-1)
  for axis, size in enumerate(shape):
    wanted = [slice(None)] * len(shape)
    wanted[axis] = slice(size // 2, size)
    read = []

    def rectangle(part, read=read):
      read.append(published[part])
      return read[0]

    found = names.read_part(rectangle, stored, shape, tuple(wanted))
    np.testing.assert_array_equal(found, ours[tuple(wanted)])
    inner = axis in {a for group in stored.groups for a in group[1:]}
    assert read[0].size == (ours.size if inner else found.size)


def test_a_linear_layer_is_transposed_and_heads_are_rows():
  ours = np.arange(30).reshape(5, 3, 2)
  published = names.to_published(ours, Stored("", names.INTO_HEADS))
  assert published.shape == (6, 5)
  # Head 2, width 1, from input 4.
  assert published[2 * 2 + 1, 4] == ours[4, 2, 1]


def test_rotary_pairs_stand_side_by_side_where_the_family_has_them_so():
  ours = np.arange(6).reshape(1, 1, 6)
  place = Stored("", names.INTO_HEADS, interleaved=True)
  assert names.to_published(ours, place)[:, 0].tolist() == [0, 3, 1, 4, 2, 5]
