"""AdamW by the book, every hyperparameter felt."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from scalerl_jax.config import OptimizerConfig
from scalerl_jax.learning.optimizer import make_optimizer, warmup_constant

CONFIG = OptimizerConfig(learning_rate=0.03, warmup_steps=3)
START = [0.5, -2.0, 0.0, 1.5]
GRADIENTS = [
  [0.3, -0.1, 0.2, 0.0],
  [2.0, 1.0, -3.0, 0.5],
  [0.1, 0.0, 0.0, -1.0],
]


def _slow(config, steps=GRADIENTS):
  """Clip, moments, bias correction, decay, one number at a time."""
  params, first, second = list(START), [0.0] * 4, [0.0] * 4
  for n, gradient in enumerate(steps, 1):
    norm = math.sqrt(math.fsum(g * g for g in gradient))
    scale = min(1.0, config.clip_norm / norm)
    rate = config.learning_rate * min(1.0, n / max(config.warmup_steps, 1))
    for i, g in enumerate(gradient):
      g *= scale
      first[i] = config.beta1 * first[i] + (1.0 - config.beta1) * g
      second[i] = config.beta2 * second[i] + (1.0 - config.beta2) * g * g
      mean = first[i] / (1.0 - config.beta1**n)
      square = second[i] / (1.0 - config.beta2**n)
      step = mean / (math.sqrt(square) + config.epsilon)
      params[i] -= rate * (step + config.weight_decay * params[i])
  return params


def _fast(config, steps=GRADIENTS):
  optimizer = make_optimizer(config)
  params = jnp.asarray(START, jnp.float32)
  state = optimizer.init(params)
  for gradient in steps:
    updates, state = optimizer.update(
      jnp.asarray(gradient, jnp.float32), state, params
    )
    params = optax.apply_updates(params, updates)
  return np.asarray(params)


@pytest.mark.parametrize(
  "change",
  [
    {},
    {"learning_rate": 0.1},
    {"warmup_steps": 0},
    {"beta1": 0.5},
    {"beta2": 0.7},
    {"epsilon": 0.1},
    {"weight_decay": 0.5},
    {"clip_norm": 100.0},
  ],
  ids=lambda change: next(iter(change), "paper"),
)
def test_updates_equal_the_scalar_loop_and_feel_every_number(change):
  config = dataclasses.replace(CONFIG, **change)
  np.testing.assert_allclose(_fast(config), _slow(config), rtol=1e-5, atol=1e-6)
  if change:
    assert np.abs(_fast(config) - _fast(CONFIG)).max() > 1e-4


def test_gradients_of_a_trillionth_move_parameters_by_the_learning_rate():
  config = OptimizerConfig(warmup_steps=0, weight_decay=0.0)
  tiny = [[1e-12, -1e-12, 1e-12, -1e-12]]
  moved = _fast(config, tiny) - np.float32(START)
  expected = config.learning_rate * np.array([-1, 1, -1, 1])
  np.testing.assert_allclose(moved, expected, rtol=2e-3)
  usual = dataclasses.replace(config, epsilon=1e-8)
  assert np.abs(_fast(usual, tiny) - np.float32(START)).max() < 1e-6


def test_the_rate_rises_from_the_first_update_and_stays():
  schedule = warmup_constant(0.8, 4)
  rates = [float(schedule(n)) for n in range(7)]
  np.testing.assert_allclose(
    rates, [0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.8], rtol=1e-6
  )
  assert float(warmup_constant(0.8, 0)(0)) == pytest.approx(0.8)


def test_the_defaults_are_the_papers():
  config = OptimizerConfig()
  assert config.epsilon == 1e-15
  assert config.weight_decay == 0.01
