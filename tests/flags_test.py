"""From flags to one config, or to one sentence."""

import functools
import types

import pytest
from absl import flags as absl_flags

from scalerl_jax import flags
from scalerl_jax.config import Config
from tests.runs import TINY, as_file, vary


def _refusal(path, changes=()):
  with pytest.raises(ValueError, match=r".") as caught:
    flags.load_config(str(path), list(changes))
  assert "\n" not in str(caught.value)
  return str(caught.value)


@pytest.fixture
def tiny(tmp_path):
  return as_file(TINY, tmp_path / "tiny.py")


def test_a_config_file_is_run_and_read(tiny):
  assert flags.load_config(str(tiny), []) == TINY


def test_changes_are_laid_over_the_file(tiny):
  changes = ["run.steps=3", "loss.name = reinforce", "model.tied_head=false"]
  assert flags.load_config(str(tiny), changes) == vary(
    TINY,
    run={"steps": 3},
    loss={"name": "reinforce"},
    model={"tied_head": False},
  )


def test_the_last_of_two_changes_counts(tiny):
  changes = ["run.steps=3", "run.steps=5"]
  assert flags.load_config(str(tiny), changes).run.steps == 5


def test_a_value_may_hold_an_equals_sign(tiny):
  changes = ["task.name=jsonl", "task.path=a=b.jsonl"]
  assert flags.load_config(str(tiny), changes).task.path == "a=b.jsonl"


@pytest.mark.parametrize("name", ["missing.py", ""])
def test_a_missing_file_is_refused(tmp_path, name):
  path = tmp_path / name  # a folder is no file either
  text = _refusal(path)
  assert "--config must name a Python file" in text
  assert repr(str(path)) in text


def test_a_file_without_get_config_is_refused(tmp_path):
  path = tmp_path / "bare.py"
  path.write_text("config = 3\n")
  text = _refusal(path)
  assert "must define get_config()" in text
  assert repr(str(path)) in text


@pytest.mark.parametrize(
  ("value", "kind"), [("None", "NoneType"), ("{}", "dict"), ("3", "int")]
)
def test_a_get_config_of_another_type_is_refused(tmp_path, value, kind):
  path = tmp_path / "other.py"
  path.write_text(f"def get_config():\n  return {value}\n")
  text = _refusal(path)
  assert "must return a scalerl_jax.config.Config" in text
  assert f"got {kind}" in text
  assert repr(str(path)) in text


@pytest.mark.parametrize("change", ["run.steps", "run.steps:3", ""])
def test_a_change_without_an_equals_sign_is_refused(tiny, change):
  text = _refusal(tiny, [change])
  assert "--set must read section.field=value" in text
  assert f"got {change!r}" in text


@pytest.mark.parametrize(
  ("change", "says"),
  [
    ("run.step=3", "seed, steps, forecast_axis"),
    ("rum.steps=3", "run, task, supervised"),
    ("=3", "run, task, supervised"),
    ("run.steps=1.5", "run.steps must be of type int, got '1.5'"),
    ("run.steps=0", "run.steps must be above 0"),
    ("batch.micro_batch=7", "a divisor of the 16 completions"),
  ],
)
def test_a_change_that_the_config_refuses_is_refused(tiny, change, says):
  assert says in _refusal(tiny, [change])


def test_the_config_is_required_and_the_rest_has_defaults(monkeypatch):
  values = absl_flags.FlagValues()  # instead of the process's own
  defines = {
    name: functools.partial(define, flag_values=values)
    for name, define in vars(absl_flags).items()
    if name.startswith("DEFINE_") and callable(define)
  }
  monkeypatch.setattr(flags, "flags", types.SimpleNamespace(**defines))
  flags.define_run_flags()
  assert set(values) == set(flags.RUN_FLAGS)
  with pytest.raises(absl_flags.IllegalFlagValueError, match="config"):
    values(["main", "--workdir=d"])
  values.unparse_flags()
  values(["main", "--config=c.py", "--workdir=d", "--set=a.b=1", "--set=c.d=2"])
  assert (values["config"].value, values["workdir"].value) == ("c.py", "d")
  assert values["set"].value == ["a.b=1", "c.d=2"]
  assert not values["plan"].value


def test_the_default_is_the_file_alone(tmp_path):
  path = as_file(Config(), tmp_path / "default.py")
  assert flags.load_config(str(path), []) == Config()
