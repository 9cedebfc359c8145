#!/usr/bin/env bash
# Where: this machine. What to run is in the arguments, which go on unchanged:
#
#   launch/local.sh --config=experiments/quickstart.py --workdir=runs/quickstart
#   DEVICES=4 launch/local.sh --config=... --workdir=...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# CPU devices: one for the sampler, the others for the learner. One thread an
# operation, or the two roles fight over the cores. Accelerators ignore both.
flags="--xla_force_host_platform_device_count=${DEVICES:-2}"
flags="$flags --xla_cpu_multi_thread_eigen=false"
export XLA_FLAGS="${XLA_FLAGS:-} $flags"

if [[ ! -x .venv/bin/python ]]; then
  echo "no .venv here; run 'make install' first" >&2
  exit 1
fi
exec .venv/bin/python -m scalerl_jax.main "$@"
