"""Ratios, targets and the table of a comparison, by hand."""

import pytest

from benchmarks.peers import table
from benchmarks.peers.table import Measured


def _results():
  return {
    "ours_float32": {"sampling": Measured([2.0, 1.0, 4.0], 4000)},
    "ours_bfloat16_dots": {"sampling": Measured([1.0, 1.0, 2.0], 4000)},
    "tunix_float32": {"sampling": Measured([5.0, 6.0, 7.0], 4000)},
    "tunix_bfloat16": {"sampling": Measured([4.0, 3.0, 2.0], 4000)},
    "trl_float32": {"step": Measured([9.0], 700)},
  }


def test_ratio_is_of_medians_and_its_spread_of_pairs():
  found = table.ratio([2.0, 1.0, 4.0], [5.0, 6.0, 7.0])
  assert found == (3.0, 1.75, 6.0)


def test_repeats_of_two_engines_must_pair():
  with pytest.raises(ValueError, match="zip"):
    table.ratio([1.0], [1.0, 2.0])


def test_a_cell_holds_median_spread_rate_and_multiple_of_ours():
  told = table.rows(_results())
  assert told[0].split() == ["sampling", "step"]
  assert "6.00 s [5.00, 7.00] 0.67 k/s 3.00x" in told[3]
  assert told[1].endswith("2.00 s [1.00, 4.00] 2.00 k/s 1.00x")
  assert told[5].endswith("9.00 s [9.00, 9.00] 0.08 k/s")


def test_the_best_of_several_is_the_one_to_beat():
  found = {record["claim"]: record for record in table.verdicts(_results())}
  assert set(found) == {
    "sampling: ours_float32/tunix_float32",
    "sampling: ours_bfloat16_dots/tunix_bfloat16",
  }
  dots = found["sampling: ours_bfloat16_dots/tunix_bfloat16"]
  assert (dots["value"], dots["low"], dots["high"]) == (3.0, 1.0, 4.0)
  assert dots["met"]


def test_a_target_that_is_missed_says_so():
  results = _results()
  results["ours_float32"]["sampling"] = Measured([3.0, 3.0, 3.0], 4000)
  told = table.lines(results)
  assert told[0] == (
    "sampling: ours_float32/tunix_float32 2.00x [1.67, 2.33]"
    " (target 2.2) MISSED"
  )
  assert "MISSED" not in told[1]


def test_occupancy_is_held_against_its_floor():
  extra = {"occupancy_while_waiting": 0.89}
  results = {"ours_float32": {"long_tail": Measured([1.0], 10, extra)}}
  (told,) = table.verdicts(results)
  assert told["value"] == 0.89
  assert not told["met"]
