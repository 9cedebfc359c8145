"""The process that trains: runs named on standard input, answers on the other.

A line in is one run: JSON with `config`, `workdir` and `log`. A line out is how
it ended. What a run prints goes to its log. Started by `runner.py`, on its own
cores and in its own process group.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

DONE = "done.json"  # in a workdir whose run has reached its last step


def pin(cores: list[int]) -> None:
  """Keeps this process and its threads on these cores, where that is known."""
  if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def alone(path: pathlib.Path) -> Iterator[None]:
  """Lets one process at a time in; a killed one makes way by itself."""
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open("a") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    yield


def train(values: dict[str, Any], workdir: pathlib.Path) -> dict[str, Any]:
  """Trains to the end, or until told to stop; goes on where the workdir is.

  Args:
    values: the config, as `config.to_dict` gives it.
    workdir: of the run.

  Returns:
    `state`, "done" or "stopped"; seconds and the end's pass rate.
  """
  import jax

  from scalerl_jax import config as config_lib
  from scalerl_jax.models.sharding import make_mesh
  from scalerl_jax.run.metrics import read_curves
  from scalerl_jax.run.train import Run, enable_compilation_cache
  from scalerl_jax.run.warm_start import base_policy, cache_folder
  from scalerl_jax.scaling.forecast import END_EVALUATIONS

  started = time.monotonic()
  config = config_lib.from_dict(values)
  run = Run(config, workdir)
  enable_compilation_cache()
  sections = config.task, config.supervised, config.model
  name = f"{config_lib.fingerprint(*sections)}.lock"
  with alone(cache_folder() / "base" / name):
    # The first run to come here trains the base policy, the others read it.
    base_policy(
      run.task,
      task_config=config.task,
      supervised=config.supervised,
      model=config.model,
      mesh=make_mesh(jax.local_devices()),  # as the run itself asks for it
    )
  print("\n".join(run.train().lines()))
  curves = read_curves(workdir)
  curve = next(iter(curves.values()), {"step": [], "pass_rate": []})
  if not len(curve["step"]) or curve["step"][-1] < config.run.steps:
    return {"state": "stopped"}
  answer = {
    "state": "done",
    "seconds": time.monotonic() - started,
    "pass_rate": {
      name: float(found["pass_rate"][-END_EVALUATIONS:].mean())
      for name, found in curves.items()
    },
  }
  partial = workdir / f"{DONE}.partial"
  partial.write_text(json.dumps(answer))
  partial.replace(workdir / DONE)
  return answer


def work(line: str) -> dict[str, Any]:
  """One run, whatever becomes of it; what it prints goes to its log."""
  job = json.loads(line)
  log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
  os.dup2(log, 1)
  os.dup2(log, 2)
  os.close(log)
  try:
    # Nobody else trains this run: one may have outlived its parent.
    with alone(pathlib.Path(job["log"])):
      return train(job["config"], pathlib.Path(job["workdir"]))
  except KeyboardInterrupt:
    return {"state": "stopped"}
  except Exception:
    # Told by name by the parent, with this log's last line.
    traceback.print_exc()
    return {"state": "failed"}
  finally:
    sys.stdout.flush()
    sys.stderr.flush()


def main() -> None:
  """Works until standard input ends or it is told to stop."""
  pin([int(core) for core in sys.argv[1].split(",")])
  with os.fdopen(os.dup(1), "w") as answers:
    for line in iter(sys.stdin.readline, ""):
      answer = work(line)
      print(json.dumps(answer), file=answers, flush=True)
      if answer["state"] == "stopped":
        break


if __name__ == "__main__":
  main()
