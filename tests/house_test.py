"""The house: documented, on its floors, mirrored by tests, nothing dead."""

import ast
import dataclasses
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from scalerl_jax import config

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "scalerl_jax"
FILES = sorted(PACKAGE.rglob("*.py"))
EXPERIMENTS = sorted((ROOT / "experiments").glob("[!_]*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LONGEST = 400  # lines of a file of the package

# Files of the package without a test file of their own, each with its reason.
UNMIRRORED = {
  "types.py": "records only: nothing to run",
}
# Tests of a property that several rooms of a wing hold together.
ACROSS_ROOMS = {"objectives/invariance_test.py"}
# Files that may be long, each with its reason.
LONG = {"config.py": "every section of the config in one place"}


def _name(path):
  return path.relative_to(ROOT).as_posix()


def _tree(path):
  return ast.parse(path.read_text(), str(path))


def _public(nodes):
  """Functions and classes of `nodes` that do not start with `_`."""
  kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
  return [
    node
    for node in nodes
    if isinstance(node, kinds) and not node.name.startswith("_")
  ]


def _functions(wing):
  """(where, function) of every public function of a wing."""
  for path in sorted((PACKAGE / wing).glob("*.py")):
    for node in _public(_tree(path).body):
      if isinstance(node, ast.FunctionDef):
        yield f"{_name(path)}: {node.name}", node


# Documents.


def test_every_public_name_is_documented():
  bare = []
  for path in [*FILES, *EXPERIMENTS]:
    tree = _tree(path)
    if not ast.get_docstring(tree):
      bare.append(_name(path))
    for node in _public(tree.body):
      members = _public(node.body) if isinstance(node, ast.ClassDef) else []
      names = [(node.name, node)]
      names += [(f"{node.name}.{member.name}", member) for member in members]
      bare += [
        f"{_name(path)}: {name}"
        for name, what in names
        if not ast.get_docstring(what)
      ]
  assert not bare


def test_every_objective_runs_an_example():
  without = [
    where
    for where, node in _functions("objectives")
    if ">>>" not in (ast.get_docstring(node) or "")
  ]
  assert not without


@pytest.mark.parametrize("wing", ["objectives", "scaling"])
def test_mathematics_says_what_goes_in(wing):
  # A section or the equation itself, wherever there is more than one argument.
  silent = [
    where
    for where, node in _functions(wing)
    if len(node.args.args + node.args.kwonlyargs) > 1
    and not re.search(
      r"^(Args|Returns|Raises):|[=^≤∝ΣΠ]", ast.get_docstring(node) or "", re.M
    )
  ]
  assert not silent


def test_experiments_state_their_command_and_return_a_config():
  assert EXPERIMENTS
  for path in EXPERIMENTS:
    command = f"--config={_name(path)}"
    assert command in (ast.get_docstring(_tree(path)) or ""), _name(path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert isinstance(module.get_config(), config.Config), _name(path)


def test_paths_named_in_the_documents_exist():
  lost = []
  for path in [*ROOT.glob("*.md"), *ROOT.glob("*/*.md")]:
    named = re.findall(
      r"`((?:scalerl_jax|tests|experiments|launch|benchmarks)/[\w./]+)`",
      path.read_text(),
    )
    lost += [f"{_name(path)}: {n}" for n in named if not (ROOT / n).exists()]
  assert not lost


# Floors, mirror, size.


def _floors():
  contracts = PROJECT["tool"]["importlinter"]["contracts"]
  (floors,) = [c for c in contracts if c["name"] == "floors"]
  return floors


def test_every_file_is_on_a_floor():
  floors = _floors()
  assert floors["exhaustive"]
  placed = re.findall(r"\w+", " ".join(floors["layers"]))
  assert len(placed) == len(set(placed))
  rooms = {
    path.relative_to(PACKAGE).with_suffix("").parts[0]
    for path in FILES
    if path != PACKAGE / "__init__.py"
  }
  assert rooms == set(placed)


def test_every_wing_is_a_package():
  # The import linter does not see a folder without `__init__.py`.
  bare = {path.parent for path in FILES} - {
    path.parent for path in FILES if path.name == "__init__.py"
  }
  assert not bare


def test_contributing_lists_every_floor():
  text = (ROOT / "CONTRIBUTING.md").read_text()
  words = re.findall(r"\w+", " ".join(_floors()["layers"]))
  assert not [word for word in words if f"`{word}" not in text]


def test_tests_mirror_the_package():
  rooms = {
    path.relative_to(PACKAGE).as_posix()
    for path in FILES
    if path.name != "__init__.py"
  }
  assert set(UNMIRRORED) <= rooms
  missing = [
    room
    for room in sorted(rooms - set(UNMIRRORED))
    if not (ROOT / "tests" / room.replace(".py", "_test.py")).exists()
  ]
  assert not missing


def test_every_test_has_a_room():
  wings = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
  tests = {
    path.relative_to(ROOT / "tests").as_posix()
    for wing in wings
    for path in (ROOT / "tests" / wing).glob("*_test.py")
  }
  assert tests >= ACROSS_ROOMS
  orphans = [
    test
    for test in sorted(tests - ACROSS_ROOMS)
    if not (PACKAGE / test.replace("_test.py", ".py")).exists()
  ]
  assert not orphans


def test_files_are_short():
  long = {
    _name(path): lines
    for path in FILES
    if (lines := len(path.read_text().splitlines())) > LONGEST
    and path.relative_to(PACKAGE).as_posix() not in LONG
  }
  assert not long


# Nothing unfinished, nothing borrowed from a private place.


def test_nothing_is_left_undone():
  undone = re.compile(
    r"\b(TO[D]O|FIX[M]E|XX[X])\b|NotImplemented[E]rror"
    r"|jax\._[s]rc|pytest\.mark\.(skip|xfail)|pytest\.(skip|xfail)\("
    r"|(?<![\w.])/(work|root)/|\.\./shared"
  )
  found = []
  for folder in ("scalerl_jax", "experiments", "benchmarks", "launch", "tests"):
    for path in (ROOT / folder).rglob("*"):
      if path.suffix in (".py", ".sh", ".md") and path != Path(__file__):
        found += [
          f"{_name(path)}:{number}: {line.strip()}"
          for number, line in enumerate(path.read_text().splitlines(), 1)
          if undone.search(line)
        ]
  assert not found


def test_lock_pins_every_requirement():
  def names(file, pattern):
    found = re.findall(pattern, (ROOT / file).read_text(), re.M)
    return {re.sub(r"[-_.]+", "-", name).lower() for name in found}

  wanted = names("requirements.txt", r"^([A-Za-z][\w.-]*)")
  wanted |= names("requirements-dev.txt", r"^([A-Za-z][\w.-]*)")
  pinned = names("requirements.lock", r"^([A-Za-z][\w.-]*)==[\w.]+$")
  assert wanted
  assert wanted <= pinned


# No dead option.


def _reads(tree, sections):
  """(section, field) of every attribute that `tree` reads off a section.

  A name stands for a section when it is the section's own name, is annotated
  with the section's class, or was assigned from one of these.
  """
  stands_for = {name: {name} for name in sections}
  classes = {type(value).__name__: name for name, value in sections.items()}
  for node in ast.walk(tree):
    if isinstance(node, ast.arg) and node.annotation:
      target, annotation = node.arg, node.annotation
    elif isinstance(node, ast.AnnAssign):
      target, annotation = _last(node.target), node.annotation
    elif isinstance(node, ast.Assign) and _last(node.value) in sections:
      for assigned in node.targets:
        stands_for[_last(node.value)].add(_last(assigned))
      continue
    else:
      continue
    for part in ast.walk(annotation):
      if _last(part) in classes:
        stands_for[classes[_last(part)]].add(target)
  return {
    (section, node.attr)
    for node in ast.walk(tree)
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    for section, names in stands_for.items()
    if _last(node.value) in names
  }


def _last(node):
  """`c` of `a.b.c`; None for what is not a name."""
  return getattr(node, "attr", getattr(node, "id", None))


def test_every_config_field_is_read():
  sections = {
    field.name: getattr(config.Config(), field.name)
    for field in dataclasses.fields(config.Config)
  }
  fields = {
    (name, field.name)
    for name, section in sections.items()
    for field in dataclasses.fields(section)
  }
  read = set()
  for path in FILES:
    if path != PACKAGE / "config.py":
      read |= _reads(_tree(path), sections)
  dead = sorted(".".join(field) for field in fields - read)
  assert not dead
