"""Which devices sample and which learn, on eight fake CPU devices."""

import jax
import pytest

from scalerl_jax.config import Config
from scalerl_jax.models.sharding import make_mesh
from scalerl_jax.run import meshes
from scalerl_jax.run.meshes import make_meshes
from tests.runs import vary

ACCELERATOR = "gpu"


class _Device:
  """A CPU device that says it is one of another platform."""

  def __init__(self, device):
    self.device, self.platform = device, ACCELERATOR


@pytest.fixture
def machine(monkeypatch):
  """`machine(5, ACCELERATOR)` has five of them."""

  def has(count, platform="cpu"):
    devices = jax.local_devices()[:count]
    if platform == ACCELERATOR:
      devices = [_Device(device) for device in devices]
    monkeypatch.setattr(meshes.jax, "local_devices", lambda: devices)

  def mesh(devices, **ways):
    return make_mesh([getattr(d, "device", d) for d in devices], **ways)

  monkeypatch.setattr(meshes, "make_mesh", mesh)
  return has


def _ids(mesh):
  return [device.id for device in mesh.devices.flat]


def _pipeline(**fields):
  return vary(Config(), pipeline=fields)


def test_one_device_is_shared(machine):
  machine(1)
  made = make_meshes(Config())
  assert _ids(made.generator) == _ids(made.trainer) == [0]
  assert made.devices == 1


@pytest.mark.parametrize("count", [2, 3, 8])
def test_two_cpu_devices_are_one_a_role(machine, count):
  machine(count)
  made = make_meshes(Config())
  assert _ids(made.generator) == [0]
  assert _ids(made.trainer) == [1]
  assert made.devices == 2


@pytest.mark.parametrize(("count", "half"), [(2, 1), (4, 2), (6, 3), (8, 4)])
def test_accelerators_are_halved_and_all_used(machine, count, half):
  machine(count, ACCELERATOR)
  config = vary(Config(), sampler={"slots": 516}, batch={"micro_batch": 96})
  made = make_meshes(config)
  assert _ids(made.generator) == list(range(half))
  assert _ids(made.trainer) == list(range(half, count))
  assert made.devices == count


def test_an_attention_that_the_devices_lack_is_refused(machine):
  model = {"attention": "cudnn", "dtype": "bfloat16"}
  machine(2)
  with pytest.raises(
    ValueError, match=r"model\.attention .* got cudnn on a cpu"
  ):
    make_meshes(vary(Config(), model=model))
  make_meshes(vary(Config(), model=model | {"attention": "xla"}))


def test_asked_for_generators_are_given(machine):
  machine(8, ACCELERATOR)
  config = vary(_pipeline(generator_devices=6), sampler={"slots": 516})
  made = make_meshes(config)
  assert _ids(made.generator) == [0, 1, 2, 3, 4, 5]
  assert _ids(made.trainer) == [6, 7]
  assert dict(made.generator.shape)["data"] == 6
  assert dict(made.trainer.shape)["data"] == 2


def test_sharding_takes_the_devices_it_needs_and_stays_disjoint(machine):
  machine(8)
  made = make_meshes(_pipeline(tensor=2, fsdp=2))
  shape = dict(made.trainer.shape)
  assert (shape["data"], shape["fsdp"], shape["tensor"]) == (1, 2, 2)
  shape = dict(made.generator.shape)
  assert (shape["data"], shape["fsdp"], shape["tensor"]) == (1, 1, 2)
  assert set(_ids(made.generator)).isdisjoint(_ids(made.trainer))
  assert made.devices == 6


def _refusal(config):
  with pytest.raises(ValueError, match=r".") as caught:
    make_meshes(config)
  assert "\n" not in str(caught.value)
  return str(caught.value)


@pytest.mark.parametrize("count", [2, 5])
def test_the_trainer_is_left_a_device(machine, count):
  machine(count)
  text = _refusal(_pipeline(generator_devices=count))
  assert "pipeline.generator_devices must leave a device" in text
  assert f"got {count} of {count}" in text


def test_one_device_cannot_be_given_away(machine):
  machine(1)
  text = _refusal(_pipeline(generator_devices=2))
  assert "pipeline.generator_devices" in text
  assert "got 2 of 1" in text


@pytest.mark.parametrize("count", [1, 2, 3])
def test_shards_are_not_more_than_devices(machine, count):
  machine(count)
  for fields in ({"tensor": 4}, {"fsdp": 4}):
    text = _refusal(_pipeline(**fields))
    assert "4" in text
    assert next(iter(fields)) in text or "generator_devices" in text


@pytest.mark.parametrize(
  ("section", "field", "fits", "does_not"),
  [("sampler", "slots", 516, 514), ("batch", "micro_batch", 96, 64)],
)
def test_rows_are_shared_evenly(machine, section, field, fits, does_not):
  machine(6, ACCELERATOR)  # three a role
  base = vary(Config(), sampler={"slots": 516}, batch={"micro_batch": 96})
  make_meshes(vary(base, **{section: {field: fits}}))
  text = _refusal(vary(base, **{section: {field: does_not}}))
  assert f"{section}.{field} must be divisible by the 3 devices" in text
  assert f"got {does_not}" in text


def test_rows_are_shared_over_fsdp_too(machine):
  machine(8)
  text = _refusal(vary(_pipeline(fsdp=3), batch={"micro_batch": 64}))
  assert "batch.micro_batch must be divisible by the 3 devices" in text
  shared = {"micro_batch": 48, "share_prompts": True}
  told = _refusal(vary(_pipeline(fsdp=2), batch=shared))
  assert (
    "batch.micro_batch / batch.group_size (16) must be divisible by the 2"
    " devices that share it, got 3"
  ) in told


def test_heads_are_never_cut(machine):
  machine(8)
  config = vary(
    _pipeline(tensor=2),
    model={"num_heads": 3, "num_kv_heads": 3},
  )
  text = _refusal(config)
  assert "pipeline.tensor (2) must divide the 3 query heads" in text


def test_experts_are_shared_on_both_meshes_and_never_unevenly(machine):
  machine(8)
  model = {"num_experts": 6, "expert_width": 5}
  made = make_meshes(vary(_pipeline(expert=2, fsdp=2), model=model))
  assert dict(made.generator.shape)["expert"] == 2
  shape = dict(made.trainer.shape)
  assert (shape["data"], shape["fsdp"], shape["expert"]) == (1, 2, 2)
  assert made.devices == 6
  text = _refusal(vary(_pipeline(expert=4), model=model))
  assert "pipeline.expert (4) must divide the 6 experts" in text
  text = _refusal(_pipeline(expert=2))
  assert "pipeline.expert must be 1 for a policy without experts, got 2" in text
