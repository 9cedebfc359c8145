"""The accelerator's benchmark runs on a CPU, with what a CPU has."""

import json

import numpy as np

from benchmarks import accelerator
from scalerl_jax.run.memory import parameter_count

TINY = accelerator.SIZES["tiny"]


def _lines(capsys):
  out, err = capsys.readouterr()
  del err
  lines = out.strip().splitlines()
  figures = [json.loads(line) for line in lines if line.startswith("{")]
  return figures, [line for line in lines if not line.startswith("{")]


def test_every_figure_is_told_and_what_is_left_out_is_said(capsys, monkeypatch):
  monkeypatch.setattr(accelerator, "REPEATS", 1)
  accelerator.measure("tiny", TINY)
  figures, said = _lines(capsys)
  assert [figure["benchmark"] for figure in figures] == [
    "decoding_tiny",
    "attention_tiny",
    *["learning_tiny"] * 3,
  ]
  decoding, attention, *learning = figures
  assert 0 < decoding["share_of_bandwidth"] <= 1
  assert 0 < decoding["share_of_bandwidth_full"] <= 1
  assert attention["kernel"] == "xla"
  # bfloat16 keeps 8 bits, and these mixes are below 4.
  assert attention["largest_difference"] <= 2**-6
  assert [(line["attention"], line["head"]) for line in learning] == [
    ("einsum", "float32"),
    ("xla", "float32"),
    ("xla", "bfloat16"),
  ]
  assert all(0 < line["mfu"] <= 1 for line in learning)
  assert len(said) == 1
  assert said[0].startswith("left out: model.attention must be einsum or xla")


def test_sizes_are_those_of_the_published_models():
  # Tied tables counted once; of the models' cards.
  expected = {"135m": 134_515_008, "1b": 1_235_814_400}
  for name, parameters in expected.items():
    size = accelerator.SIZES[name]
    assert parameter_count(size.model, size.vocab_size) == parameters


def test_a_batch_has_no_constant_group_and_trains_its_second_half():
  batch = accelerator.make_batch(TINY)
  groups = batch.correct.reshape(-1, accelerator.GROUP)
  assert np.all(groups.min(axis=1) < groups.max(axis=1))
  np.testing.assert_array_equal(
    batch.mask.sum(axis=1), np.full(TINY.rows, TINY.context // 2)
  )
  np.testing.assert_array_equal(batch.mask.argmax(axis=1), batch.prompt_length)
