"""What every test runs under: 8 fake devices, no silent rank promotion."""

import os

# Before jax starts: tests of meshes need several devices, and one thread an
# operation keeps two pytest workers from fighting over two cores. Programs of
# tests are compiled for longer than they run: not optimised, and with kernels
# that do not go by way of MLIR, they compile in a fifth of the time. What the
# environment says comes last and wins.
os.environ["XLA_FLAGS"] = " ".join(
  [
    "--xla_force_host_platform_device_count=8",
    "--xla_cpu_multi_thread_eigen=false",
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    os.environ.get("XLA_FLAGS", ""),
  ]
)
os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import matplotlib

# Scripts for a Python of their own, with packages that are not ours.
collect_ignore = ["fixtures/smollm2"]
jax.config.update("jax_numpy_rank_promotion", "raise")
matplotlib.use("Agg")
# The same examples every time, however slow the machine is today.
hypothesis.settings.register_profile(
  "house", derandomize=True, database=None, deadline=None
)
hypothesis.settings.load_profile("house")
