"""Who sees whom, pair by pair."""

import jax.numpy as jnp
import numpy as np

from scalerl_jax.models import visibility

SEGMENTS = np.array([[1, 1, 2, 2, 2], [0, 3, 3, 0, 3], [1, 0, 0, 1, 2]])


def test_a_query_sees_its_own_segment_up_to_itself_and_no_padding():
  mask = visibility.attention_mask(jnp.asarray(SEGMENTS, jnp.int32))
  for b, row in enumerate(SEGMENTS):
    for t, mine in enumerate(row):
      for u, other in enumerate(row):
        sees = u <= t and mine == other and other != 0
        assert bool(mask[b, t, u]) == sees


def test_a_chunk_sees_itself_only():
  positions = jnp.array([[0, 1, 2, 3, 4, 5, 6], [4, 5, 0, 1, 2, 3, 4]])
  mask = visibility.chunk_mask(positions, positions, 3)
  for b, row in enumerate(np.asarray(positions)):
    for t, query in enumerate(row):
      for u, key in enumerate(row):
        assert bool(mask[b, t, u]) == (query // 3 == key // 3)


def test_completions_go_on_where_their_prompt_ends():
  positions = visibility.group_positions(
    jnp.array([2, 3]), prompt=3, group=2, length=2
  )
  np.testing.assert_array_equal(
    positions, [[0, 1, 2, 2, 3, 2, 3], [0, 1, 2, 3, 4, 3, 4]]
  )


def _seen(chunk, rotates):
  """[query, key] of a row that holds a prompt of 3 in 4 columns, and 2 of 5.

  With equal scores a query's mix of one-hot values is the keys that it sees.
  """
  prompt, group, length = 4, 2, 5
  width = prompt + group * length
  attend = visibility.within_groups(
    jnp.array([3]), prompt=prompt, group=group, length=length, chunk=chunk
  )
  nothing = jnp.zeros((1, width, 1, width))
  ones = jnp.eye(width)[None, :, None]
  return np.asarray(attend(rotates, nothing, nothing, ones))[0, :, 0] > 0


def _expected(chunk):
  where = [("prompt", t, t) for t in range(4)]
  where += [(row, 3 + t, t) for row in (0, 1) for t in range(5)]
  seen = np.zeros((len(where), len(where)), bool)
  for q, (mine, at, _) in enumerate(where):
    for k, (other, place, column) in enumerate(where):
      real = other != "prompt" or column < 3
      own = other in ("prompt", mine) and place <= at
      near = not chunk or at // chunk == place // chunk
      seen[q, k] = real and own and near
  return seen


def test_a_completion_sees_its_prompt_and_itself():
  seen, expected = _seen(0, True), _expected(0)
  # The column that pads the prompt asks for nothing that anybody reads.
  used = [row for row in range(14) if row != 3]
  np.testing.assert_array_equal(seen[used], expected[used])


def test_layers_that_rotate_see_a_chunk_and_others_all():
  used = [row for row in range(14) if row != 3]
  near, far = _seen(2, True), _seen(2, False)
  np.testing.assert_array_equal(near[used], _expected(2)[used])
  np.testing.assert_array_equal(far[used], _expected(0)[used])
