"""A workdir belongs to one config and says what its bits depend on."""

import json
import pathlib
import subprocess
import sys

import jax
import pytest

from scalerl_jax import config as config_lib
from scalerl_jax.config import Config
from scalerl_jax.run import host, workdir
from scalerl_jax.run.workdir import claim_task, claim_workdir, provenance
from tests.runs import TINY, vary

TINY_DICT = config_lib.to_dict(TINY)
FOLDER = pathlib.Path(workdir.__file__).parent


def _refusal(folder, config):
  with pytest.raises(ValueError, match=r".") as caught:
    claim_workdir(folder, config)
  assert "\n" not in str(caught.value)
  return str(caught.value)


@pytest.mark.parametrize("exists", [False, True])
def test_a_new_workdir_is_claimed(tmp_path, exists):
  folder = tmp_path / "runs" / "one"
  if exists:
    folder.mkdir(parents=True)
  claim_workdir(folder, TINY)
  assert [path.name for path in folder.iterdir()] == ["config.json"]
  held = json.loads((folder / "config.json").read_text())
  assert config_lib.from_dict(held["config"]) == TINY
  assert held["provenance"] == provenance()


def test_the_same_config_may_come_back_and_changes_nothing(tmp_path):
  claim_workdir(tmp_path / "one", TINY)
  path = tmp_path / "one" / "config.json"
  before = path.read_bytes()
  claim_workdir(tmp_path / "one", config_lib.from_dict(TINY_DICT))
  assert path.read_bytes() == before


@pytest.mark.parametrize(
  "changes",
  [
    {"run": {"seed": 1}},
    {"run": {"steps": 7}},
    {"optimizer": {"learning_rate": 3.1e-3}},
    {"loss": {"aggregation": "token_average"}},
    {"evaluation": {"every": 3}, "batch": {"micro_batch": 4}},
  ],
)
def test_another_config_is_refused_and_the_fields_are_named(tmp_path, changes):
  claim_workdir(tmp_path / "one", TINY)
  text = _refusal(tmp_path / "one", vary(TINY, **changes))
  names = sorted(f"{s}.{f}" for s, fields in changes.items() for f in fields)
  assert f"it differs in {', '.join(names)})" in text
  assert repr(str(tmp_path / "one")) in text
  assert "use another --workdir" in text


def test_a_config_of_other_fields_is_another_config(tmp_path):
  claim_workdir(tmp_path / "one", TINY)
  path = tmp_path / "one" / "config.json"
  held = json.loads(path.read_text())
  held["config"]["loss"]["epsilon_low"] = 0.2  # of an older version
  held["config"]["lengths"] = {"penalty": 1.0}
  del held["config"]["loss"]["clip_max"]
  path.write_text(json.dumps(held))
  text = _refusal(tmp_path / "one", TINY)
  for name in ("loss.epsilon_low", "lengths.penalty", "loss.clip_max"):
    assert name in text


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path):
  (tmp_path / "notes.txt").write_text("mine")
  text = _refusal(tmp_path, TINY)
  assert repr(str(tmp_path)) in text
  assert "no config.json" in text
  assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_file_is_no_workdir(tmp_path):
  path = tmp_path / "notes.txt"
  path.write_text("mine")
  assert repr(str(path)) in _refusal(path, TINY)
  assert path.read_text() == "mine"


@pytest.mark.parametrize(
  "text", ["", "{", "[]", "{}", '{"config": 3}', '{"config": {"run": 3}}']
)
def test_a_broken_config_file_is_refused(tmp_path, text):
  (tmp_path / "config.json").write_text(text)
  told = _refusal(tmp_path, TINY)
  assert "config.json" in told
  assert str(tmp_path) in told


def test_provenance_says_what_bits_depend_on(monkeypatch):
  jax.local_devices()  # JAX would die of this flag if it started under it
  monkeypatch.setenv("XLA_FLAGS", "--xla_foo=3")
  said = provenance()
  assert said["xla_flags"] == "--xla_foo=3"
  assert said["visible_cores"] == host.visible_cores()
  assert said["devices"] == jax.local_device_count()
  assert said["device_kind"] == jax.local_devices()[0].device_kind
  assert said["versions"]["jax"] == jax.__version__
  assert set(said["versions"]) >= {"scalerl-jax", "jaxlib", "flax", "numpy"}
  assert said["python"] == ".".join(map(str, sys.version_info[:3]))
  assert said["machine"]
  json.dumps(said)


def test_provenance_names_the_commit_of_the_package(monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)  # wherever the command is given
  asked = subprocess.run(
    ["git", "-C", str(FOLDER), "rev-parse", "HEAD"],
    capture_output=True,
    text=True,
    check=False,
  )
  assert provenance()["commit"] == (asked.stdout.strip() or "unknown")


def test_provenance_does_without_git(monkeypatch):
  monkeypatch.setenv("PATH", "")
  assert provenance()["commit"] == "unknown"


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("visible_cores", 97),
    ("xla_flags", "--xla_other"),
    ("devices", 97),
    ("machine", "another"),
  ],
)
def test_going_on_elsewhere_names_what_differs(tmp_path, name, value, capsys):
  # Bits depend on it: the resumed run is not the uninterrupted one.
  claim_workdir(tmp_path / "one", Config())
  path = tmp_path / "one" / "config.json"
  held = json.loads(path.read_text())
  held["provenance"][name] = value
  path.write_text(json.dumps(held))
  try:
    claim_workdir(tmp_path / "one", Config())
    told = "".join(capsys.readouterr())
  except ValueError as error:
    told = str(error)
  assert name in told
  assert str(value) in told


def test_changed_prompts_are_refused_and_the_same_ones_are_not(tmp_path):
  claim_task(tmp_path, "abc")
  claim_task(tmp_path, "abc")
  with pytest.raises(ValueError, match="have changed since") as caught:
    claim_task(tmp_path, "xyz")
  assert "abc" in str(caught.value)
  assert "xyz" in str(caught.value)
  claim_task(tmp_path, "abc")


def test_sections_that_must_agree_are_compared_and_others_are_not(tmp_path):
  workdir.claim_workdir(tmp_path, TINY)
  other = vary(TINY, evaluation={"samples": 3}, model={"mlp_width": 40})
  workdir.check_sections(tmp_path, other, ("task",))
  # The same policy, on a device that mixes in another way.
  here = vary(TINY, model={"attention": "xla"})
  workdir.check_sections(tmp_path, here, ("task", "model"))
  with pytest.raises(ValueError, match=r"differs in model\.mlp_width; give"):
    workdir.check_sections(tmp_path, other, ("task", "model"))
  with pytest.raises(ValueError, match="must be the folder of a run"):
    workdir.check_sections(tmp_path / "nothing", TINY, ("task",))
