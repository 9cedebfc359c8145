"""A workdir belongs to one config, and says what its bits depend on."""

import json
import os
import pathlib
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import jax

from scalerl_jax import config as config_lib
from scalerl_jax.config import Config
from scalerl_jax.run.host import visible_cores

CONFIG = "config.json"


# What a run's bits depend on besides its config, by the name in config.json.
MACHINE = ("machine", "device_kind", "devices", "visible_cores", "xla_flags")


def check_workdir(workdir: pathlib.Path, config: Config) -> None:
  """Refuses a workdir that does not belong to this config; writes nothing.

  Warns in one sentence each when the run goes on where its bits may differ.

  Raises:
    ValueError: a file, a folder of something else, or a run of another config.
  """
  if workdir.exists() and not workdir.is_dir():
    raise ValueError(f"workdir {str(workdir)!r} must be a folder, it is a file")
  path = workdir / CONFIG
  if not path.exists():
    if workdir.exists() and any(workdir.iterdir()):
      raise ValueError(
        f"workdir {str(workdir)!r} holds files but no {CONFIG}; use a new"
        " --workdir"
      )
    return
  held, before = _read(path)
  values = config_lib.to_dict(config)
  names = sorted(
    f"{section}.{field}"
    for section in {*values, *held}
    for field in {*values.get(section, {}), *held.get(section, {})}
    if values.get(section, {}).get(field) != held.get(section, {}).get(field)
  )
  if names:
    raise ValueError(
      f"workdir {str(workdir)!r} belongs to a run of another config (it"
      f" differs in {', '.join(names)}); use another --workdir"
    )
  now = provenance()
  for name in MACHINE:
    if before.get(name) != now[name]:
      print(
        f"warning: {name} was {before.get(name)!r} and is {now[name]!r}: what"
        " follows is not bit for bit what the run would have been",
        flush=True,
      )


def _read(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
  """Config and provenance of a `config.json`."""
  try:
    whole = json.loads(path.read_text())
    held, before = dict(whole["config"]), dict(whole.get("provenance", {}))
    return {name: dict(fields) for name, fields in held.items()}, before
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError(
      f"{str(path)!r} must be the {CONFIG} of a run, and cannot be read as one;"
      " use another --workdir"
    ) from error


def check_sections(
  workdir: pathlib.Path, config: Config, sections: Sequence[str]
) -> None:
  """Refuses a workdir whose run had other values in these sections.

  `model.attention` may differ: its kernels give the same numbers but for
  rounding, and not every device has each.

  Raises:
    ValueError: no run's workdir, or one that differs, with the fields.
  """
  path = workdir / CONFIG
  if not path.is_file():
    raise ValueError(
      f"--workdir must be the folder of a run, with a {CONFIG}, got"
      f" {str(workdir)!r}"
    )
  held, _ = _read(path)
  values = config_lib.to_dict(config)
  names = [
    f"{section}.{field}"
    for section in sections
    for field, value in values[section].items()
    if (section, field) != ("model", "attention")
    and held.get(section, {}).get(field) != value
  ]
  if names:
    raise ValueError(
      f"workdir {str(workdir)!r} belongs to a run that differs in"
      f" {', '.join(names)}; give its own --config and --set"
    )


def claim_workdir(workdir: pathlib.Path, config: Config) -> None:
  """`check_workdir`, then writes `config.json` if there is none.

  Raises:
    ValueError: as `check_workdir`.
  """
  check_workdir(workdir, config)
  path = workdir / CONFIG
  if path.exists():
    return
  workdir.mkdir(parents=True, exist_ok=True)
  whole = {"config": config_lib.to_dict(config), "provenance": provenance()}
  partial = path.with_suffix(".partial")
  partial.write_text(json.dumps(whole, indent=1))
  partial.rename(path)


def claim_task(workdir: pathlib.Path, fingerprint: str) -> None:
  """Writes which prompts and answers the run is about, or checks them.

  Raises:
    ValueError: the task's file has changed since the run began.
  """
  path = workdir / "task.json"
  if not path.exists():
    path.write_text(json.dumps({"fingerprint": fingerprint}))
    return
  held = json.loads(path.read_text())["fingerprint"]
  if held != fingerprint:
    raise ValueError(
      f"the prompts and answers of workdir {str(workdir)!r} have changed since"
      f" its run began (fingerprint {held} then, {fingerprint} now); bring the"
      " file of task.path back or use another --workdir"
    )


def provenance() -> dict[str, Any]:
  """What the bits of a run depend on besides its config."""
  packages = ("scalerl-jax", "jax", "jaxlib", "flax", "optax", "numpy")
  versions = {}
  for name in packages:
    try:
      versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
      versions[name] = "not installed"
  device = jax.local_devices()[0]
  return {
    "commit": _commit(),
    "versions": versions,
    "python": platform.python_version(),
    "machine": platform.processor() or platform.machine(),
    "device_kind": device.device_kind,
    "devices": jax.local_device_count(),
    "visible_cores": visible_cores(),
    "xla_flags": os.environ.get("XLA_FLAGS", ""),
  }


def _commit() -> str:
  """Of the checkout that the package runs from."""

  def git(*words: str) -> str:
    return subprocess.run(
      ["git", *words],
      cwd=pathlib.Path(__file__).parent,
      capture_output=True,
      text=True,
      check=False,
    ).stdout.strip()

  try:
    return git("rev-parse", "HEAD") or "unknown"
  except OSError:  # no git on this machine
    return "unknown"
