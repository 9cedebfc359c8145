"""The curve fitter installs and runs without the training program."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CURVE = ROOT / "tests/fixtures/curves/n_cispo_s0.csv"
BASE = {"jax", "jaxtyping", "numpy", "scipy"}
# What the fitter must start without: everything else that we use, and what
# its callback serves.
ELSEWHERE = (
  *("absl", "beartype", "chex", "flax", "matplotlib", "optax", "orbax"),
  *("pandas", "rich", "sentencepiece", "tensorboard", "tensorboardX"),
  *("tensorflow", "torch", "transformers", "wandb"),
)
STARTS_ALONE = """
import importlib, importlib.abc, pkgutil, sys

class Refused(importlib.abc.MetaPathFinder):
  def find_spec(self, name, path=None, target=None):
    if name.split(".")[0] in {elsewhere}:
      raise ImportError("the fitter asked for " + name)

sys.meta_path.insert(0, Refused())
import scalerl_jax
from scalerl_jax import scaling
for room in pkgutil.iter_modules(scaling.__path__):
  importlib.import_module("scalerl_jax.scaling." + room.name)
import scalerl_jax.fit
ours = (m for m in sys.modules if m.startswith("scalerl_jax."))
print(sorted({{m.split(".")[1] for m in ours}}))
"""


def _names(lines):
  return {re.match(r"[\w-]+", line).group().lower() for line in lines}


def test_fitter_starts_without_any_other_library():
  found = subprocess.run(
    [sys.executable, "-c", STARTS_ALONE.format(elsewhere=ELSEWHERE)],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  assert found.returncode == 0, found.stderr
  assert found.stdout == "['fit', 'scaling']\n"


def test_base_is_small_and_extras_hold_the_rest():
  extras = PROJECT["optional-dependencies"]
  assert _names(PROJECT["dependencies"]) == BASE
  assert set(extras) == {"train", "plot", "cuda", "tpu", "wandb"}
  # The base's jax in a build for the accelerator, within the same bounds.
  (bounds,) = (
    line.removeprefix("jax")
    for line in PROJECT["dependencies"]
    if line.startswith("jax>")
  )
  assert extras["cuda"] == [f"jax[cuda12]{bounds}"]
  assert extras["tpu"] == [f"jax[tpu]{bounds}"]
  assert not set(extras["plot"]) - set(extras["train"])
  lines = (ROOT / "requirements.txt").read_text().splitlines()
  everything = {line for line in lines if line and line[0] != "#"}
  assert everything == {*PROJECT["dependencies"], *extras["train"]}


@pytest.mark.slow
def test_base_installs_alone_and_fits_a_curve(tmp_path):
  # A copy: building leaves its files where the sources are.
  source, home = tmp_path / "source", tmp_path / "env"
  ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
  for name in ("scalerl_jax", "experiments"):
    shutil.copytree(ROOT / name, source / name, ignore=ignored)
  for name in ("pyproject.toml", "README.md", "LICENSE", "requirements.txt"):
    shutil.copy(ROOT / name, source / name)
  clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

  def run(*command):
    done = subprocess.run(
      list(map(str, command)),
      cwd=tmp_path,
      env=clean,
      capture_output=True,
      text=True,
      check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout

  run(sys.executable, "-m", "venv", home)
  python = home / "bin" / "python"
  run(python, "-m", "pip", "install", "--quiet", source)
  listed = json.loads(run(python, "-m", "pip", "list", "--format=json"))
  installed = {package["name"].lower() for package in listed}
  assert installed >= BASE | {"scalerl-jax"}
  others = _names(PROJECT["optional-dependencies"]["train"])
  assert not installed & others

  answer = run(
    python,
    *("-m", "scalerl_jax.fit", f"--curve={CURVE}"),
    *("--forecast_at=9e12", f"--out={tmp_path / 'out'}"),
  )
  assert answer.startswith("asymptote: 0.9")
  assert "fit.png and fit.svg are left out" in answer
  assert "scalerl-jax[plot]" in answer
  page = (tmp_path / "out" / "report.html").read_text()
  assert "<script" in page  # the assets came along
  assert json.loads((tmp_path / "out" / "fit.json").read_text())["identified"]
