"""The house: documented, on its floors, mirrored by tests, nothing dead."""

import ast
import dataclasses
import functools
import importlib.util
import itertools
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow.parquet
import pytest
from flax import nnx

from scalerl_jax import config
from scalerl_jax.config import LossConfig, ModelConfig, TaskConfig
from scalerl_jax.data.array_records import write_array_records
from scalerl_jax.data.prompts import Line
from scalerl_jax.data.tasks import load_task
from scalerl_jax.learning import train_step
from scalerl_jax.learning.batching import completion_rewards, counted_rows
from scalerl_jax.models.policy import Policy
from scalerl_jax.run.train import make_ledger, refill_limit
from scalerl_jax.sampling.interruption import make_interruption
from scalerl_jax.types import Batch, FinishReason
from tests.fixtures.add_a_loss import ADD_A_LOSS, ONE_STEP

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
ACROSS_ROOMS = {
  "objectives/invariance_test.py",
  "learning/invariance_test.py",
  "scaling/coverage_test.py",
  "objectives/surrogates_test.py",  # losses_test.py would pass 400 lines
}
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
  documented, protocols = set(), {}
  for path in FILES:
    for node in _public(_tree(path).body):
      members = _public(node.body)
      documented |= {
        (node.name, member.name)
        for member in members
        if ast.get_docstring(member)
      }
      if "Protocol" in map(_last, getattr(node, "bases", [])):
        protocols.setdefault(path, []).append(node.name)

  def inherits(path, what, member):
    bases = [*map(_last, what.bases), *protocols.get(path, [])]
    return any((base, member) in documented for base in bases)

  bare = []
  for path in [*FILES, *EXPERIMENTS]:
    tree = _tree(path)
    if not ast.get_docstring(tree):
      bare.append(_name(path))
    for node in _public(tree.body):
      if not ast.get_docstring(node):
        bare.append(f"{_name(path)}: {node.name}")
      if isinstance(node, ast.ClassDef):
        bare += [
          f"{_name(path)}: {node.name}.{member.name}"
          for member in _public(node.body)
          if not ast.get_docstring(member)
          and not inherits(path, node, member.name)
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
      r"^(Args|Returns|Raises):|[=^≤∝ΣΠ·]", ast.get_docstring(node) or "", re.M
    )
  ]
  assert not silent


def test_experiments_state_their_command_and_return_a_config():
  assert EXPERIMENTS
  for path in EXPERIMENTS:
    told = ast.get_docstring(_tree(path)) or ""
    commands = f"--config={_name(path)}", f"python -m experiments.{path.stem}"
    assert any(command in told for command in commands), _name(path)
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


def _properties(sections):
  """(section, field) of every field behind a property of its section."""
  classes = {type(value).__name__: name for name, value in sections.items()}
  return {
    (classes[kind.name], node.attr)
    for kind in _tree(PACKAGE / "config.py").body
    if isinstance(kind, ast.ClassDef) and kind.name in classes
    for method in kind.body
    if isinstance(method, ast.FunctionDef)
    and "property" in map(_last, method.decorator_list)
    for node in ast.walk(method)
    if isinstance(node, ast.Attribute) and _last(node.value) == "self"
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
  read = _properties(sections)
  for path in FILES:
    if path != PACKAGE / "config.py":
      read |= _reads(_tree(path), sections)
  dead = sorted(".".join(field) for field in fields - read)
  assert not dead


def _losses(choice, _):
  """Losses of two tokens, the first one far off policy."""
  logps = jnp.array([[-1.0, -2.0]])
  batch = Batch(
    tokens=jnp.zeros((1, 2), jnp.int32),
    segment_ids=jnp.ones((1, 2), jnp.int32),
    mask=jnp.ones((1, 2), bool),
    behavior_logps=jnp.array([[-5.0, -2.0]]),
    correct=jnp.ones((1,), jnp.int32),
    rewards=jnp.ones((1,)),
  )
  token_loss = train_step.LOSSES[choice]
  return token_loss(logps, batch, jnp.array([0.5]), LossConfig())


def _global(field):
  """How the weights of a batch answer to `field` of the loss's section."""

  def answer(choice, _):
    loss = LossConfig(**{field: choice})
    settings = train_step.TrainSettings(
      policy=None,
      optimizer=optax.identity(),
      loss=loss,
      warp=(),
      group_size=3,
      micro_batch=1,
      max_completion_tokens=11,
    )
    lengths = np.array([1, 2, 7, 3, 3, 5, 5, 6, 1])[:, None]
    correct = np.array([1, 0, 0, 1, 1, 0, 1, 1, 1], np.int32)
    batch = Batch(
      tokens=np.zeros((9, 7), np.int32),
      segment_ids=np.ones((9, 7), np.int32),
      mask=np.arange(7) < lengths,
      behavior_logps=np.zeros((9, 7), np.float32),
      correct=correct,
      rewards=np.where(correct, 1.0, -1.0).astype(np.float32),
    )
    batch = jax.device_put(batch)
    advantages, weights, _ = train_step.global_weights(batch, settings)
    return (
      advantages[:, None] * weights if field != "zero_variance" else weights
    )

  return answer


def _zero_variance(choice, _):
  """The weights of a batch, and how many groups may be replaced first."""
  loss = LossConfig(zero_variance=choice)
  weights = _global("zero_variance")(choice, None)
  limit = refill_limit(dataclasses.replace(config.Config(), loss=loss))
  return [*np.asarray(weights).ravel().tolist(), limit]


def _algorithms(choice, _):
  """What may be admitted at first and after one batch was taken."""
  whole = dataclasses.replace(
    config.Config(), pipeline=config.PipelineConfig(algorithm=choice)
  )
  ledger = make_ledger(whole)
  for group in range(ledger.admissible()):
    ledger.admit(group, 0)
    ledger.finish(group)
  first = ledger.outstanding
  ledger.take(ledger.next_batch())
  ledger.publish()
  return [first, ledger.admissible()]


def _length_controls(choice, _):
  """Rewards of right completions, and whether any is interrupted."""
  length = config.LengthConfig(control=choice)
  task = load_task(
    TaskConfig(train_prompts=3, heldout_prompts=2),
    config.SupervisedConfig(),
    max_prompt_tokens=14,
  )
  found = make_interruption(length, task.tokenizer, max_completion_tokens=15)
  rewards = completion_rewards(
    np.ones(2, int), np.array([3, 15]), length, max_length=15
  )
  return [*rewards.tolist(), float(found is not None)]


def _truncated(choice, _):
  """Which of a finished and a truncated completion count."""
  finish = np.array([FinishReason.EOS, FinishReason.BUDGET])
  return counted_rows(finish, config.LengthConfig(truncated=choice))


@functools.cache
def _policy():
  shape = ModelConfig(
    width=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_width=4,
    mlp_width=12,
  )
  return Policy(shape, vocab_size=7, rngs=nnx.Rngs(0))


def _dtypes(choice, _):
  policy = _policy()  # parameters are float32 whatever the body is
  policy.config = dataclasses.replace(policy.config, dtype=choice)

  def body_and_head(tokens):
    hidden = policy.hidden(tokens, None, None)
    return hidden, policy.head(hidden)

  tokens = jnp.zeros((2, 3), jnp.int32)
  hidden, logits = jax.eval_shape(body_and_head, tokens)
  assert logits.dtype == jnp.float32
  return hidden.dtype.name


def _model(field, **others):
  """Logits of a policy, by a choice of its architecture."""

  def answer(choice, _):
    shape = dataclasses.replace(_policy().config, **{field: choice}, **others)
    policy = Policy(shape, vocab_size=7, rngs=nnx.Rngs(0))
    return policy(jnp.arange(6, dtype=jnp.int32).reshape(2, 3))

  return answer


def _attentions(choice, _):
  """The program of a policy, or that no CPU runs it."""
  shape = dataclasses.replace(
    _policy().config, attention=choice, dtype="bfloat16"
  )
  try:
    policy = Policy(shape, vocab_size=7, rngs=nnx.Rngs(0))
  except ValueError:
    return "refused"
  return str(jax.make_jaxpr(policy)(jnp.zeros((2, 4), jnp.int32)))


def _remats(choice, _):
  """Whether the gradient of a policy computes its layers again."""
  policy = _policy()
  policy.config = dataclasses.replace(policy.config, remat=choice)
  graph, params = nnx.split(policy)

  def loss(params):
    return nnx.merge(graph, params)(jnp.zeros((2, 3), jnp.int32)).sum()

  return "remat" in str(jax.make_jaxpr(jax.grad(loss))(params))


def _tasks(choice, tmp_path):
  rows = [{"prompt": f"say {n}", "answer": str(n)} for n in range(8)]
  path = tmp_path / choice
  if choice == "jsonl":
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  elif choice == "parquet":
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[1:]), path)
  elif choice == "tfds":
    path = write_array_records([Line(**row) for row in rows[2:]], path)
  task = TaskConfig(
    name=choice,
    train_prompts=3,
    heldout_prompts=2,
    path=str(path) if choice in config.FILES else "",
    dataset="basic_arithmetic" if choice == "reasoning_gym" else "",
    mixture="chain_logic:1,chain_arithmetic:2" if choice == "mixture" else "",
  )
  made = load_task(task, config.SupervisedConfig(), max_prompt_tokens=64)
  return [prompt.text for prompt in made.train]


def _long_prompts(choice, tmp_path):
  """What is trained on where one question is too long."""
  path = tmp_path / "prompts.jsonl"
  rows = [{"prompt": "say " * n, "answer": str(n)} for n in (1, 9, 2, 3, 4)]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  task = TaskConfig(
    name="jsonl",
    train_prompts=2,
    heldout_prompts=1,
    path=str(path),
    long_prompts=choice,
  )
  try:
    made = load_task(task, config.SupervisedConfig(), max_prompt_tokens=20)
  except ValueError:
    return ["refused"]
  return [prompt.text for prompt in made.train]


# Every tuple of choices in config.py, and something that differs with them.
ANSWERS = {
  "LOSSES": _losses,
  "AGGREGATIONS": _global("aggregation"),
  "NORMALIZATIONS": _global("normalization"),
  "ZERO_VARIANCE": _zero_variance,
  "ALGORITHMS": _algorithms,
  "LENGTH_CONTROLS": _length_controls,
  "TRUNCATED": _truncated,
  "DTYPES": _dtypes,
  "ATTENTIONS": _attentions,
  "QK_NORMS": _model("qk_norm"),
  "ROUTERS": _model(
    "router", num_experts=3, experts_per_token=2, expert_width=5
  ),
  "REMATS": _remats,
  "TASKS": _tasks,
  "LONG_PROMPTS": _long_prompts,
}
# Choices that need a whole run: their tests are in the rooms named here, and
# only that they are named there is seen here.
NAMED = {
  "SCHEDULES": "pipeline",
  "COMPUTE_AXES": "run",
  "ORDERS": "data",
  "HISTORIES": "data",
  "VERIFIERS": "data",
}


def _choices():
  return {
    name: value
    for name, value in vars(config).items()
    if name.isupper() and isinstance(value, tuple)
  }


def test_every_tuple_of_choices_has_a_witness():
  assert set(_choices()) == set(ANSWERS) | set(NAMED)


@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_every_choice_changes_the_result(name, tmp_path):
  answers = {
    choice: np.asarray(ANSWERS[name](choice, tmp_path)).tolist()
    for choice in _choices()[name]
  }
  for one, other in itertools.combinations(answers, 2):
    assert answers[one] != answers[other], f"{one} is {other}"


@pytest.mark.parametrize("name", sorted(NAMED))
def test_every_other_choice_is_named_by_its_room(name):
  words = set()
  for path in (PACKAGE / NAMED[name]).glob("*.py"):
    for node in ast.walk(_tree(path)):
      if isinstance(node, ast.Constant):
        words.add(node.value)
      else:
        words |= {getattr(node, "arg", None), _last(node)}
  # The last of the choices may be what `else` means.
  assert len(set(_choices()[name]) - words) <= 1


# Room for a stranger.


def test_a_loss_is_added_in_five_edits(tmp_path):
  for name in ("scalerl_jax", "tests", "experiments", "pyproject.toml"):
    copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
    copy(ROOT / name, tmp_path / name)
  workspace = (ROOT / "WORKSPACE.md").read_text()
  for name, anchor, text in ADD_A_LOSS:
    path = tmp_path / name
    listed = name if path.exists() else f"{path.parent.name}/"
    assert f"`{listed}`" in workspace
    old = path.read_text() if path.exists() else ""
    if anchor is not None:
      assert old.count(anchor) == 1
    path.write_text(
      old.replace(anchor, anchor + text) if anchor else old + text
    )
  (tmp_path / "tests/one_step_test.py").write_text(ONE_STEP)
  done = subprocess.run(
    [
      *(sys.executable, "-m", "pytest", "-q", "-rA"),
      "tests/one_step_test.py",
      "tests/objectives/losses_test.py::"
      "test_positive_equals_the_scalar_loop_value_and_gradient",
      "scalerl_jax/objectives/losses.py::"
      "scalerl_jax.objectives.losses.positive_loss",
    ],
    cwd=tmp_path,
    capture_output=True,
    text=True,
    stdin=subprocess.DEVNULL,
    check=False,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  for passed in (
    "test_step_trains_with_the_new_loss",
    "test_positive_equals_the_scalar_loop",
    "losses.positive_loss",
  ):
    assert re.search(rf"^PASSED .*{passed}", done.stdout, re.M), done.stdout
