"""What a process may still do once it looks at what a policy wrote.

Limits of the kernel, a network of its own where the kernel gives one, and an
audit hook. Good against accidents and simple tricks; not a wall against code
that sets out to break Python itself: see `confine`.
"""

import contextlib
import ctypes
import os
import resource
import sys
from typing import Any

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # of Linux' unshare
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Audit events of what no judgement needs; of wings and of single events.
_DENIED_WINGS = ("socket", "subprocess", "shutil", "ctypes", "pty", "urllib")
_DENIED = {
  *("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn"),
  *("os.system", "os.startfile", "os.kill", "os.killpg", "signal.pthread_kill"),
  *("os.chmod", "os.chown", "os.link", "os.symlink", "os.utime", "os.setxattr"),
  *("os.removexattr", "os.chflags", "os.putenv", "resource.prlimit"),
  *("resource.setrlimit", "fcntl.fcntl", "fcntl.ioctl"),
}
# Events of files, allowed within the scratch folder.
_FILES = {"os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate"}


def confine(*, megabytes: int, scratch: str = "", cpu_seconds: int = 0) -> None:
  """Takes from this process what judging does not need; for good.

  Isolated: memory (address space), size of written files, number of open
  files, core dumps and, if asked, CPU seconds, by resource limits. No new
  processes: by resource limit, which does not bind root, and by audit hook.
  No network: a name space without interfaces where Linux gives one, and the
  audit hook. No files written or removed outside `scratch`, by audit hook.

  Not isolated: files that the user may read can be read. The audit hook sees
  Python's own calls; machine code that gets in beside them is not stopped, and
  code that runs in this process could tamper with its verdict. Put a container
  around the run where that matters.

  Args:
    megabytes: of address space.
    scratch: folder in which 1 MB files may be written; empty: none at all.
    cpu_seconds: after which the kernel ends the process; 0: never.
  """
  _leave_network()
  _limit(resource.RLIMIT_AS, megabytes << 20)
  _limit(resource.RLIMIT_CORE, 0)
  _limit(resource.RLIMIT_FSIZE, (1 << 20) if scratch else 0)
  _limit(resource.RLIMIT_NOFILE, 64)
  _limit(resource.RLIMIT_NPROC, 0)
  if cpu_seconds:
    _limit(resource.RLIMIT_CPU, cpu_seconds)
  inside = os.path.join(os.path.realpath(scratch), "") if scratch else ""

  def allowed(path: Any) -> bool:
    if not inside or isinstance(path, int):
      return False
    return os.path.realpath(os.fsdecode(path)).startswith(inside)

  def hook(event: str, args: tuple[Any, ...]) -> None:
    if event == "open":
      path, _, flags = args
      denied = bool((flags or 0) & _WRITES) and not allowed(path)
    elif event in _FILES:
      paths = args[:2] if event == "os.rename" else args[:1]
      denied = not all(allowed(path) for path in paths)
    else:
      denied = event in _DENIED or event.partition(".")[0] in _DENIED_WINGS
    if denied:
      raise PermissionError(f"{event} is not allowed while judging")

  sys.addaudithook(hook)


def _limit(kind: int, value: int) -> None:
  _, hard = resource.getrlimit(kind)
  if hard != resource.RLIM_INFINITY:
    value = min(value, hard)
  resource.setrlimit(kind, (value, value))


def _leave_network() -> None:
  """A network without interfaces; where the kernel refuses, the old one."""
  with contextlib.suppress(AttributeError, OSError):  # not Linux
    unshare = ctypes.CDLL(None, use_errno=True).unshare
    # The first needs no rights, the second those of root.
    if unshare(_NEW_USER | _NEW_NETWORK) != 0:
      unshare(_NEW_NETWORK)
