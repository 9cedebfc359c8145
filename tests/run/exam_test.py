"""A saved policy examined: the run's own numbers, and every completion."""

import json
import types

import numpy as np
import pytest
from flax import nnx

from scalerl_jax.run.exam import evaluate_saved
from scalerl_jax.run.saved_policy import export_step, stored_task
from scalerl_jax.run.train import enable_compilation_cache
from tests.helpers import small_policy
from tests.runs import TINY, saved_workdir, shared_cache, vary

SET = "chain_arithmetic"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """Workdir and task of a run whose policy was saved once."""
  folder = tmp_path_factory.mktemp("exam") / "run"
  task = stored_task(TINY, folder)
  policy = small_policy(TINY.model, vocab_size=task.tokenizer.vocab_size)
  saved_workdir(folder, TINY, [nnx.state(policy)])
  task.tokenizer.store(folder)
  with shared_cache(tmp_path_factory):
    enable_compilation_cache()
    yield types.SimpleNamespace(workdir=folder, task=task)


def _lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_completion_is_written_with_its_verdict(run):
  # The rate is the run's own: tests/main_test.py.
  (told,) = evaluate_saved(TINY, run.workdir, "1")
  lines = _lines(run.workdir / f"completions_step_1_{SET}.jsonl")
  verdicts = np.array([line["correct"] for line in lines])
  assert verdicts.shape == (TINY.task.heldout_prompts, TINY.evaluation.samples)
  error = verdicts.mean(axis=1).std(ddof=1) / np.sqrt(len(verdicts))
  assert told.startswith(
    f"{SET}, step_1: mean@4 {verdicts.mean():.4f}, standard error {error:.4f}"
  )
  prompts = run.task.heldout[SET]
  for line, prompt in zip(lines, prompts, strict=True):
    assert (line["prompt"], line["answer"]) == (prompt.text, prompt.answer)
    assert len(line["completions"]) == TINY.evaluation.samples
    for text, verdict in zip(line["completions"], line["correct"], strict=True):
      # One that ran out of budget is wrong whatever it says.
      assert run.task.verify(prompt, text, ended=True) or not verdict


def test_an_exported_step_answers_as_the_step_does(run, tmp_path):
  (told,) = evaluate_saved(TINY, run.workdir, "last")
  export_step(TINY, run.workdir, "last", tmp_path / "out")
  # A workdir of its own: nothing of a run is needed.
  (again,) = evaluate_saved(TINY, tmp_path / "new", str(tmp_path / "out"))
  assert (
    again.partition(": ")[2].partition(";")[0]
    == (told.partition(": ")[2].partition(";")[0])
  )
  assert _lines(tmp_path / f"new/completions_out_{SET}.jsonl") == _lines(
    run.workdir / f"completions_step_1_{SET}.jsonl"
  )


def test_a_file_of_questions_takes_the_place_of_the_sets(run, tmp_path):
  prompts = run.task.heldout[SET][:3]
  path = tmp_path / "three.jsonl"
  path.write_text(
    "".join(
      json.dumps({"question": p.text, "answer": p.answer}) + "\n"
      for p in prompts
    )
  )
  asked = vary(
    TINY,
    evaluation={"path": str(path), "samples": 2},
    task={"prompt_column": "question"},
  )
  (told,) = evaluate_saved(asked, run.workdir, "last")
  assert told.startswith("three, step_1: mean@2 ")
  lines = _lines(run.workdir / "completions_step_1_three.jsonl")
  assert [line["prompt"] for line in lines] == [p.text for p in prompts]
  assert all(len(line["completions"]) == 2 for line in lines)


def test_held_out_sets_of_another_task_are_refused(run):
  other = vary(TINY, task={"heldout_prompts": 5})
  with pytest.raises(ValueError, match=r"differs in task\.heldout_prompts"):
    evaluate_saved(other, run.workdir, "last")
