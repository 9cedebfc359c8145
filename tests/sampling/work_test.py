"""Counts of what a sampler computed."""

from scalerl_jax.sampling.work import Work


def test_counts_are_added_and_the_rest_is_kept():
  work = Work(prefilled_rows=2, decoded_slots=7)
  more = work.plus(decoded_slots=3, decoded_keys=5)
  assert more == Work(prefilled_rows=2, decoded_slots=10, decoded_keys=5)
  assert work == Work(prefilled_rows=2, decoded_slots=7)
