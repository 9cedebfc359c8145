"""What is said to JAX before it starts, and what is left alone."""

import os
import subprocess
import sys

import pytest

from scalerl_jax.run import host

DEVICES = "--xla_force_host_platform_device_count"
THREADS = "--xla_cpu_multi_thread_eigen"


def _prepared(monkeypatch, cores, flags):
  """`XLA_FLAGS` as a dictionary, after `prepare_cpu` on so many cores."""
  monkeypatch.setattr(host, "visible_cores", lambda: cores)
  if flags is None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
  else:
    monkeypatch.setenv("XLA_FLAGS", flags)
  host.prepare_cpu()
  words = os.environ["XLA_FLAGS"].split()
  found = dict(word.partition("=")[::2] for word in words)
  assert len(found) == len(words)  # nothing said twice
  return found


@pytest.mark.parametrize("flags", [None, ""])
@pytest.mark.parametrize(
  ("cores", "devices", "threads"),
  [(1, "1", "false"), (2, "2", "false"), (3, "2", None), (64, "2", None)],
)
def test_a_cpu_has_a_device_a_role(monkeypatch, flags, cores, devices, threads):
  found = _prepared(monkeypatch, cores, flags)
  assert found[DEVICES] == devices
  assert found.get(THREADS) == threads


def test_settings_that_are_there_win(monkeypatch):
  found = _prepared(monkeypatch, 2, f"{DEVICES}=7 {THREADS}=true --xla_foo=3")
  assert found == {DEVICES: "7", THREADS: "true", "--xla_foo": "3"}


def test_other_settings_stay(monkeypatch):
  found = _prepared(monkeypatch, 2, "--xla_foo=3")
  assert found == {"--xla_foo": "3", DEVICES: "2", THREADS: "false"}


def test_preparing_twice_is_preparing_once(monkeypatch):
  once = _prepared(monkeypatch, 2, None)
  assert _prepared(monkeypatch, 2, os.environ["XLA_FLAGS"]) == once


def test_visible_cores_are_those_of_this_process():
  one = min(os.sched_getaffinity(0))
  code = (
    f"import os; os.sched_setaffinity(0, {{{one}}});"
    "from scalerl_jax.run.host import visible_cores; import sys;"
    "print(visible_cores(), 'jax' in sys.modules)"
  )
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  # A door calls this before JAX starts, so it must not start JAX itself.
  assert done.stdout.split() == ["1", "False"]


def test_a_system_without_affinity_counts_its_cores(monkeypatch):
  # macOS has no `sched_getaffinity`.
  monkeypatch.delattr(os, "sched_getaffinity")
  assert host.visible_cores() == os.cpu_count()
