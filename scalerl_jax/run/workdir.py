"""A workdir belongs to one config, and says what its bits depend on."""

import json
import os
import pathlib
import platform
import subprocess
from importlib import metadata
from typing import Any

import jax

from scalerl_jax import config as config_lib
from scalerl_jax.config import Config
from scalerl_jax.run.host import visible_cores


def claim_workdir(workdir: pathlib.Path, config: Config) -> None:
  """Writes `config.json`, or checks that the one there says the same.

  Raises:
    ValueError: the workdir belongs to a run of another config.
  """
  path = workdir / "config.json"
  values = config_lib.to_dict(config)
  if path.exists():
    held = json.loads(path.read_text())["config"]
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
    return
  if workdir.exists() and any(workdir.iterdir()):
    raise ValueError(
      f"workdir {str(workdir)!r} holds files but no config.json; use a new"
      " --workdir"
    )
  workdir.mkdir(parents=True, exist_ok=True)
  path.write_text(
    json.dumps({"config": values, "provenance": provenance()}, indent=1)
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
  asked = subprocess.run(
    ["git", "rev-parse", "HEAD"],
    cwd=pathlib.Path(__file__).parent,
    capture_output=True,
    text=True,
    check=False,
  )
  device = jax.local_devices()[0]
  return {
    "commit": asked.stdout.strip() or "unknown",
    "versions": versions,
    "python": platform.python_version(),
    "machine": platform.processor() or platform.machine(),
    "device_kind": device.device_kind,
    "devices": jax.local_device_count(),
    "visible_cores": visible_cores(),
    "xla_flags": os.environ.get("XLA_FLAGS", ""),
  }
