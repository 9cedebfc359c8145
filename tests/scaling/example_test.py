import csv
import pathlib

import numpy as np

from scalerl_jax.scaling import example

CURVE = pathlib.Path(__file__).parents[1] / "fixtures/curves"


def test_points_are_those_of_the_file():
  with (CURVE / "scalerl_fig1_dense.csv").open() as file:
    rows = list(csv.DictReader(file))
  run = example.fig1_dense()
  for split, x, y in (
    ("train", run.compute, run.pass_rate),
    ("ext", run.later_compute, run.later_pass_rate),
  ):
    chosen = [row for row in rows if row["split"] == split]
    assert len(chosen) == len(x)
    np.testing.assert_array_equal(
      x, [float(row["compute_gpu_hours"]) for row in chosen]
    )
    np.testing.assert_array_equal(
      y, [float(row["pass_rate"]) for row in chosen]
    )
  assert run.compute.max() < run.later_compute.min()
