"""The transport: whole versions, copies, and groups in their order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from scalerl_jax.config import SamplerConfig
from scalerl_jax.models.generator import weight_dtypes
from scalerl_jax.models.sharding import make_mesh, shardings_on
from scalerl_jax.pipeline.store import Scored, no_rollout
from scalerl_jax.pipeline.transport import InProcess, Transport
from tests.helpers import SHAPE, moved, small_policy

ONE = make_mesh(jax.devices()[:1])


def _params(mesh=ONE):
  return nnx.split(small_policy(mesh=mesh))[1]


def _host(tree):
  return jax.tree.map(np.array, tree)


def _same(left, right):
  jax.tree.map(np.testing.assert_array_equal, _host(left), right)


def _devices(tree):
  return {device for x in jax.tree.leaves(tree) for device in x.devices()}


def test_the_one_of_this_process_is_a_transport():
  assert isinstance(InProcess(None), Transport)


def test_nothing_is_fetched_before_a_version_is_published():
  with pytest.raises(ValueError, match="no weights were published; publish"):
    InProcess(shardings_on(ONE, _params())).fetch()


def test_the_newest_published_version_is_fetched_whole():
  params = _params()
  transport = InProcess(shardings_on(ONE, params))
  for version in range(3):
    newest = moved(params, 0.1, seed=version)
    transport.publish(version, newest)
  for _ in range(2):
    version, fetched = transport.fetch()
    assert version == 2
    _same(fetched, _host(newest))


def test_what_was_fetched_stays_when_a_newer_version_is_published():
  params = _params()
  transport = InProcess(shardings_on(ONE, params))
  transport.publish(0, params)
  _, older = transport.fetch()
  transport.publish(1, moved(params, 0.1))
  _same(older, _host(params))


@pytest.mark.parametrize("device", [0, 3])
def test_published_weights_outlive_the_donated_ones(device):
  params = jax.tree.map(jnp.copy, _params())
  expected = _host(params)
  shardings = shardings_on(make_mesh([jax.devices()[device]]), params)
  transport = InProcess(shardings)
  transport.publish(0, params)
  # What a train step does with its donated state.
  donate = jax.jit(lambda x: jax.tree.map(jnp.negative, x), donate_argnums=0)
  donate(params)
  assert all(x.is_deleted() for x in jax.tree.leaves(params))
  _, fetched = transport.fetch()
  _same(fetched, expected)
  assert _devices(fetched) == {jax.devices()[device]}


def test_weights_cross_from_one_cut_to_another():
  trainer = make_mesh(jax.devices()[:4], fsdp=2, tensor=2)
  generator = make_mesh(jax.devices()[4:6], tensor=2)
  params = _params(trainer)
  shardings = shardings_on(generator, params)
  transport = InProcess(shardings)
  transport.publish(0, params)
  _, fetched = transport.fetch()
  _same(fetched, _host(params))
  cut = set()
  for x, sharding in zip(
    jax.tree.leaves(fetched), jax.tree.leaves(shardings), strict=True
  ):
    assert x.sharding == sharding
    cut.add(x.addressable_shards[0].data.shape == x.shape)
  assert cut == {True, False}
  assert _devices(fetched) == set(jax.devices()[4:6])


def test_weights_cross_in_the_generators_dtypes():
  trainer = make_mesh(jax.devices()[:2], fsdp=2)
  params = jax.tree.map(jnp.copy, _params(trainer))
  shardings = shardings_on(ONE, params)
  sampler = SamplerConfig(dtype="bfloat16")
  dtypes = weight_dtypes(params, SHAPE, sampler)
  transport = InProcess(shardings, dtypes)
  transport.publish(0, params)
  expected = jax.tree.map(
    lambda x, dtype: np.asarray(x).astype(dtype), params, dtypes
  )
  # Those that keep their dtype are copies as well.
  donate = jax.jit(lambda x: jax.tree.map(jnp.negative, x), donate_argnums=0)
  donate(params)
  _, fetched = transport.fetch()
  _same(fetched, expected)
  assert _devices(fetched) == {jax.devices()[0]}
  assert jax.tree.map(lambda x: x.dtype, fetched) == dtypes
  kept = {x.dtype for x in jax.tree.leaves(fetched)}
  assert kept == {np.dtype("float32"), jnp.dtype("bfloat16")}


def test_weights_may_be_gathered_onto_one_device():
  trainer = make_mesh(jax.devices()[:2], fsdp=2)
  params = _params(trainer)
  whole = NamedSharding(ONE, PartitionSpec())
  transport = InProcess(jax.tree.map(lambda _: whole, params))
  transport.publish(0, params)
  _same(transport.fetch()[1], _host(params))


def test_groups_come_out_in_the_order_they_went_in_and_once():
  transport = InProcess(None)
  assert transport.get() is None
  nobody = no_rollout(3, SamplerConfig())
  correct = np.zeros(3, np.int32)
  groups = [Scored(index, nobody, correct) for index in (4, 2, 9)]
  for scored in groups[:2]:
    transport.put(scored)
  assert transport.get() is groups[0]
  transport.put(groups[2])
  assert [transport.get() for _ in range(3)] == [*groups[1:], None]
