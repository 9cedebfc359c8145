"""Processes of a study, with workers that answer without training."""

import json
import os
import signal
import sys
import threading
import time

import pytest

from experiments.studies import runner
from experiments.studies.runner import Job, core_sets, run_jobs
from scalerl_jax import config as config_lib
from scalerl_jax.config import Config

# A worker that does what the variant's name says.
WORKER = """
import json, os, pathlib, signal, sys, time

for line in iter(sys.stdin.readline, ""):
  job = json.loads(line)
  workdir = pathlib.Path(job["workdir"])
  log = open(job["log"], "a")
  kind = workdir.parent.name
  workdir.mkdir(exist_ok=True)
  (workdir / "seen.txt").open("a").write(
    f"{os.getpid()} {sys.argv[1]} {os.environ['XLA_FLAGS']}\\n"
  )
  if kind == "fails":
    print("Traceback\\nValueError: no such thing\\n", file=log, flush=True)
    answer = {"state": "failed"}
  elif kind == "crashes":
    print("half a line", file=log, flush=True)
    os._exit(7)
  elif kind == "sleeps":
    def end(*_):
      (workdir / "told.txt").touch()
      os._exit(0)

    signal.signal(signal.SIGTERM, end)
    (workdir / "ready.txt").touch()
    time.sleep(60)
  else:
    answer = {"state": "done", "seconds": 1.0, "pass_rate": {"a": 0.25}}
    (workdir / "done.json").write_text("{}")
  print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def worker(tmp_path):
  path = tmp_path / "worker.py"
  path.write_text(WORKER)
  return sys.executable, str(path)


def _jobs(folder, names, seeds=1):
  return [
    Job(name, seed, Config(), folder / "study" / name / f"seed_{seed}")
    for seed in range(seeds)
    for name in names
  ]


def _run(jobs, command, *, cores=((0,), (1,)), reuse=False, tell=None):
  return run_jobs(
    jobs,
    cores=cores,
    reuse=reuse,
    flags="--xla_backend_optimization_level=0",
    tell=tell or (lambda line: None),
    command=command,
  )


def _seen(job):
  """(process, cores, flags) of each time that a worker had it."""
  path = job.folder / "seen.txt"
  lines = path.read_text().splitlines() if path.exists() else []
  return [line.split(" ", 2) for line in lines]


def test_every_run_is_done_once_and_told_once(tmp_path, worker):
  jobs, told = _jobs(tmp_path, ["a", "b", "c"], seeds=2), []
  outcome = _run(jobs, worker, tell=told.append)
  assert (outcome.failed, outcome.stopped) == ({}, False)
  assert all(job.done and len(_seen(job)) == 1 for job in jobs)
  assert sorted(line.split(":")[0] for line in told) == sorted(
    job.name for job in jobs
  )
  assert all("1 s, pass rate 0.250" in line for line in told)
  assert [line.split(", ")[-1] for line in told] == [
    f"{n} left" for n in (5, 4, 3, 2, 1, 0)
  ]


def test_a_process_a_run_on_its_own_core(tmp_path, worker):
  jobs = _jobs(tmp_path, ["a", "b", "c"])
  _run(jobs, worker)
  seen = [_seen(job)[0] for job in jobs]
  assert len({process for process, *_ in seen}) == 3
  assert {cores for _, cores, _ in seen} == {"0", "1"}
  for _, _, flags in seen:
    assert flags.split() == [
      "--xla_cpu_multi_thread_eigen=false",
      "--xla_force_host_platform_device_count=1",
      "--xla_backend_optimization_level=0",
    ]


def test_two_cores_are_two_devices(tmp_path, worker):
  (job,) = _jobs(tmp_path, ["a"])
  _run([job], worker, cores=[[0, 1]])
  ((_, cores, flags),) = _seen(job)
  assert cores == "0,1"
  assert "device_count=2" in flags


def test_reused_processes_take_run_after_run(tmp_path, worker):
  jobs = _jobs(tmp_path, ["a", "b", "c", "d", "e"])
  assert not _run(jobs, worker, reuse=True).failed
  assert len({_seen(job)[0][0] for job in jobs}) <= 2


def test_what_is_done_is_left_alone(tmp_path, worker):
  jobs, told = _jobs(tmp_path, ["a", "b", "c"]), []
  _run(jobs[:2], worker)
  _run(jobs, worker, tell=told.append)
  assert [len(_seen(job)) for job in jobs] == [1, 1, 1]
  assert len(told) == 1
  assert told[0].startswith("c, seed 0")
  assert told[0].endswith("0 left")


@pytest.mark.parametrize("reuse", [False, True])
def test_a_failed_run_is_named_and_the_others_go_on(tmp_path, worker, reuse):
  jobs, told = _jobs(tmp_path, ["fails", "crashes", "a", "b", "c"]), []
  outcome = _run(jobs, worker, reuse=reuse, tell=told.append)
  assert outcome.failed == {
    "fails, seed 0": "ValueError: no such thing",
    "crashes, seed 0": "its process ended with code 7: half a line",
  }
  assert [job.done for job in jobs] == [False, False, True, True, True]
  assert "fails, seed 0: failed (ValueError: no such thing)" in "\n".join(told)
  # Asked again, they are tried again.
  assert set(_run(jobs, worker).failed) == set(outcome.failed)
  assert [len(_seen(job)) for job in jobs] == [2, 2, 1, 1, 1]


def test_a_worker_that_cannot_start_is_a_failed_run(tmp_path):
  (job,) = _jobs(tmp_path, ["a"])
  command = sys.executable, "-c", "raise SystemExit('no such module')"
  outcome = _run([job], command)
  assert outcome.failed == {
    "a, seed 0": "its process ended with code 1: no such module"
  }


def _gone(process):
  try:
    os.kill(process, 0)
  except ProcessLookupError:
    return True
  return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_workers_and_starts_no_more(tmp_path, worker, number):
  jobs = _jobs(tmp_path, ["sleeps", "a"])
  before = signal.getsignal(number)

  def send():
    while not ((jobs[0].folder / "ready.txt").exists() and jobs[1].done):
      time.sleep(0.02)
    os.kill(os.getpid(), number)

  # Two more that would be next.
  jobs += _jobs(tmp_path / "more", ["sleeps", "sleeps"], seeds=1)
  sender = threading.Thread(target=send)
  sender.start()
  outcome = _run(jobs, worker)
  sender.join()
  assert outcome.stopped
  assert not outcome.failed
  assert (jobs[0].folder / "told.txt").exists()  # and not killed
  assert all(_gone(int(process)) for job in jobs for process, *_ in _seen(job))
  assert signal.getsignal(number) is before


@pytest.mark.parametrize("reuse", [False, True])
def test_no_run_is_begun_after_a_signal(tmp_path, worker, reuse):
  jobs = _jobs(tmp_path, ["a", "b", "c"])
  outcome = _run(
    jobs,
    worker,
    cores=[[0]],
    reuse=reuse,
    tell=lambda _: os.kill(os.getpid(), signal.SIGTERM),
  )
  assert outcome.stopped
  assert [len(_seen(job)) for job in jobs] == [1, 0, 0]


def test_a_worker_that_does_not_listen_is_killed(tmp_path, monkeypatch):
  path, woke = tmp_path / "deaf.py", tmp_path / "woke.txt"
  path.write_text(
    "import os, pathlib, signal, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "os.kill(os.getppid(), signal.SIGTERM)\n"
    f"time.sleep(20)\npathlib.Path({str(woke)!r}).touch()\n"
  )
  monkeypatch.setattr(runner, "GRACE_SECONDS", 0.3)
  (job,) = _jobs(tmp_path, ["a"])
  outcome = _run([job], (sys.executable, str(path)))
  assert outcome.stopped
  assert not outcome.failed
  assert not woke.exists()


def test_a_line_is_the_whole_config(tmp_path):
  config = config_lib.override(Config(), {"run.seed": 4, "loss.name": "gspo"})
  job = Job("gspo", 4, config, tmp_path / "gspo" / "seed_4")
  values = json.loads(job.line())
  assert config_lib.from_dict(values["config"]) == config
  assert values["workdir"] == str(tmp_path / "gspo" / "seed_4")
  assert values["log"] == str(tmp_path / "gspo" / "seed_4.log")


@pytest.mark.parametrize(
  ("visible", "of_a_run", "expected"),
  [
    ({3, 5}, 1, [[3], [5]]),
    ({3, 5}, 2, [[3, 5]]),
    ({4}, 1, [[4]]),
    ({4}, 2, [[4]]),
    ({1, 2, 3, 4}, 1, [[1], [2]]),
    ({1, 2, 3, 4}, 2, [[1, 2]]),
  ],
)
def test_no_core_serves_two(monkeypatch, visible, of_a_run, expected):
  monkeypatch.setattr(os, "sched_getaffinity", lambda _: visible, raising=False)
  assert core_sets(of_a_run) == expected
