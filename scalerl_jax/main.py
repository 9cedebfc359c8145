"""Trains: `python -m scalerl_jax.main --config=FILE.py --workdir=DIR`.

Other doors: `--plan` says what a run will need, `--evaluate` examines a saved
policy, `--export` writes one for other programs.
"""

import pathlib
import sys
from typing import NoReturn

from absl import app, flags, logging

from scalerl_jax.config import Config
from scalerl_jax.run.host import prepare_cpu


def main(argv: list[str]) -> None:
  """Reads the flags, does what they ask, prints how it went."""
  from scalerl_jax.flags import load_config

  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]!r}; see --help")
  values = flags.FLAGS
  if not values["verbosity"].present:
    # Orbax tells each of its steps at INFO.
    logging.set_verbosity(logging.WARNING)
  try:
    _check(values)
    config = load_config(values.config, values.set)
  except (ValueError, OSError) as error:
    _fail(error, 2)
  # After the flags are known good, and after the CPU is set up: JAX.
  from jax.errors import JaxRuntimeError

  from scalerl_jax.run.memory import out_of_memory

  try:
    for line in _answer(values, config):
      print(line)
  except FloatingPointError as error:
    _fail(error, 1)
  except JaxRuntimeError as error:
    told = out_of_memory(error, config)
    if told is None:
      raise
    _fail(told, 1)
  except KeyboardInterrupt:
    print("interrupted; the same command starts again from the last saved step")
    sys.exit(130)


def _answer(values: flags.FlagValues, config: Config) -> list[str]:
  """Does what the flags ask; the lines that are printed at the end."""
  workdir = pathlib.Path(values.workdir or "")
  try:
    if values.plan:
      from scalerl_jax.run.plan import plan_run

      return plan_run(config, values.device_memory_gib).lines()
    if values.evaluate:
      from scalerl_jax.run.exam import evaluate_saved

      return evaluate_saved(config, workdir, values.evaluate)
    if values.export:
      from scalerl_jax.run.saved_policy import export_step

      step, _, folder = values.export.partition(":")
      return [export_step(config, workdir, step, pathlib.Path(folder))]
    from scalerl_jax.run.train import Run

    run_of_config = Run(config, workdir)
  except (ValueError, OSError) as error:
    _fail(error, 2)
  return run_of_config.train().lines()


def _check(values: flags.FlagValues) -> None:
  """Refuses flags that do not go together."""
  doors = [
    name for name in ("plan", "evaluate", "export") if values[name].value
  ]
  if len(doors) > 1:
    raise ValueError(
      f"--{doors[0]} and --{doors[1]} must not be given together"
    )
  if not values.workdir and not values.plan:
    raise ValueError("--workdir must name the folder of the run, got none")
  if values.export and not all(values.export.partition(":")):
    raise ValueError(
      f"--export must read STEP:FOLDER, as in last:exported, got"
      f" {values.export!r}"
    )


def _fail(told: object, code: int) -> NoReturn:
  print(f"error: {told}", file=sys.stderr)
  sys.exit(code)


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
