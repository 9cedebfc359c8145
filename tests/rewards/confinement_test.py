"""What code of a policy may do to the machine: next to nothing."""

import socket

import pytest

from scalerl_jax.rewards.pool import Pool


@pytest.fixture(scope="module")
def judge():
  with Pool("code", workers=2, seconds=1.5, megabytes=512, fresh=True) as pool:

    def judge(*texts):
      rows = [{"answer": "assert done", "text": text} for text in texts]
      return pool.judge(rows).tolist()

    yield judge


def test_files_are_safe(judge, tmp_path):
  kept = tmp_path / "kept"
  kept.write_text("all of it")
  texts = [
    f"open({str(tmp_path / 'new')!r}, 'w').write('x')",
    f"open({str(kept)!r}, 'w')",
    f"open({str(kept)!r}, 'a').write('x')",
    f"import os; os.remove({str(kept)!r})",
    f"import os; os.rename({str(kept)!r}, 'here')",
    f"import os; os.truncate({str(kept)!r}, 0)",
    f"import os; os.open({str(tmp_path / 'new')!r}, os.O_CREAT)",
    f"import pathlib; pathlib.Path({str(tmp_path / 'new')!r}).mkdir()",
    f"import shutil; shutil.rmtree({str(tmp_path)!r})",
    f"import os; os.symlink({str(tmp_path)!r}, 'a'); open('a/new', 'w')",
    "open('../new', 'w')",
  ]
  assert not any(judge(*[f"{text}\ndone = True" for text in texts]))
  assert kept.read_text() == "all of it"
  assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_scratch_folder_is_free_up_to_a_size(judge):
  assert judge(
    "open('a', 'w').write('x' * 9)\ndone = open('a').read() == 'x' * 9",
    "import os\nopen('a', 'w').close()\nos.remove('a')\ndone = True",
    "import os\ndone = not os.listdir('.')",  # of nobody else
    "open('a', 'w').write('x' * (2 << 20))\ndone = True",
  ) == [True, True, True, False]


def test_processes_memory_and_time_are_limited(judge):
  assert judge(
    "done = len(bytearray(10**7)) == 10**7",
    "done = len(bytearray(10**9)) == 10**9",
    "import subprocess; subprocess.run(['true'])\ndone = True",
    "import os; os.system('true')\ndone = True",
    "import os; os.fork()\ndone = True",
    "import multiprocessing as m\np = m.Process(target=print); p.start()\n"
    "done = True",
    "import os; os.kill(os.getppid(), 0)\ndone = True",
    "while True: pass",
  ) == [True, *[False] * 7]


def test_there_is_no_network(judge):
  with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
    text = f"import socket; socket.create_connection(('127.0.0.1', {port}))"
    assert judge(f"{text}\ndone = True") == [False]
