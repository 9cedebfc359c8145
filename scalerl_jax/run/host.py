"""What must be said to JAX before it starts: devices of a CPU, its threads.

Imports nothing heavy, for the doors call it first.
"""

import os


def visible_cores() -> int:
  """Cores that this process may use."""
  # Not on every system: macOS has no affinity.
  affinity = getattr(os, "sched_getaffinity", None)
  return len(affinity(0)) if affinity else os.cpu_count() or 1


def prepare_cpu() -> None:
  """Gives a CPU one device for each role and at most a thread a core.

  Two single-device programs overlap in one process; two multi-device ones
  never do. On one core both roles share one device. With no more cores than
  roles, a thread pool inside an operation only gets in the other role's way.
  Settings in `XLA_FLAGS` win; accelerators are not touched.
  """
  flags = os.environ.get("XLA_FLAGS", "")
  cores = visible_cores()
  wanted = {
    "--xla_force_host_platform_device_count": str(min(cores, 2)),
  }
  if cores <= 2:
    wanted["--xla_cpu_multi_thread_eigen"] = "false"
  for name, value in wanted.items():
    if name not in flags:
      flags += f" {name}={value}"
  os.environ["XLA_FLAGS"] = flags.strip()
