"""W&B is told what the files are told, and is missed in one sentence."""

import json
import sys
import types

import pytest

from scalerl_jax.run import wandb_mirror
from scalerl_jax.run.metrics import MetricsWriter
from tests.runs import TINY, vary

NAMED = vary(TINY, run={"wandb_project": "arithmetic"})


class _Client(types.ModuleType):
  """Writes down what its user asks for."""

  def __init__(self):
    super().__init__("wandb")
    self.asked, self.logged, self.finished = [], [], 0

  def init(self, **options):
    self.asked.append(options)
    return self

  def log(self, values, *, step):
    self.logged.append((step, values))

  def finish(self):
    self.finished += 1


@pytest.fixture
def client(monkeypatch):
  made = _Client()
  monkeypatch.setitem(sys.modules, "wandb", made)
  return made


def test_its_absence_is_one_sentence_and_only_where_it_is_wanted(monkeypatch):
  monkeypatch.setitem(sys.modules, "wandb", None)
  wandb_mirror.check_wandb(TINY)
  with pytest.raises(ValueError, match=r"run\.wandb_project \('arithmetic'\)"):
    wandb_mirror.check_wandb(NAMED)


def test_nobody_is_told_unless_a_project_is_named(client, tmp_path):
  assert wandb_mirror.make_mirror(TINY, tmp_path) is None
  assert not client.asked


def test_numbers_go_to_both_and_texts_to_the_file_alone(client, tmp_path):
  mirror = wandb_mirror.make_mirror(NAMED, tmp_path)
  writer = MetricsWriter(tmp_path, resume_step=None, mirror=mirror)
  writer.step(3, {"loss": 0.5, "note": "fine", "entropy": float("nan")})
  writer.close()
  writer.close()
  assert client.logged == [(3, {"loss": 0.5})]
  assert client.finished == 1
  (options,) = client.asked
  assert options["project"] == "arithmetic"
  assert options["config"]["run"]["wandb_project"] == "arithmetic"
  assert json.loads((tmp_path / "metrics.jsonl").read_text())["note"] == "fine"


def test_a_workdir_is_one_run_of_it_for_ever(client, tmp_path):
  for folder in ("one", "one", "other"):
    wandb_mirror.make_mirror(NAMED, tmp_path / folder).close()
  first, again, other = (options["id"] for options in client.asked)
  assert first == again != other
  assert {options["resume"] for options in client.asked} == {"allow"}
