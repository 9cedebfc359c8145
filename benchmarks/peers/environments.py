"""A virtual environment for each peer, made once and used again.

`requirements/NAME.txt` pins everything that is in it; an environment whose
pins are the same is not made again. They lie below `build/peers/`.
"""

import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
PINS = pathlib.Path(__file__).parent / "requirements"
PEERS = tuple(sorted(path.stem for path in PINS.glob("*.txt")))


def is_current(folder: pathlib.Path, pins: str) -> bool:
  """Whether an environment holds exactly these pins.

  Args:
    folder: of the environment.
    pins: the text of its requirements file.
  """
  told = folder / "installed.txt"
  return told.exists() and told.read_text(encoding="utf-8") == pins


def interpreter(
  name: str, folder: pathlib.Path = ROOT / "build" / "peers"
) -> str:
  """Python of a peer's environment, which is made where it is missing or old.

  Args:
    name: one of `PEERS`.
    folder: that holds the environments.

  Returns:
    The path of its `python`.
  """
  place = folder / name
  python = str(place / "bin" / "python")
  file = PINS / f"{name}.txt"
  pins = file.read_text(encoding="utf-8")
  if is_current(place, pins):
    return python
  print(f"installs {name} into {place} (once)", flush=True)
  shutil.rmtree(place, ignore_errors=True)
  subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
  subprocess.run(
    [python, "-m", "pip", "install", "--quiet", "--requirement", str(file)],
    check=True,
  )
  (place / "installed.txt").write_text(pins, encoding="utf-8")
  return python
