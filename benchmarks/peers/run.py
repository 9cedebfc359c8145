"""Our engine beside the peers, in turns: `python -m benchmarks.peers.run`.

Every engine is a process that stays alive; repeats go round all of them, so
that what else the machine does hits all alike. Prints one table, and writes
it as JSON with --out. A peer's environment is installed on its first use.
"""

import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
from typing import NamedTuple

from absl import app, flags

from benchmarks.peers import environments, table, workloads
from scalerl_jax.run.host import visible_cores

HERE = pathlib.Path(__file__).parent
LOAD = 0.5  # of other work; a timing made beside more of it is worthless

ALL = ("sampling", "long_tail", "step")
# The long tail is minutes a repeat for the peers: one.
REPEATS = {"sampling": 5, "long_tail": 1, "step": 5}


class Engine(NamedTuple):
  """A process that does workloads; `environment` None is our own."""

  environment: str | None
  file: str
  dtype: str
  workloads: tuple[str, ...]


OURS, LIMIT = "ours_engine.py", "limit_engine.py"
TUNIX, TRL = "tunix_engine.py", "trl_engine.py"
TRANSFORMERS = "transformers_engine.py"
ENGINES = {
  "ours_float32": Engine(None, OURS, "float32", ALL),
  "ours_bfloat16_dots": Engine(None, OURS, "bfloat16_dots", ALL),
  "limit_float32": Engine(None, LIMIT, "float32", ("sampling", "step")),
  "limit_bfloat16_dots": Engine(
    None, LIMIT, "bfloat16_dots", ("sampling", "step")
  ),
  "tunix_float32": Engine("tunix", TUNIX, "float32", ALL),
  "tunix_bfloat16": Engine("tunix", TUNIX, "bfloat16", ("sampling", "step")),
  "transformers_float32": Engine(
    "transformers", TRANSFORMERS, "float32", ("sampling", "long_tail")
  ),
  "transformers_bfloat16": Engine(
    "transformers", TRANSFORMERS, "bfloat16", ("sampling",)
  ),
  "trl_float32": Engine("trl", TRL, "float32", ("step",)),
  "trl_bfloat16": Engine("trl", TRL, "bfloat16", ("step",)),
}
ON_TORCH = ("transformers", "trl")
# How torch's threads wait for work; the faster one is used, found by trying.
POLICIES = ({}, {"OMP_WAIT_POLICY": "PASSIVE"})


class Running:
  """An engine's process and the answers to orders.

  Args:
    name: in messages.
    command: that starts it.
    environment: variables on top of ours.
    log: file of its standard error.

  Raises:
    RuntimeError: it ended before it was asked to; the log's end says why.
  """

  def __init__(
    self,
    name: str,
    command: list[str],
    environment: dict[str, str],
    log: pathlib.Path,
  ):
    self._name, self._log = name, log
    with log.open("w", encoding="utf-8") as errors:
      self._process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=os.environ | environment,
      )
    self.versions: dict[str, str] = self._read()["ready"]

  def _read(self) -> dict:
    assert self._process.stdout is not None
    line = self._process.stdout.readline()
    if not line:
      code = self._process.wait()
      told = self._log.read_text(encoding="utf-8", errors="replace")
      raise RuntimeError(
        f"Engine {self._name} ended with code {code}; its log {self._log}"
        f" closes with:\n{told[-2000:]}"
      )
    return json.loads(line)

  def run(self, workload: str, repeat: int) -> dict:
    """One repeat of a workload; 0 compiles and is not counted.

    Args:
      workload: its name.
      repeat: seeds what is drawn.

    Returns:
      `seconds`, `tokens` and `extra`.
    """
    assert self._process.stdin is not None
    self._process.stdin.write(f"run {workload} {repeat}\n")
    self._process.stdin.flush()
    return self._read()

  def close(self) -> None:
    """Ends the process."""
    assert self._process.stdin is not None
    assert self._process.stdout is not None
    self._process.stdin.close()
    try:
      self._process.wait(20)
    except subprocess.TimeoutExpired:
      self._process.kill()  # a library's threads may outlive its loop
      self._process.wait()
    self._process.stdout.close()


def chosen(names: list[str]) -> dict[str, Engine]:
  """Engines by their names, or all of a kind: "tunix".

  Args:
    names: of engines or kinds.

  Raises:
    ValueError: a name of none.
  """
  for name in names:
    if not any(key == name or key.startswith(f"{name}_") for key in ENGINES):
      raise ValueError(
        f"--engines must name engines or kinds of {sorted(ENGINES)}, "
        f"got {name!r}."
      )
  return {
    key: engine
    for key, engine in ENGINES.items()
    if any(key == name or key.startswith(f"{name}_") for name in names)
  }


def start(
  name: str,
  engine: Engine,
  wanted: list[str],
  folder: pathlib.Path,
  variables: dict[str, str],
) -> Running:
  """Starts an engine on the workloads that it can do and that are wanted.

  Args:
    name: of the engine.
    engine: what it is.
    wanted: workloads.
    folder: of checkpoint and logs.
    variables: of its environment.
  """
  python = (
    sys.executable
    if engine.environment is None
    else environments.interpreter(engine.environment)
  )
  command = [
    python,
    str(HERE / engine.file),
    f"--checkpoint={folder / 'checkpoint'}",
    f"--dtype={engine.dtype}",
    f"--workloads={','.join(w for w in wanted if w in engine.workloads)}",
  ]
  paths = {
    "PYTHONPATH": str(environments.ROOT),
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
  }
  if engine.environment is not None:
    paths["PYTHONPATH"] = ""  # a peer finds nothing of ours
  return Running(name, command, {**paths, **variables}, folder / f"{name}.log")


def torch_policy(
  engines: dict[str, Engine], wanted: list[str], folder: pathlib.Path
) -> dict[str, str]:
  """The better way for torch's threads to wait, by one repeat of each.

  Args:
    engines: that will run.
    wanted: workloads.
    folder: of checkpoint and logs.

  Returns:
    Variables for the environment of each engine on torch.
  """
  on_torch = {
    name: engine
    for name, engine in engines.items()
    if engine.environment in ON_TORCH
  }
  if not on_torch:
    return {}
  name, engine = next(iter(on_torch.items()))
  workload = next(w for w in wanted if w in engine.workloads)
  seconds = []
  for policy in POLICIES:
    trial = start(name, engine, [workload], folder, policy)
    trial.run(workload, 0)
    seconds.append(trial.run(workload, 1)["seconds"])
    trial.close()
  best = POLICIES[seconds.index(min(seconds))]
  print(f"torch's threads: {seconds} s, {best or 'default'}", flush=True)
  return best


def nothing_to_compile(engine: Engine, workload: str) -> bool:
  """Whether the first repeat would be minutes for nothing.

  Torch compiles nothing here, and the long tail comes after other work has
  warmed its allocator and threads, or is long enough to hide that.

  Args:
    engine: what it is.
    workload: its name.
  """
  return engine.environment in ON_TORCH and workload == "long_tail"


def measure(
  running: dict[str, Running],
  engines: dict[str, Engine],
  repeats: dict[str, int],
) -> table.Results:
  """Repeats of every workload, the engines taking turns.

  Args:
    running: processes by name.
    engines: what each can do.
    repeats: of each workload.
  """
  results: table.Results = {name: {} for name in running}
  for workload, count in repeats.items():
    able = [name for name in running if workload in engines[name].workloads]
    answers: dict[str, list[dict]] = {name: [] for name in able}
    for repeat in range(1 + count):
      for name in able:
        if not repeat and nothing_to_compile(engines[name], workload):
          continue
        answer = running[name].run(workload, repeat)
        print(f"{workload} {repeat} {name} {answer['seconds']:.2f}", flush=True)
        if repeat:
          answers[name].append(answer)
    for name, told in answers.items():
      extra = {
        key: statistics.median(answer["extra"][key] for answer in told)
        for key in told[0]["extra"]
      }
      results[name][workload] = table.Measured(
        [answer["seconds"] for answer in told], told[0]["tokens"], extra
      )
  return results


def processor() -> str:
  """The processor's name."""
  told = pathlib.Path("/proc/cpuinfo")
  if told.exists():
    for line in told.read_text(encoding="utf-8").splitlines():
      if line.startswith("model name"):
        return line.split(":", 1)[1].strip()
  return platform.processor()


def record(
  results: table.Results, running: dict[str, Running], load: float
) -> dict[str, object]:
  """Everything of a comparison as JSON.

  Args:
    results: of every engine.
    running: the engines, for their versions.
    load: of the machine before the start.
  """
  return {
    "date": datetime.date.today().isoformat(),
    "processor": processor(),
    "cores": visible_cores(),
    "load_at_start": load,
    "versions": {name: engine.versions for name, engine in running.items()},
    "results": {
      name: {workload: found._asdict() for workload, found in one.items()}
      for name, one in results.items()
    },
    "targets": table.verdicts(results),
  }


def main(argv: list[str]) -> None:
  """Measures, prints and writes."""
  del argv
  options = flags.FLAGS
  load = os.getloadavg()[0]
  if load > LOAD and not options.anyway:
    sys.exit(
      f"The machine must be quiet (load at most {LOAD}), got {load:.2f}: "
      "wait until nothing else runs, or pass --anyway."
    )
  unknown = sorted(set(options.workloads) - set(ALL))
  if unknown:
    sys.exit(f"--workloads must be of {', '.join(ALL)}, got {unknown}.")
  repeats = {
    name: options.repeats or REPEATS[name] for name in options.workloads
  }
  try:
    wanted = chosen(options.engines)
  except ValueError as error:
    sys.exit(str(error))
  engines = {
    name: engine
    for name, engine in wanted.items()
    if any(workload in repeats for workload in engine.workloads)
  }
  folder = environments.ROOT / "build" / "peers" / "run"
  workloads.write_checkpoint(folder / "checkpoint")
  policy = torch_policy(engines, list(repeats), folder)
  running: dict[str, Running] = {}
  try:
    for name, engine in engines.items():
      variables = policy if engine.environment in ON_TORCH else {}
      running[name] = start(name, engine, list(repeats), folder, variables)
    results = measure(running, engines, repeats)
  finally:
    for process in running.values():
      process.close()
  told = record(results, running, load)
  versions = {
    f"{package} {version}"
    for engine in running.values()
    for package, version in engine.versions.items()
  }
  print(f"\n{told['processor']}, {told['cores']} cores, load {load:.2f}")
  print(", ".join(sorted(versions)) + "\n")
  print("\n".join([*table.rows(results), "", *table.lines(results)]))
  if options.out:
    text = json.dumps(told, indent=1)
    pathlib.Path(options.out).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
  flags.DEFINE_list("engines", ["ours", "limit", *environments.PEERS], "which.")
  flags.DEFINE_list("workloads", list(ALL), f"of {', '.join(ALL)}.")
  flags.DEFINE_integer("repeats", 0, "of each; 0: 5, of the long tail 1.")
  flags.DEFINE_string("out", "", "JSON file.")
  flags.DEFINE_bool("anyway", False, "also on a machine that is busy.")
  app.run(main)
