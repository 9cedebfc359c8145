"""Trains: `python -m scalerl_jax.main --config=FILE.py --workdir=DIR`.

With `--plan` it only says what a run will need.
"""

import sys

from absl import app, flags, logging

from scalerl_jax.run.host import prepare_cpu


def main(argv: list[str]) -> None:
  """Reads the flags, trains, prints how it went."""
  from scalerl_jax.flags import load_config

  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]!r}; see --help")
  values = flags.FLAGS
  if not values["verbosity"].present:
    # Orbax tells each of its steps at INFO.
    logging.set_verbosity(logging.WARNING)
  try:
    if not values.workdir and not values.plan:
      raise ValueError("--workdir must name the folder of the run, got none")
    config = load_config(values.config, values.set)
    # After the flags are known good, and after the CPU is set up: JAX.
    if values.plan:
      from scalerl_jax.run.plan import plan_run

      told = plan_run(config, values.device_memory_gib)
      print("\n".join(told.lines()))
      return
    from scalerl_jax.run.train import Run

    run_of_config = Run(config, values.workdir)
  except (ValueError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
  try:
    summary = run_of_config.train()
    print("\n".join(summary.lines()))
  except FloatingPointError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(1)
  except KeyboardInterrupt:
    print("interrupted; the same command starts again from the last saved step")
    sys.exit(130)


def run() -> None:
  """The console entry point."""
  from scalerl_jax.flags import RUN_FLAGS, define_run_flags

  prepare_cpu()
  define_run_flags()
  for name in RUN_FLAGS:
    flags.declare_key_flag(name)  # so that --help lists them
  app.run(main)


if __name__ == "__main__":
  run()
