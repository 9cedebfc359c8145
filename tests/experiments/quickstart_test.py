"""The quickstart is ScaleRL, wherever a laptop allows it."""

import dataclasses
import pathlib

from experiments import quickstart
from scalerl_jax import config as config_lib
from scalerl_jax.config import Config
from scalerl_jax.flags import load_config

FILE = pathlib.Path(quickstart.__file__)


def test_the_command_line_reads_it():
  config = load_config(str(FILE), [])
  assert isinstance(config, Config)
  assert config == quickstart.get_config()
  assert config_lib.from_dict(config_lib.to_dict(config)) == config


def test_the_recipe_is_the_papers():
  # arXiv 2510.13786, the choices of its final recipe.
  config = quickstart.get_config()
  assert config.loss == dataclasses.replace(
    config.loss,
    name="cispo",
    aggregation="prompt_average",
    normalization="batch_level",
    zero_variance="drop",
  )
  assert config.loss.clip_max in {4.0, 5.0, 8.0}  # ablated, no difference
  assert config.pipeline.max_staleness == 8
  assert (config.batch.prompts, config.batch.group_size) == (48, 16)
  assert config.batch.completions == 768
  assert config.optimizer.epsilon == 1e-15
  assert config.optimizer.weight_decay == 0.01
  assert (config.sampler.temperature, config.sampler.top_p) == (1.0, 1.0)
  assert config.sampler.top_k == 0


def test_it_ends_with_a_forecast_that_its_first_half_can_make():
  config = quickstart.get_config()
  evaluations = config.run.steps // config.evaluation.every
  assert evaluations >= 20
  assert config.run.steps % config.evaluation.every == 0
  assert config.run.forecast_axis.startswith("flops")


def test_it_is_the_same_run_twice():
  config = quickstart.get_config()
  assert config.pipeline.schedule == "logical"
  # A seed changes the reinforcement learning, not the task or its base.
  other = config_lib.override(config, {"run.seed": "2"})
  assert other.task == config.task
  assert other.supervised == config.supervised
