"""What a device can do at best, measured: products and memory traffic.

Rates of a run are told as shares of these. Measured once a process for each
kind of device, before the clock of training starts.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from scalerl_jax.config import Config, ModelConfig
from scalerl_jax.models.generator import generator_model
from scalerl_jax.models.operands import multiplied_in
from scalerl_jax.run.accounting import check_share, decode_bytes
from scalerl_jax.run.meshes import Meshes

SECONDS = 0.1  # of each measurement, its first run left out
REPEATS = 8  # at most
# Sides of the square product, and bytes that a measurement of traffic moves.
_SIDES = {"cpu": 1024}
_SIDE = 8192
_MOVED = {"cpu": 2**26}
_MOVES = 2**31
# Array sizes between which a decode step's own is measured.
_SMALLEST, _LARGEST = 2**20, 2**28
# How far above the best measurement a rate may lie before it is an error. The
# cores of a shared host change their speed by so much within a minute.
SLACK = {"cpu": 2.0}
SLACK_OF_OTHERS = 1.1


def _best_seconds(run: Callable[[], jax.Array]) -> float:
  """Of the fastest of a few runs, compilation left out."""
  run().block_until_ready()
  seconds = []
  while len(seconds) < REPEATS and sum(seconds) < SECONDS:
    start = time.perf_counter()
    run().block_until_ready()
    seconds.append(time.perf_counter() - start)
  return min(seconds)


def matmul_rate(device: Any, dtype: str, side: int | None = None) -> float:
  """FLOP/s of a square product on one device.

  Args:
    device: a jax.Device.
    dtype: of both factors.
    side: rows of the matrices; None: as the platform needs to be busy.
  """
  side = side or _SIDES.get(device.platform, _SIDE)
  square = jax.device_put(jnp.ones((side, side), dtype), device)
  # Sums in float32, as everywhere: a CPU rounds them at half the speed.
  product = jax.jit(
    lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32)
  )
  return 2.0 * side**3 / _best_seconds(lambda: product(square, square))


def copy_rate(device: Any, array_bytes: int) -> float:
  """Bytes a second that one device reads and writes in an array of this size.

  An array is gone through again and again in place, so that one that fits in
  a cache is measured there, as a decode step of that size runs there.

  Args:
    device: a jax.Device.
    array_bytes: of the array; taken between 1 MiB and 256 MiB.
  """
  numbers = int(np.clip(array_bytes, _SMALLEST, _LARGEST)) // 4
  moved = _MOVED.get(device.platform, _MOVES)
  times = max(2, moved // (8 * numbers))
  array = jax.device_put(jnp.zeros((numbers,), jnp.float32), device)

  @jax.jit
  def go_through(array: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, times, lambda _, x: x + 1.0, array)

  return 8.0 * numbers * times / _best_seconds(lambda: go_through(array))


class Peak:
  """The best rate seen, measured or achieved.

  Args:
    rate: as measured before.
    measure: measures it again.
    slack: factor above the best measurement up to which a rate is believed.

  Example:
    >>> peak = Peak(100.0, lambda: 90.0, slack=1.1)
    >>> peak.share("MFU", 40.0)
    0.4
    >>> peak.share("MFU", 105.0), peak.share("MFU", 84.0)
    (1.0, 0.8)
  """

  def __init__(self, rate: float, measure: Callable[[], float], slack: float):
    self.rate, self._measure, self._slack = rate, measure, slack

  def share(self, name: str, rate: float) -> float:
    """`rate` as a share of the peak.

    A rate above the peak has it measured again, for another program may have
    run beside the first measurement. One that is still above it is the peak
    from then on, within the slack.

    Raises:
      ValueError: the rate is above it by more: it was counted wrongly.
    """
    if rate > self.rate:
      self.rate = max(self.rate, self._measure())
      if rate <= self._slack * self.rate:
        self.rate = max(self.rate, rate)
    return check_share(name, rate / self.rate)


class Peaks(NamedTuple):
  """What the two sides of a run can do at best."""

  learner_matmul: Peak  # FLOP/s
  sampler_matmul: Peak
  sampler_copy: Peak  # bytes/s


Measure = Callable[[Any, Any], float]


@functools.cache
def _rate_of_kind(measure: Measure, kind: str, what: Any) -> float:
  """A rate of one device of this kind, whichever it is."""
  devices = jax.local_devices()
  return measure(next(d for d in devices if d.device_kind == kind), what)


def measure_peaks(config: Config, meshes: Meshes, vocab_size: int) -> Peaks:
  """Measures the devices of a run; of equal devices one, and once a process.

  Args:
    config: its body's dtype, and the size of a decode step.
    meshes: the two sides.
    vocab_size: V.
  """
  columns = config.sampler.max_prompt_tokens
  columns += config.sampler.max_completion_tokens
  step = decode_bytes(
    config.model,
    vocab_size=vocab_size,
    steps=1,
    slots=config.sampler.slots,
    columns=columns,
  )

  def peak(mesh: Mesh, measure: Measure, what: Any) -> Peak:
    device, count = mesh.devices.flat[0], mesh.devices.size
    return Peak(
      count * _rate_of_kind(measure, device.device_kind, what),
      lambda: count * measure(device, what),
      SLACK.get(device.platform, SLACK_OF_OTHERS),
    )

  def operands(model: ModelConfig) -> str:
    return str(multiplied_in(model.dot_dtype or model.dtype))

  trained = config.model
  sampled = generator_model(trained, config.sampler)
  return Peaks(
    peak(meshes.trainer, matmul_rate, operands(trained)),
    peak(meshes.generator, matmul_rate, operands(sampled)),
    peak(
      meshes.generator,
      copy_rate,
      int(step) // meshes.generator.devices.size,
    ),
  )
