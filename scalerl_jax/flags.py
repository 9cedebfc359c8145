"""The flags of a run, and how they become one `Config`."""

import pathlib
import runpy

from absl import flags

from scalerl_jax import config as config_lib
from scalerl_jax.config import Config

RUN_FLAGS = (
  *("config", "set", "workdir"),
  *("plan", "device_memory_gib"),
  *("evaluate", "export"),
)


def define_run_flags() -> None:
  """Defines `RUN_FLAGS`; none but the first two changes a result."""
  flags.DEFINE_string(
    "config",
    None,
    "Python file with get_config(). It is run: a config file is code.",
    required=True,
  )
  flags.DEFINE_multi_string(
    "set",
    [],
    "section.field=value, over what the config file says; may be repeated.",
  )
  flags.DEFINE_string("workdir", None, "folder of everything a run writes.")
  flags.DEFINE_boolean(
    "plan", False, "prints what the run will need, and runs nothing."
  )
  flags.DEFINE_float(
    "device_memory_gib",
    0.0,
    "--plan: memory of a device, GiB; 0: what the device tells.",
  )
  flags.DEFINE_string(
    "evaluate",
    "",
    "a saved step of the workdir, 'last', or a checkpoint's folder: evaluates"
    " it and writes its completions into the workdir.",
  )
  flags.DEFINE_string(
    "export",
    "",
    "STEP:FOLDER writes a saved step ('last': the newest) of the workdir as a"
    " folder that transformers loads.",
  )


def load_config(path: str, changes: list[str]) -> Config:
  """Runs an experiment file and applies `section.field=value` texts.

  Raises:
    ValueError: no such file, no `get_config`, a text without `=`, or a value
      that `config.override` refuses.
  """
  if not pathlib.Path(path).is_file():
    raise ValueError(f"--config must name a Python file, got {path!r}")
  module = runpy.run_path(path)
  if "get_config" not in module:
    raise ValueError(f"--config must define get_config(), {path!r} does not")
  config = module["get_config"]()
  if not isinstance(config, Config):
    raise ValueError(
      f"get_config() of {path!r} must return a scalerl_jax.config.Config, got"
      f" {type(config).__name__}"
    )
  parsed = {}
  for change in changes:
    name, equals, value = change.partition("=")
    if not equals:
      raise ValueError(f"--set must read section.field=value, got {change!r}")
    parsed[name.strip()] = value.strip()
  return config_lib.override(config, parsed)
