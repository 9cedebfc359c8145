"""Published checkpoints: what transformers computes, and back without loss."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from scalerl_jax.config import ModelConfig
from scalerl_jax.models import pretrained
from scalerl_jax.models.pretrained import load, save
from scalerl_jax.models.sharding import make_mesh
from tests.helpers import SHAPE, small_policy
from tests.models.parts import (
  CHECKPOINTS,
  NAMES,
  PROMPT,
  both_ways,
  check_reference,
  on,
)

SMOLLM2 = CHECKPOINTS.with_name("smollm2")

FSDP_TENSOR = (4, {"fsdp": 2, "tensor": 2})
ALL_THREE = (8, {"fsdp": 2, "tensor": 2})
EXPERT = (2, {"expert": 2})
DATA_FSDP = (4, {"fsdp": 2})


def _mesh(devices, axes):
  return make_mesh(jax.devices()[:devices], **axes)


def _case(name, mesh, *marks):
  axes = "-".join(f"{axis}{size}" for axis, size in mesh[1].items())
  return pytest.param(name, mesh, id=f"{name}-{mesh[0]}-{axes}", marks=marks)


SLOW = pytest.mark.slow
EIGHT = (8, {"fsdp": 2, "tensor": 2, "expert": 2})
SHARDED = [
  _case("llama3", ALL_THREE),
  _case("qwen3_moe", EXPERT),
  _case("llama_tied", DATA_FSDP, SLOW),
  _case("llama3", FSDP_TENSOR, SLOW),
  *(_case(name, FSDP_TENSOR, SLOW) for name in NAMES[2:]),
  *(_case(name, ALL_THREE, SLOW) for name in NAMES[2:]),
  *(_case(name, EXPERT, SLOW) for name in ("llama4", *NAMES[6:])),
  *(_case(name, EIGHT, SLOW) for name in ("llama4", "qwen3_moe", *NAMES[6:])),
]
# Of these, a mesh's case or a sibling that is harder is in the fast tier.
ALONE = [
  pytest.param(name, marks=SLOW)
  if name in ("llama3", "qwen3_moe", "llama4")
  else name
  for name in NAMES
]


@pytest.mark.parametrize("name", ALONE)
def test_log_probs_and_greedy_tokens_are_those_of_the_reference(name):
  check_reference(load(CHECKPOINTS / name, dtype=jnp.float32), name)


@pytest.mark.parametrize(("name", "shape"), SHARDED)
def test_every_mesh_gives_the_reference(name, shape):
  mesh = _mesh(*shape)
  policy = load(CHECKPOINTS / name, dtype="float32", mesh=mesh)
  assert policy.layers["query"][...].sharding.mesh == mesh
  check_reference(policy, name, mesh)


@pytest.mark.parametrize("shape", [FSDP_TENSOR, ALL_THREE])
def test_a_mesh_that_would_cut_a_head_is_refused(shape):
  with pytest.raises(ValueError, match=r"\(2\) must divide the 3 query heads"):
    load(CHECKPOINTS / "llama_tied", dtype="float32", mesh=_mesh(*shape))


def test_a_mesh_that_would_share_experts_unevenly_is_refused():
  mesh = _mesh(3, {"expert": 3})
  with pytest.raises(ValueError, match=r"\(3\) must divide the 8 experts"):
    load(CHECKPOINTS / "qwen3_moe", dtype="float32", mesh=mesh)


def test_words_that_the_tensor_axis_does_not_divide_are_padded_inside():
  mesh = _mesh(2, {"tensor": 2})
  policy = load(CHECKPOINTS / "qwen2", dtype="float32", mesh=mesh)
  plain = load(CHECKPOINTS / "qwen2", dtype="float32")
  assert policy.vocab_size == 97
  table = policy.embedding[...]
  assert table.shape == (98, 48)
  assert {s.data.shape for s in table.addressable_shards} == {(49, 48)}
  np.testing.assert_array_equal(table[:97], plain.embedding[...])
  graph, params = nnx.split(policy)
  tokens = jnp.asarray(np.arange(15).reshape(3, 5) * 6)

  def worst(params):
    logits = nnx.merge(graph, params)(tokens)
    assert logits.shape == (3, 5, 97)
    return -jax.nn.log_softmax(logits).min(axis=-1).sum()

  with on(mesh):
    gradient = jax.jit(jax.grad(worst))(params)["embedding"][...]
  assert np.abs(np.asarray(gradient[:97])).min(axis=1).max() > 0
  np.testing.assert_array_equal(gradient[97], np.zeros(48))


@pytest.mark.parametrize("name", NAMES)
def test_what_was_saved_is_what_was_published(name, tmp_path):
  mesh = _mesh(2, {"fsdp": 2} if name == "llama_tied" else {"tensor": 2})
  policy = load(CHECKPOINTS / name, dtype="float32", mesh=mesh)
  # Several files: a limit that some tensors pass alone.
  save(policy, tmp_path, shard_bytes=40_000)
  assert not (tmp_path / "model.safetensors").exists()
  saved = {}
  for path in tmp_path.glob("*.safetensors"):
    saved |= load_file(path)
  expected = load_file(CHECKPOINTS / name / "model.safetensors")
  assert saved.keys() == expected.keys()
  for tensor, values in expected.items():
    np.testing.assert_array_equal(saved[tensor], values)
  again = load(tmp_path, dtype="float32", mesh=mesh)
  assert again.config == policy.config
  jax.tree.map(
    np.testing.assert_array_equal, nnx.state(again), nnx.state(policy)
  )


def test_a_folder_saved_again_holds_nothing_of_before(tmp_path):
  policy = load(CHECKPOINTS / "qwen2", dtype="float32")
  save(policy, tmp_path, shard_bytes=40_000)
  save(policy, tmp_path)
  assert sorted(path.name for path in tmp_path.iterdir()) == [
    "config.json",
    "model.safetensors",
  ]


def test_dtype_is_that_of_parameters_and_body():
  policy = load(CHECKPOINTS / "qwen3", dtype=jnp.bfloat16)
  assert {x.dtype for x in jax.tree.leaves(nnx.state(policy))} == {
    jnp.dtype(jnp.bfloat16)
  }
  tokens = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)
  assert jax.eval_shape(policy.hidden, tokens).dtype == jnp.bfloat16
  assert jax.eval_shape(policy, tokens).dtype == jnp.float32
  with pytest.raises(ValueError, match="dtype must be one of float32, bfloat"):
    load(CHECKPOINTS / "qwen3", dtype=jnp.float16)


def test_ids_of_32_bits_eagerly_and_of_64_jitted_work_without_a_mesh():
  policy = load(CHECKPOINTS / "llama_tied", dtype=jnp.float32)
  ids = np.arange(10).reshape(2, 5)
  jitted = nnx.jit(lambda policy, tokens: policy(tokens))
  expected = policy(jnp.asarray(ids, jnp.int32))
  with jax.enable_x64(True):
    wide = jnp.asarray(ids, jnp.int64)
    assert wide.dtype == jnp.int64
    logits = jitted(policy, wide)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


def _copy(name, folder):
  shutil.copytree(CHECKPOINTS / name, folder, dirs_exist_ok=True)
  return load_file(folder / "model.safetensors")


def test_all_tensors_that_do_not_fit_are_told_in_one_table(tmp_path):
  tensors = _copy("qwen3", tmp_path)
  del tensors["model.layers.1.mlp.up_proj.weight"]
  tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((3, 5), np.float32)
  tensors["model.norm.weight"] = np.zeros(47, np.float32)
  save_file(tensors, tmp_path / "model.safetensors")
  with pytest.raises(ValueError, match="3 are not") as raised:
    load(tmp_path, dtype="float32")
  rows = [line.split() for line in str(raised.value).splitlines()[1:]]
  assert rows == [
    ["misshaped", "model.norm.weight", "(48,)", "(47,)"],
    ["missing", "model.layers.1.mlp.up_proj.weight", "(80,", "48)"],
    ["unexpected", "model.layers.2.mlp.up_proj.weight", "(3,", "5)"],
  ]


def _change(folder, **changes):
  path = folder / "config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_wrong_vocabulary_is_told_with_both_sizes(tmp_path):
  _copy("llama3", tmp_path)
  _change(tmp_path, vocab_size=101)
  with pytest.raises(
    ValueError, match=r"embed_tokens.weight  \(101, 48\) +\(97, 48\)"
  ):
    load(tmp_path, dtype="float32")


def test_what_other_programs_add_is_no_mismatch(tmp_path):
  tensors = _copy("qwen2", tmp_path)
  plain = load(tmp_path, dtype="float32")
  name = "model.layers.0.self_attn.rotary_emb.inv_freq"
  extra = {name: np.ones(6, np.float32)}
  extra["lm_head.weight"] = tensors["model.embed_tokens.weight"]
  save_file(tensors | extra, tmp_path / "model.safetensors")
  policy = load(tmp_path, dtype="float32")
  np.testing.assert_array_equal(policy.embedding[...], plain.embedding[...])


def test_text_model_of_a_model_with_images_is_read(tmp_path):
  tensors = _copy("llama4", tmp_path)
  inner = json.loads((tmp_path / "config.json").read_text())
  config = {"model_type": "llama4", "text_config": inner, "vision_config": {}}
  (tmp_path / "config.json").write_text(json.dumps(config))
  renamed = {f"language_model.{name}": x for name, x in tensors.items()}
  renamed["vision_model.layernorm_pre.weight"] = np.ones(3, np.float32)
  save_file(renamed, tmp_path / "model.safetensors")
  policy = load(tmp_path, dtype="float32")
  plain = load(CHECKPOINTS / "llama4", dtype="float32")
  jax.tree.map(
    np.testing.assert_array_equal, nnx.state(policy), nnx.state(plain)
  )


def test_a_missing_shard_is_named(tmp_path):
  save(load(CHECKPOINTS / "qwen2", dtype="float32"), tmp_path, shard_bytes=1)
  (tmp_path / "model-00003-of-00026.safetensors").unlink()
  with pytest.raises(ValueError, match=r"must hold model-00003-of-00026.safe"):
    load(tmp_path, dtype="float32")


@pytest.mark.parametrize("content", ["{", "[]", '{"metadata": {}}'])
def test_an_index_that_cannot_be_read_is_named(content, tmp_path):
  _copy("qwen2", tmp_path)
  (tmp_path / pretrained.INDEX).write_text(content)
  with pytest.raises(ValueError, match=r"index.json' must be JSON with a wei"):
    load(tmp_path, dtype="float32")


def test_half_a_file_is_named(tmp_path):
  _copy("qwen2", tmp_path)
  path = tmp_path / "model.safetensors"
  path.write_bytes(path.read_bytes()[:-100])
  with pytest.raises(ValueError, match=r"must be a whole safetensors file"):
    load(tmp_path, dtype="float32")


@pytest.mark.parametrize(
  ("content", "told"),
  [
    (None, "must hold a config.json"),
    ("{", "must be JSON"),
    ("[]", "must hold a JSON object"),
    ('{"model_type": "gpt2"}', r"got 'gpt2'.*config.json"),
  ],
)
def test_a_config_that_cannot_be_read_is_told(content, told, tmp_path):
  if content is not None:
    (tmp_path / "config.json").write_text(content)
  with pytest.raises(ValueError, match=told):
    load(tmp_path, dtype="float32")


@pytest.mark.parametrize("path", ["no_such_folder", "./some/thing", "/a/b"])
def test_a_path_that_is_neither_folder_nor_name_is_refused(path):
  with pytest.raises(ValueError, match=rf"'{path}' must be a folder"):
    load(path, dtype="float32")


def test_a_name_goes_to_the_hub_and_its_answer_is_told(monkeypatch, tmp_path):
  import huggingface_hub

  asked = []

  def snapshot_download(name, *, allow_patterns):
    asked.append((name, "*.safetensors" in allow_patterns))
    if name == "nobody/nothing":
      raise OSError("offline\nwith a second line")
    return str(CHECKPOINTS / "llama3")

  monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
  monkeypatch.chdir(tmp_path)
  policy = load("somebody/llama3", dtype="float32")
  assert policy.config.num_layers == 3
  with pytest.raises(ValueError, match=r"the hub says: offline$"):
    load("nobody/nothing", dtype="float32")
  assert asked == [("somebody/llama3", True), ("nobody/nothing", True)]


LOADS = """
import sys
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

for saved, known in zip(sys.argv[1::2], sys.argv[2::2]):
  model, told = AutoModelForCausalLM.from_pretrained(
    saved, output_loading_info=True
  )
  assert not any(told.values()), told
  known = load_file(known + "/reference.safetensors")
  with torch.no_grad():
    gap = (model(known["input_ids"]).logits - known["logits"]).abs().max()
  assert gap < 1e-4, gap
  print(type(model).__name__)
"""


def _python_with(folder, *packages):
  """The Python of a new environment that has these packages."""
  subprocess.run([sys.executable, "-m", "venv", folder], check=True)
  python = str(folder / "bin/python")
  install = (python, "-m", "pip", "install", "--quiet", *packages)
  subprocess.run(install, check=True)
  return python


@pytest.mark.slow
def test_transformers_loads_what_was_saved(tmp_path):
  # A Python that has transformers and torch, or an environment made here.
  python = os.environ.get("SCALERL_TRANSFORMERS_PYTHON", "")
  if not python:
    python = _python_with(tmp_path / "env", "transformers", "torch")
  folders = []
  for name in NAMES:
    policy = load(CHECKPOINTS / name, dtype="float32")
    save(policy, tmp_path / name, shard_bytes=100_000)
    folders += [tmp_path / name, CHECKPOINTS / name]
  done = subprocess.run(
    [python, "-c", LOADS, *map(str, folders)],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  told = [
    json.loads((CHECKPOINTS / name / "config.json").read_text())
    for name in NAMES
  ]
  assert done.stdout.split() == [x["architectures"][0] for x in told]


@pytest.mark.slow
def test_smollm2_computes_and_says_what_transformers_does(tmp_path):
  # Its folder, or one made here (see weights.py).
  folder = os.environ.get("SCALERL_SMOLLM2", "")
  if not folder:
    folder = tmp_path / "smollm2"
    packages = ("gguf", "safetensors", "ml_dtypes", "numpy")
    python = _python_with(tmp_path / "env", *packages)
    subprocess.run([python, SMOLLM2 / "weights.py", folder], check=True)
  cases = json.loads((SMOLLM2 / "reference.json").read_text())["cases"]
  lengths = [len(case["input_ids"] + case["greedy"]) for case in cases]
  rows = np.zeros((len(cases), max(lengths)), np.int32)
  for row, case, length in zip(rows, cases, lengths, strict=True):
    row[:length] = case["input_ids"] + case["greedy"]
  graph, params = nnx.split(load(folder, dtype="float32"))
  full, cached = map(np.asarray, both_ways(graph, params, rows))
  for row, case, length in zip(range(len(cases)), cases, lengths, strict=True):
    known = np.array(case["token_logprobs"])
    greedy = case["greedy"]
    # The cached way begins where its prompt ends.
    for logps, first in ((full[row], 0), (cached[row], PROMPT - 1)):
      at = np.arange(first, len(known))
      found = logps[at - first, rows[row, at + 1]]
      np.testing.assert_allclose(found, known[first:], rtol=0, atol=2e-3)
      said = logps[: length - 1 - first].argmax(-1)[-len(greedy) :]
      assert said.tolist() == greedy


def test_a_policy_of_no_published_family_is_not_saved(tmp_path):
  odd = dataclasses.replace(SHAPE, attention_bias=True, qk_norm="scaled")
  with pytest.raises(ValueError, match="no published family"):
    save(small_policy(odd), tmp_path / "odd")
  assert not (tmp_path / "odd").exists()


def test_a_trained_laptop_policy_can_be_published(tmp_path):
  policy = small_policy()
  save(policy, tmp_path)
  again = load(tmp_path, dtype="float32")
  assert again.config == policy.config
  jax.tree.map(
    np.testing.assert_array_equal, nnx.state(again), nnx.state(policy)
  )


def test_architecture_is_the_checkpoints_where_there_is_one():
  assert pretrained.architecture(SHAPE) is SHAPE
  asked = ModelConfig(
    checkpoint=str(CHECKPOINTS / "qwen3"),
    dtype="bfloat16",
    dot_dtype="float32",
    attention="cudnn",
    remat="block",
  )
  found = pretrained.architecture(asked)
  assert found.qk_norm == "scaled"
  kept = (found.dtype, found.dot_dtype, found.attention, found.remat)
  assert kept == ("bfloat16", "float32", "cudnn", "block")
  assert found.checkpoint == ""
