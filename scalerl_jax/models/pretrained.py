"""Published checkpoints in and out: `load` a policy, `save` one.

Only `config.json`, `*.safetensors` and their index are read, each device's
part straight from the file: no process ever holds the whole model.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from scalerl_jax.config import COMPUTED, DTYPES, ModelConfig
from scalerl_jax.models import names
from scalerl_jax.models.config import Published, read_config, write_config
from scalerl_jax.models.plan import parameter_plan
from scalerl_jax.models.policy import Policy
from scalerl_jax.models.sharding import (
  check_experts,
  check_heads,
  make_mesh,
  named_sharding,
)

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000
# Written by other programs and computed here; no parameters.
IGNORED = ("rotary_emb.inv_freq",)


def load(
  path: str | os.PathLike[str], *, dtype: Any, mesh: Mesh | None = None
) -> Policy:
  """A published policy, its parameters created in their sharding.

  Args:
    path: a local folder, or a name on the hub (read through its cache).
    dtype: "float32" or "bfloat16", of the parameters and of the body; logits
      are float32 in any case.
    mesh: where parameters go; one device by default. Rows of the vocabulary
      that the tensor axis does not divide are filled up with zeros.

  Raises:
    ValueError: nothing to read there, an unknown architecture, a missing
      shard, tensors that do not fit (all of them, in one table), or a mesh
      that does not divide heads or experts.
  """
  kind = str(jnp.dtype(dtype))
  if kind not in DTYPES:
    raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {kind!r}")
  folder = find_folder(path)
  model, vocab_size, prefix = _published(folder)
  model = dataclasses.replace(model, dtype=kind)
  mesh = make_mesh() if mesh is None else mesh
  check_heads(model.num_heads, model.num_kv_heads, mesh.shape["tensor"])
  check_experts(model.num_experts, mesh.shape["expert"])
  rows = -(-vocab_size // mesh.shape["tensor"]) * mesh.shape["tensor"]
  with _open_tensors(folder, prefix) as files:
    _check_tensors(files, model, vocab_size, folder)
    values = {
      name: _create(files, model, name, rows, jnp.dtype(kind), mesh)
      for name in parameter_plan(model, rows)
    }
  return Policy(model, vocab_size=vocab_size, mesh=mesh, values=values)


def architecture(model: ModelConfig) -> ModelConfig:
  """`model` as it is, or what its checkpoint says it is.

  Raises:
    ValueError: as `load`, for what `config.json` alone shows.
  """
  if not model.checkpoint:
    return model
  found, _, _ = _published(find_folder(model.checkpoint))
  return dataclasses.replace(
    found, **{name: getattr(model, name) for name in COMPUTED}
  )


def vocabulary(model: ModelConfig) -> int:
  """V of the model's checkpoint.

  Raises:
    ValueError: as `load`, for what `config.json` alone shows.
  """
  return _published(find_folder(model.checkpoint)).vocab_size


def find_folder(path: str | os.PathLike[str]) -> pathlib.Path:
  """The local folder of a checkpoint; a hub's name is downloaded once.

  Raises:
    ValueError: neither a folder nor a name that the hub gives out.
  """
  folder = pathlib.Path(path)
  if folder.is_dir():
    return folder
  name = os.fspath(path)
  if folder.exists() or name.count("/") != 1 or name.startswith((".", "/")):
    raise ValueError(
      f"checkpoint {name!r} must be a folder with a {CONFIG}, or a name on the"
      " hub such as 'HuggingFaceTB/SmolLM2-135M'; there is no such folder"
    )
  # Only here: what is local needs no network and no client of a hub.
  import huggingface_hub

  try:
    found = huggingface_hub.snapshot_download(
      name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model"]
    )
  except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
    reason = str(error).strip().split("\n")[0]
    raise ValueError(
      f"checkpoint {name!r} must be a folder, or a name that the hub gives out;"
      f" there is no such folder, and the hub says: {reason}"
    ) from error
  return pathlib.Path(found)


def _published(folder: pathlib.Path) -> Published:
  path = folder / CONFIG
  if not path.is_file():
    raise ValueError(f"checkpoint {str(folder)!r} must hold a {CONFIG}")
  try:
    found = json.loads(path.read_text())
  except ValueError as error:
    raise ValueError(f"{str(path)!r} must be JSON: {error}") from error
  if not isinstance(found, dict):
    raise ValueError(f"{str(path)!r} must hold a JSON object")
  try:
    return read_config(found)
  except ValueError as error:
    raise ValueError(f"{error} (in {str(path)!r})") from error


@contextlib.contextmanager
def _open_tensors(
  folder: pathlib.Path, prefix: str
) -> Iterator[dict[str, Any]]:
  """The open file of each tensor, by the tensor's name without the prefix."""
  index = folder / INDEX
  listed: dict[str, str] = {}
  if index.is_file():
    try:
      listed = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
      raise ValueError(
        f"{str(index)!r} must be JSON with a weight_map from tensors to files;"
        " copy it again"
      ) from error
  shards = sorted({*listed.values()}) or [WEIGHTS]
  absent = [name for name in shards if not (folder / name).is_file()]
  if absent:
    where = f" that its {INDEX} names" if listed else ""
    raise ValueError(
      f"checkpoint {str(folder)!r} must hold {', '.join(absent)}{where}; bring"
      " it there"
    )
  with contextlib.ExitStack() as stack:
    found = {}
    for name in shards:
      path = folder / name
      try:
        file = stack.enter_context(safe_open(path, framework="numpy"))
      except SafetensorError as error:
        raise ValueError(
          f"{str(path)!r} must be a whole safetensors file: {error}; copy it"
          " again"
        ) from error
      found |= {
        tensor.removeprefix(prefix): _Tensor(file, tensor)
        for tensor in file.keys()  # noqa: SIM118 (no mapping: it has no iter)
        if tensor.startswith(prefix)
      }
    yield found


class _Tensor:
  """A tensor of an open file, of which rectangles can be read."""

  def __init__(self, file: Any, name: str):
    self._file, self._name = file, name
    self.shape = tuple(file.get_slice(name).get_shape())

  def __call__(self, rectangle: tuple[slice, ...]) -> np.ndarray:
    return self._file.get_slice(self._name)[rectangle]


def _check_tensors(
  files: dict[str, Any],
  model: ModelConfig,
  vocab_size: int,
  folder: pathlib.Path,
) -> None:
  """Raises one error with all names that do not fit."""
  wanted = names.published_shapes(model, vocab_size)
  allowed = (*IGNORED, "lm_head.weight") if model.tied_head else IGNORED
  rows = [("missing", name, wanted[name], "") for name in wanted - files.keys()]
  rows += [
    ("unexpected", name, "", files[name].shape)
    for name in files.keys() - wanted
    if not name.endswith(allowed)
  ]
  rows += [
    ("misshaped", name, wanted[name], files[name].shape)
    for name in wanted.keys() & files.keys()
    if wanted[name] != files[name].shape
  ]
  if not rows:
    return
  lines = [
    f"{what:<10}  {name:<{max(len(row[1]) for row in rows)}}"
    f"  {expected!s:<16}  {found!s}".rstrip()
    for what, name, expected, found in sorted(rows)
  ]
  heading = f"expected by {CONFIG}, then found"
  raise ValueError(
    f"the tensors of checkpoint {str(folder)!r} must be those of its {CONFIG};"
    f" {len(rows)} are not ({heading}):\n" + "\n".join(lines)
  )


def _create(
  files: dict[str, Any],
  model: ModelConfig,
  name: str,
  rows: int,
  dtype: Any,
  mesh: Mesh,
) -> jax.Array:
  """One parameter, each device's part read from the file on its own."""
  plan = parameter_plan(model, rows)[name]
  place = names.stored(model)[name]
  # Leading axes that are read tensor by tensor, and the tensor at each.
  tensors = dict(names.tensors(model, name, place))
  ahead = len(next(iter(tensors)))
  inner = plan.shape[ahead:]

  def one(index: tuple[int, ...], wanted: tuple[slice, ...]) -> np.ndarray:
    tensor = files[tensors[index]]
    if plan.axes[0] != "vocab":
      return names.read_part(tensor, place, inner, wanted)
    start, stop, _ = wanted[0].indices(inner[0])
    known = tensor.shape[0]
    held = slice(min(start, known), min(stop, known))
    if held.start == held.stop:
      return np.zeros(
        [len(range(*w.indices(n))) for w, n in zip(wanted, inner, strict=True)]
      )
    values = names.read_part(tensor, place, inner, (held, *wanted[1:]))
    beyond = stop - start - len(values)
    return np.pad(values, [(0, beyond), *[(0, 0)] * (values.ndim - 1)])

  def part(wanted: tuple[slice, ...] | None) -> np.ndarray:
    wanted = (slice(None),) * len(plan.shape) if wanted is None else wanted
    ranges = [
      range(*span.indices(size))
      for span, size in zip(wanted[:ahead], plan.shape[:ahead], strict=True)
    ]
    found = np.empty(
      [
        len(range(*span.indices(size)))
        for span, size in zip(wanted, plan.shape, strict=True)
      ],
      dtype,
    )
    for at in np.ndindex(*map(len, ranges)):
      index = tuple(span[n] for span, n in zip(ranges, at, strict=True))
      found[at] = one(index, wanted[ahead:]).astype(dtype)
    return found

  sharding = named_sharding(plan.axes, plan.shape, mesh)
  return jax.make_array_from_callback(plan.shape, sharding, part)


def save(
  policy: Policy,
  path: str | os.PathLike[str],
  *,
  shard_bytes: int = SHARD_BYTES,
) -> None:
  """Writes a folder that transformers loads, and `load` does.

  Config and weights only: a policy knows no tokenizer. Copy its files from the
  checkpoint's folder; `--export` of a run brings them along.

  Args:
    policy: of a published family's parts.
    path: a folder; created, files of the same names replaced.
    shard_bytes: a file holds no more, unless one tensor does.

  Raises:
    ValueError: no published family is like the policy, or this process does
      not hold all of its parameters.
  """
  model, vocab_size = policy.config, policy.vocab_size
  written = write_config(model, vocab_size)
  params = _parameters(policy)
  for name, values in params.items():
    if not values.is_fully_addressable:
      raise ValueError(
        f"parameter {name!r} must be held by this process as a whole to be"
        " saved; gather the policy on one host first"
      )
  dtype = next(iter(params.values())).dtype
  written |= {"dtype": str(dtype), "torch_dtype": str(dtype)}
  folder = pathlib.Path(path)
  folder.mkdir(parents=True, exist_ok=True)
  for old in (*folder.glob("model*.safetensors"), folder / INDEX):
    old.unlink(missing_ok=True)
  shapes = names.published_shapes(model, vocab_size)
  shards: list[list[str]] = [[]]
  size = 0
  for name, shape in shapes.items():
    needed = int(np.prod(shape)) * dtype.itemsize
    if shards[-1] and size + needed > shard_bytes:
      shards.append([])
      size = 0
    shards[-1].append(name)
    size += needed
  sources = _sources(model)
  weight_map = {}
  for number, tensors in enumerate(shards, 1):
    name = WEIGHTS
    if len(shards) > 1:
      name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
    weight_map |= dict.fromkeys(tensors, name)
    values = {
      tensor: _to_publish(sources[tensor], params, vocab_size)
      for tensor in tensors
    }
    save_file(values, folder / name, metadata={"format": "pt"})
  if len(shards) > 1:
    total = sum(int(np.prod(shape)) for shape in shapes.values())
    index = {
      "metadata": {"total_size": total * dtype.itemsize},
      "weight_map": weight_map,
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2))
  (folder / CONFIG).write_text(json.dumps(written, indent=2))


def _parameters(policy: Policy) -> dict[str, jax.Array]:
  """Parameters by the plan's names."""
  found = {name: weight[...] for name, weight in policy.layers.items()}
  found |= {
    "embedding": policy.embedding[...],
    "final_norm": policy.final_norm[...],
  }
  if not policy.config.tied_head:
    found["output"] = policy.output[...]
  return found


def _sources(
  model: ModelConfig,
) -> dict[str, list[tuple[str, names.Stored, tuple[int, ...]]]]:
  """Which of our arrays make each published tensor, in order."""
  found: dict[str, list] = {}
  for name, place in names.stored(model).items():
    for index, tensor in names.tensors(model, name, place):
      found.setdefault(tensor, []).append((name, place, index))
  for parts in found.values():
    parts.sort(key=lambda part: part[1].part)
  return found


def _to_publish(
  sources: list[tuple[str, names.Stored, tuple[int, ...]]],
  params: dict[str, jax.Array],
  vocab_size: int,
) -> np.ndarray:
  """One published tensor, gathered on the host."""
  parts = []
  for name, place, index in sources:
    values = np.asarray(params[name][index] if index else params[name])
    if name in ("embedding", "output"):
      values = values[:vocab_size]
    parts.append(names.to_published(values, place))
  return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
