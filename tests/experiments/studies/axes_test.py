"""Each study differs in its axis and in nothing else, also when shrunk."""

import dataclasses

import pytest

from experiments.recipes import RECIPES
from experiments.studies.axes import NAMES, load_study, with_seed
from experiments.studies.smoke import shrink
from scalerl_jax import config as config_lib

# How many places each axis has.
VARIANTS = {
  "loss_type": 3,
  "off_policy": 3,
  "aggregation": 4,
  "normalization": 3,
  "precision": 4,
  "zero_variance": 3,
  "curriculum": 3,
  "length_control": 3,
  "batch_size": 3,
  "group_size": 3,
  "generation_length": 3,
  "model_size": 3,
  "multitask": 3,
  "recipes": 6,
  "leave_one_out": 9,
  "learning_rate": 3,
}
WHOLE_RECIPES = {"recipes", "leave_one_out"}


def _flat(config):
  return {
    f"{section}.{field}": value
    for section, fields in config_lib.to_dict(config).items()
    for field, value in fields.items()
  }


def _differences(configs):
  """Fields in which any differs from the first, and each one's own."""
  first, *others = map(_flat, configs)
  return [{name for name in first if first[name] != o[name]} for o in others]


@pytest.mark.parametrize("name", NAMES)
def test_every_study_has_its_variants_all_different(name):
  variants = load_study(name).variants
  assert len(variants) == VARIANTS[name]
  values = list(variants.values())
  assert all(values.count(config) == 1 for config in values)
  for variant, config in variants.items():
    assert config_lib.from_dict(config_lib.to_dict(config)) == config
    assert variant == variant.strip("./ ")  # a folder's name


@pytest.mark.parametrize("shrunk", [False, True])
@pytest.mark.parametrize("name", sorted(set(NAMES) - WHOLE_RECIPES))
def test_variants_differ_in_exactly_the_axis(name, shrunk):
  study = load_study(name)
  configs = [shrink(c) if shrunk else c for c in study.variants.values()]
  differences = _differences(configs)
  assert all(differences)
  # A smoke run has its own number of steps, whatever the batch.
  own = {"run.steps", "evaluation.every"} if shrunk else set()
  axis = set(study.axis) - own
  assert set.union(*differences) == axis


@pytest.mark.parametrize("name", sorted(WHOLE_RECIPES))
def test_whole_recipes_share_what_they_are_trained_on(name):
  for sections in _differences(load_study(name).variants.values()):
    assert sections
    assert not {
      field
      for field in sections
      if field.split(".")[0]
      in {"run", "task", "supervised", "model", "optimizer", "evaluation"}
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_is_all_that_a_run_adds(name):
  for config in load_study(name).variants.values():
    assert config.run.seed == 0
    assert _differences([config, with_seed(config, 3)]) == [{"run.seed"}]


def test_completions_are_as_many_in_all():
  batches = load_study("batch_size").variants.values()
  assert {c.run.steps * c.batch.completions for c in batches} == {307_200}
  # As many evaluations, too, the last one at the last step.
  assert {c.run.steps / c.evaluation.every for c in batches} == {40.0}
  groups = load_study("group_size").variants.values()
  assert {c.batch.completions for c in groups} == {768}


def test_heads_fill_the_width_at_every_size():
  for config in load_study("model_size").variants.values():
    model = config.model
    assert model.num_heads * model.head_width == model.width


def test_the_reference_is_scalerls_choice():
  for name in set(NAMES) - WHOLE_RECIPES:
    study = load_study(name)
    reference = next(iter(study.variants.values()))
    for field in study.axis:
      section, _, inner = field.partition(".")
      chosen = getattr(getattr(RECIPES["scalerl"], section), inner)
      assert getattr(getattr(reference, section), inner) == chosen, field
  for name in WHOLE_RECIPES:
    assert next(iter(load_study(name).variants)) == "scalerl"


def test_the_off_policy_study_sees_waiting():
  study = load_study("off_policy")
  assert study.compute == ("device_seconds", "step")
  assert study.cores == 2


def test_every_axis_of_compute_is_known():
  for name in NAMES:
    assert set(load_study(name).compute) <= set(config_lib.COMPUTE_AXES)


def test_a_smoke_run_keeps_the_choices():
  for name in NAMES:
    for config in load_study(name).variants.values():
      small = shrink(config)
      for field in ("loss", "curriculum"):
        assert getattr(small, field) == getattr(config, field)
      assert small.length.control == config.length.control
      assert small.pipeline.algorithm == config.pipeline.algorithm
      assert small.run.steps == 6


def test_an_unknown_study_is_told_the_list():
  with pytest.raises(
    ValueError, match=r"--study must be one of loss_type,.*'l'"
  ):
    load_study("l")


def test_a_study_is_a_value():
  study = load_study("loss_type")
  with pytest.raises(dataclasses.FrozenInstanceError):
    study.axis = ()
