"""The measured run of SmolLM2: what its docstring promises is in its files."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from experiments import smollm2_arithmetic
from scalerl_jax import config as config_lib

RESULTS = (
  Path(smollm2_arithmetic.__file__).parent / "results/smollm2_arithmetic"
)


def _column(file, name):
  with (RESULTS / file).open() as rows:
    return np.array([float(row[name]) for row in csv.DictReader(rows)])


def test_the_training_pass_rate_rises():
  rates = _column("training.csv", "train_pass_rate")
  assert len(rates) == smollm2_arithmetic.get_config().run.steps
  first, last = rates[:5].mean(), rates[-5:].mean()
  assert last >= first + 0.08
  assert (first, last) == pytest.approx((0.28, 0.80), abs=0.005)


def test_held_out_prompts_gain_beyond_the_noise():
  with np.load(RESULTS / "evaluations.npz") as found:
    correct, samples = (
      found[f"reasoning_gym/{name}"] for name in ("correct", "samples")
    )
  rates = correct / samples
  curve = _column("seed0.csv", "pass_rate")
  np.testing.assert_allclose(rates.mean(axis=1), curve, rtol=1e-12)
  gain = rates[-1] - rates[0]
  error = gain.std(ddof=1) / np.sqrt(len(gain))
  assert gain.mean() > 2 * error
  assert (gain.mean(), error) == pytest.approx((0.52, 0.042), abs=0.005)


def test_it_took_an_hour_at_most():
  assert _column("seed0.csv", "wall_seconds")[-1] <= 3600


def test_what_was_measured_is_what_the_file_says():
  # Fields that came later are at their defaults, which are what was there.
  measured = json.loads((RESULTS / "provenance.json").read_text())["config"]
  config = config_lib.to_dict(smollm2_arithmetic.get_config())
  for section, fields in measured.items():
    for name, value in fields.items():
      if (section, name) != ("model", "checkpoint"):
        assert config[section][name] == value, f"{section}.{name}"
