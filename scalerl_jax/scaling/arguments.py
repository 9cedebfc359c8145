"""The flags of the fit's door: the standard library's parser, one sentence.

Here and not from a flag library, so that the fitter installs without one.
"""

import argparse
import difflib
from collections.abc import Sequence
from typing import NoReturn


class _Parser(argparse.ArgumentParser):
  """A parser whose complaint is one sentence, and the caller's to print."""

  def error(self, message: str) -> NoReturn:
    raise ValueError(f"{message}; --help lists the flags.")


def parser() -> argparse.ArgumentParser:
  """The flags with their help, each as `--name=value`."""
  made = _Parser(
    prog="python -m scalerl_jax.fit",
    description="Fits the compute-performance law to training curves and "
    "prints, first, their asymptote or why it is unknown.",
    allow_abbrev=False,
  )
  add = made.add_argument
  add(
    "--curve",
    metavar="FILE[,FILE]",
    help="file or folder, or several with commas: CSV, JSON, JSON lines, "
    "exports of Weights & Biases, TensorBoard events, a trainer's state, a "
    "workdir",
  )
  add(
    "--forecast_at",
    metavar="C[,C]",
    action="append",
    default=[],
    help="compute to forecast at; repeat it, or separate by commas",
  )
  add(
    "--out",
    metavar="FOLDER",
    help="folder for fit.json, fit.png, fit.svg and report.html",
  )
  add(
    "--compute_column",
    metavar="NAME",
    help="column of compute, when its name is not a usual one",
  )
  add(
    "--pass_rate_column",
    metavar="NAME[,NAME]",
    help="column of pass rate, likewise; several with commas are a curve each",
  )
  add(
    "--series",
    metavar="NAME[,NAME]",
    help="which curves of a file with several, by name; all otherwise",
  )
  for name, default, told in (
    ("initial", None, "R_0, the pass rate at compute 0, when known"),
    ("initial_sd", None, "sd of R_0's prior; exact with --initial otherwise"),
    ("min_compute", 0.0, "points below it are left out, except at compute 0"),
    ("max_compute", None, "points above it are left out"),
    ("budget", None, "compute at which runs are compared; else the largest"),
    ("level", 0.9, "probability inside intervals and bands"),
  ):
    add(f"--{name}", metavar="X", type=float, default=default, help=told)
  return made


def parse(arguments: Sequence[str]) -> argparse.Namespace:
  """The flags' values, by name.

  Args:
    arguments: of the command line, without the program's name.

  Returns:
    A field a flag; what a flag means is checked by who reads it.

  Raises:
    ValueError: in one sentence, for what is no flag, an unknown flag, or a
      word where a number belongs.
    SystemExit: with code 0 after `--help`.

  Example:
    >>> flags = parse(["--curve=run.csv", "--forecast_at=3e12,4e12"])
    >>> flags.curve, flags.forecast_at, flags.level
    ('run.csv', ['3e12,4e12'], 0.9)
    >>> parse(["run.csv"])
    Traceback (most recent call last):
    ValueError: arguments must be flags, got 'run.csv'; write --curve=run.csv.
  """
  made = parser()
  flags, rest = made.parse_known_args(arguments)
  for word in rest:
    if not word.startswith("-"):
      raise ValueError(
        f"arguments must be flags, got {word!r}; write --curve={word}."
      )
    known = [f"--{name}" for name in vars(flags)]
    near = difflib.get_close_matches(word.split("=")[0], known, 1)
    told = f"did you mean {near[0]}?" if near else "--help lists the flags."
    raise ValueError(f"there is no flag {word!r}; {told}")
  return flags
