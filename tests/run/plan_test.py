"""The plan: what fits does, what is larger does not, and nothing is made."""

import dataclasses
import shutil
from pathlib import Path

import jax
import pytest

from scalerl_jax.config import ModelConfig
from scalerl_jax.models.sharding import make_mesh
from scalerl_jax.run import plan
from scalerl_jax.run.accounting import Compute
from scalerl_jax.run.meshes import Meshes
from tests.runs import TINY, vary

CHECKPOINT = Path(__file__).parents[1] / "fixtures/checkpoints/qwen3"
V = 70


def _apart(devices=2, **axes):
  """Each role on its own devices."""
  found = jax.devices()
  return Meshes(
    make_mesh(found[:devices]), make_mesh(found[devices : 2 * devices], **axes)
  )


def _plan(config=TINY, memory=None, meshes=None):
  return plan.make_plan(
    config, meshes or _apart(1), vocab_size=V, device_bytes=memory
  )


def _with(config, *, micro_batch=None, slots=None):
  if micro_batch is not None:
    config = vary(config, batch={"micro_batch": micro_batch})
  return config if slots is None else vary(config, sampler={"slots": slots})


@pytest.mark.parametrize("devices", [1, 2])
def test_the_largest_that_fits_fits_and_the_next_does_not(devices):
  meshes = _apart(devices)
  for micro_batch in (2, 4, 8):
    tried = _with(TINY, micro_batch=micro_batch)
    room = sum(_plan(tried, meshes=meshes).learner.values())
    assert _plan(TINY, room, meshes).largest_micro_batch == micro_batch
    assert _plan(TINY, room - 1, meshes).largest_micro_batch < micro_batch
  # Whole groups of four on each device.
  for groups in (2, 3, 11):
    slots = 4 * groups * devices
    room = sum(_plan(_with(TINY, slots=slots), meshes=meshes).sampler.values())
    assert _plan(TINY, room, meshes).largest_slots == slots
    assert _plan(TINY, room - 1, meshes).largest_slots < slots


def test_where_both_roles_share_a_device_each_leaves_room_for_the_other():
  one = make_mesh(jax.devices()[:1])
  shared = Meshes(one, one)
  alone = _plan()
  both = sum(alone.learner.values()) + sum(alone.sampler.values())
  found = _plan(TINY, both, shared)
  assert found.shared
  assert not alone.shared
  assert found.largest_micro_batch == TINY.batch.micro_batch
  assert found.largest_slots == TINY.sampler.slots
  assert _plan(TINY, both - 1, shared).largest_slots < TINY.sampler.slots


def test_too_small_a_device_holds_nothing():
  found = _plan(TINY, 1000)
  assert found.largest_micro_batch == found.largest_slots == 0
  assert any(line.endswith("that fits: none") for line in found.lines())


def test_flops_are_those_of_a_step_of_full_length():
  found = _plan()
  compute = Compute(TINY.model, TINY.sampler, TINY.batch, vocab_size=V)
  tokens = TINY.batch.completions * TINY.sampler.max_completion_tokens
  assert found.generation_flops + found.training_flops == pytest.approx(
    compute.full(1, tokens), rel=1e-12
  )


def test_packed_rows_and_chunks_are_told():
  packed = vary(TINY, batch={"packing": 30}, loss={"logprob_chunk": 9})
  told = "\n".join(_plan(packed).lines())
  assert "8 rows x 30 tokens, 9 tokens with logits at a time" in told
  wider, plain = (
    _plan(config).learner["activations"] for config in (packed, TINY)
  )
  assert wider > 2.5 * plain


def test_groups_behind_their_prompts_are_told():
  shared = vary(TINY, batch={"share_prompts": True, "width_buckets": 2})
  found, plain = _plan(shared), _plan()
  told = "\n".join(found.lines())
  assert (
    "2 prompts x 5 tokens, with 4 completions each x 7 or 2 x 4, all with"
    in told
  )
  assert found.learner["activations"] < plain.learner["activations"]
  assert found.training_flops < 0.8 * plain.training_flops
  assert _plan(shared, 1 << 40).largest_micro_batch == 16


def test_narrower_micro_batches_are_told():
  told = "\n".join(_plan(vary(TINY, batch={"width_buckets": 3})).lines())
  assert "8 rows x 12 tokens or 8 x 8 or 16 x 4, all with logits" in told


def test_what_no_device_shares_is_named():
  meshes = _apart(2, tensor=1, fsdp=2)
  odd = vary(TINY, model={"width": 15})
  told = _plan(odd, meshes=meshes).lines()
  assert "not shared by devices: embedding: embed 15 on fsdp 2" in told


def test_nothing_is_made_and_the_task_says_the_vocabulary():
  before = len(jax.live_arrays())
  told = plan.plan_run(TINY, 1.5).lines()
  assert len(jax.live_arrays()) == before
  assert "memory of a device: 1.50 GiB" in told
  unknown = plan.plan_run(TINY).lines()
  assert any("--device_memory_gib" in line for line in unknown)


def test_of_a_checkpoint_its_config_is_enough(tmp_path):
  shutil.copy(CHECKPOINT / "config.json", tmp_path)
  config = dataclasses.replace(
    vary(TINY, supervised={"steps": 0}),
    model=ModelConfig(checkpoint=str(tmp_path)),
  )
  before = len(jax.live_arrays())
  found = plan.plan_run(config)
  assert len(jax.live_arrays()) == before
  stored = sum(
    x.size for x in _tensors(CHECKPOINT / "model.safetensors").values()
  )
  assert found.parameters == stored


def _tensors(path):
  from safetensors.numpy import load_file

  return load_file(path)


def test_a_memory_below_nothing_is_refused():
  with pytest.raises(ValueError, match=r"--device_memory_gib .* got -1"):
    plan.plan_run(TINY, -1.0)
