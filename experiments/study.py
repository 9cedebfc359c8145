"""All variants of one axis at laptop scale, their fits and their differences.

Trains each variant with each seed, two pinned processes at a time; started
again, it skips what is done and goes on with the rest. Then fits each curve and
writes `table.txt`, `table.json` and `figure.png` into the folder.

Command:  python -m experiments.study --study=loss_type --seeds=3 \
            --workdir=runs/loss_type
          with --smoke: tiny runs, to see that everything works
Studies:  loss_type off_policy aggregation normalization precision zero_variance
          curriculum length_control batch_size group_size generation_length
          model_size multitask recipes leave_one_out learning_rate
Hardware: two CPU cores; with one, one run at a time
Time:     about 100 s a run and core on a quiet host: loss_type with 3 seeds 10
          to 18 minutes; --smoke at most 90 s
Reaches:  loss_type, 3 seeds: pass rates at the end .890 (cispo), .893 (dapo),
          .891 (gspo); the paired differences hold 0
"""

import contextlib
import datetime
import fcntl
import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from absl import app, flags, logging

from experiments.studies import smoke as smoke_lib
from experiments.studies.axes import BASE, Study, load_study, with_seed
from experiments.studies.runner import Job, Outcome, core_sets, run_jobs
from scalerl_jax import config as config_lib
from scalerl_jax.config import Config

_STUDY = "study.json"


def get_config() -> Config:
  """What every study varies, unless it compares whole recipes."""
  return BASE


def make_jobs(
  study: Study, seeds: int, folder: pathlib.Path, *, smoke: bool
) -> list[Job]:
  """A run for each seed and variant, seeds outermost: early pairs are whole."""
  return [
    Job(
      variant=name,
      seed=seed,
      config=with_seed(smoke_lib.shrink(v) if smoke else v, seed),
      folder=folder / name / f"seed_{seed}",
    )
    for seed in range(seeds)
    for name, v in study.variants.items()
  ]


def claim(
  folder: pathlib.Path, name: str, study: Study, *, smoke: bool
) -> None:
  """Makes the folder this study's, or finds that it is; seeds may be added.

  Raises:
    ValueError: it holds something else, another study, or other configs.
  """
  mine = {
    "study": name,
    "smoke": smoke,
    "variants": {k: config_lib.to_dict(v) for k, v in study.variants.items()},
  }
  path, text = folder / _STUDY, str(folder)
  if folder.exists() and not folder.is_dir():
    raise ValueError(f"--workdir must be a folder, {text!r} is a file")
  partial = path.with_suffix(".partial")  # may be left by a kill
  if not path.exists():
    if folder.exists() and set(folder.iterdir()) - {partial}:
      raise ValueError(
        f"--workdir must be new or of this study, {text!r} holds other files;"
        " use another --workdir"
      )
    folder.mkdir(parents=True, exist_ok=True)
    partial.write_text(json.dumps(mine, indent=1))
    partial.replace(path)
    return
  try:
    held = dict(json.loads(path.read_text()))
    held_name = f"{held['study']}{' --smoke' if held['smoke'] else ''}"
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(
      f"{str(path)!r} must be the {_STUDY} of a study, and cannot be read as"
      " one; use another --workdir"
    ) from error
  wanted = f"{name}{' --smoke' if smoke else ''}"
  if held_name != wanted:
    raise ValueError(
      f"--workdir {text!r} belongs to --study={held_name}, not to"
      f" --study={wanted}; use another --workdir"
    )
  if held != mine:
    raise ValueError(
      f"--workdir {text!r} belongs to --study={name} with other configs than"
      " today's; use another --workdir"
    )


@contextlib.contextmanager
def _alone(folder: pathlib.Path) -> Iterator[None]:
  """Two processes at one study would train each run twice."""
  with (folder / _STUDY).open() as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise ValueError(
        f"another process works on the study in {str(folder)!r}; wait for its"
        " end or stop it"
      ) from None
    yield


def run_study(
  name: str,
  seeds: int,
  workdir: str,
  *,
  smoke: bool = False,
  tell: Callable[[str], None] = print,
) -> int:
  """The whole study; what `python -m experiments.study` does.

  Args:
    name: of the study.
    seeds: 0 .. seeds−1 are run; more may be asked for later.
    workdir: of the study, new or its own.
    smoke: one seed of tiny runs, one process a core for all of them.
    tell: prints a line.

  Returns:
    The exit code: 0; 1 when a run failed; 130 when told to stop.

  Raises:
    ValueError: an unknown study, fewer than one seed, a folder of something
      else.
  """
  study = load_study(name)
  if seeds < 1:
    raise ValueError(f"--seeds must be 1 or more, got {seeds}")
  if smoke:
    seeds = 1  # more show nothing more
  folder = pathlib.Path(workdir).resolve()
  claim(folder, name, study, smoke=smoke)
  with _alone(folder):
    jobs = make_jobs(study, seeds, folder, smoke=smoke)
    cores = core_sets(1 if smoke else study.cores)
    done = sum(job.done for job in jobs)
    tell(
      f"study {name}: {len(jobs)} runs, {done} done; {len(cores)} at a time, on"
      f" cores {' and '.join('+'.join(map(str, each)) for each in cores)}"
    )
    outcome = run_jobs(
      jobs,
      cores=cores,
      reuse=smoke,
      flags=smoke_lib.XLA_FLAGS if smoke else "",
      tell=tell,
    )
    if outcome.stopped:
      tell("stopped; the same command goes on from here")
      return 130
    finished = [job for job in jobs if job.done]
    if finished:
      _conclude(name, study, finished, outcome, folder, smoke, tell)
  for run, why in outcome.failed.items():
    print(f"error: {run} failed: {why}", file=sys.stderr)
  return 1 if outcome.failed else 0


def _conclude(
  name: str,
  study: Study,
  finished: list[Job],
  outcome: Outcome,
  folder: pathlib.Path,
  smoke: bool,
  tell: Callable[[str], None],
) -> None:
  """Fits, table and figure."""
  # Not before: while runs are under way the cores are theirs.
  from experiments.studies.figure import draw
  from experiments.studies.table import commits, fit_jobs, tabulate
  from experiments.studies.text import study_lines
  from scalerl_jax.run.train import enable_compilation_cache
  from scalerl_jax.run.workdir import provenance

  enable_compilation_cache()
  variants = list(study.variants)
  fits = fit_jobs(finished, study.compute)
  record: dict[str, Any] = {
    "study": name,
    "smoke": smoke,
    "note": study.note,
    "axis": list(study.axis),
    "compute": list(study.compute),
    "cores_of_a_run": 1 if smoke else study.cores,
    "seeds": sorted({job.seed for job in finished}),
    "missing": outcome.failed,
    "date": datetime.date.today().isoformat(),
    "commits_of_runs": commits(finished),
    "provenance": provenance(),
    "sections": tabulate(fits, variants),
  }
  lines = study_lines(record)
  (folder / "table.json").write_text(json.dumps(record, indent=1))
  (folder / "table.txt").write_text("\n".join(lines) + "\n")
  draw(folder / "figure.png", fits, variants, f"study {name}")
  tell("\n" + "\n".join(lines) + "\n")
  for file in ("table.txt", "table.json", "figure.png"):
    tell(f"wrote {folder / file}")


def main(argv: list[str]) -> None:
  """Reads the flags; exits with the study's code, 2 for bad input."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]!r}; see --help")
  values = flags.FLAGS
  if not values["verbosity"].present:
    logging.set_verbosity(logging.WARNING)
  try:
    code = run_study(
      values.study, values.seeds, values.workdir, smoke=values.smoke
    )
  except (ValueError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    code = 2
  except KeyboardInterrupt:  # in the fits, after the last run
    print("stopped; the same command goes on from here")
    code = 130
  sys.exit(code)


if __name__ == "__main__":
  from scalerl_jax.run.host import prepare_cpu

  prepare_cpu()
  flags.DEFINE_string("study", None, "which axis; see the top.", required=True)
  flags.DEFINE_integer("seeds", 3, "runs of each variant; 1 with --smoke.")
  flags.DEFINE_string("workdir", None, "folder of the study.", required=True)
  flags.DEFINE_bool("smoke", False, "tiny runs of every variant, one seed.")
  app.run(main)
