"""mean@n against a slow judge, with keys of its own."""

import dataclasses

import numpy as np
import pytest
from flax import nnx

from scalerl_jax.data.tasks import load_task
from scalerl_jax.models.sharding import make_mesh
from scalerl_jax.run.evaluate import Evaluation, Evaluator
from scalerl_jax.run.train import enable_compilation_cache
from scalerl_jax.sampling.sampler import Group
from scalerl_jax.types import FinishReason
from tests.helpers import compilations, moved, small_policy
from tests.runs import TINY, shared_cache

SAMPLES = TINY.evaluation.samples


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
  with shared_cache(tmp_path_factory) as folder:
    enable_compilation_cache()
    yield folder


@pytest.fixture(scope="module")
def task():
  return load_task(TINY.task, TINY.supervised, max_prompt_tokens=5)


@pytest.fixture(scope="module")
def policy(task):
  """(graph, parameters) of a policy by chance: some completions are cut."""
  mesh = make_mesh()
  made = small_policy(
    TINY.model, vocab_size=task.tokenizer.vocab_size, mesh=mesh
  )
  return nnx.split(made)


@pytest.fixture(scope="module")
def evaluator(task, policy):
  # Four of seven prompts at a time: places are used again.
  made = Evaluator(task, *policy, TINY.evaluation, TINY.sampler, make_mesh())
  made.compile(policy[1])
  return made


@pytest.fixture(scope="module")
def heldout(task):
  return task.heldout["chain_arithmetic"]


@pytest.fixture(scope="module")
def found(evaluator, policy, heldout):
  return evaluator.evaluate(policy[1], heldout)


def _assert_same(one, other):
  for field in dataclasses.fields(Evaluation):
    np.testing.assert_array_equal(
      getattr(one, field.name), getattr(other, field.name), field.name
    )


def _answer(text, modulus):
  """The right digit of a chain's prompt, by Python's own arithmetic."""
  value = int(text[0], 16)
  body = text[1:-1].rstrip(".")
  for operator, digit in zip(body[::2], body[1::2], strict=True):
    value = eval(f"({value}{operator}{int(digit, 16)}) % {modulus}")
  return f"{value:x}"


def _judged(evaluator, params, heldout):
  """(prompt, row) -> (right, length, cut, text), a completion at a time."""
  tokenizer = evaluator.task.tokenizer
  pieces = list(tokenizer.pieces)
  pieces[tokenizer.pad_id] = pieces[tokenizer.eos_ids[0]] = ""
  pieces[pieces.index("<unk>")] = "\ufffd"
  told = {}
  for n, prompt in enumerate(heldout):
    (rollout,) = evaluator._sampler.generate(
      params, 0, [Group(0, prompt.uid, 0, prompt.tokens)]
    )
    for row in range(SAMPLES):
      length = int(rollout.length[row])
      tokens = rollout.tokens[row, :length].tolist()
      ended = tokens[-1] in tokenizer.eos_ids
      assert (rollout.finish[row] == FinishReason.EOS) == ended
      assert ended or length == TINY.sampler.max_completion_tokens
      text = "".join(pieces[t] for t in tokens)
      said = text.split("=", 1)[1] if "=" in text else None
      right = ended and said == _answer(prompt.text, TINY.task.modulus)
      told[n, row] = right, length, not ended, text
  return told


def test_counts_are_those_of_a_slow_judge(evaluator, policy, heldout, found):
  told = _judged(evaluator, policy[1], heldout)
  for n in range(len(heldout)):
    right, lengths, cut, texts = zip(
      *(told[n, row] for row in range(SAMPLES)), strict=True
    )
    assert found.correct[n] == sum(right)
    assert found.truncated[n] == sum(cut)
    assert found.samples[n] == SAMPLES
    np.testing.assert_allclose(found.mean_length[n], np.mean(lengths), 1e-6)
    assert found.completions[n] == list(texts)
    assert found.verdicts[n].tolist() == list(right)
    assert found.texts[n] == texts[0]
    assert bool(found.first_correct[n]) == right[0]
  # The judges had something to disagree on.
  assert 0 < found.truncated.sum() < found.samples.sum()


def test_verdicts_stay_with_their_completions(
  task, evaluator, policy, heldout, monkeypatch
):
  # A judge that every prompt's completions divide before.
  def even(answer, text, *, ended):
    return (len(text) + ended) % 2 == 0

  told = _judged(evaluator, policy[1], heldout)
  verdicts = np.array(
    [
      [
        even(None, told[n, row][3], ended=not told[n, row][2])
        for row in range(SAMPLES)
      ]
      for n in range(len(heldout))
    ]
  )
  monkeypatch.setattr(
    evaluator, "task", dataclasses.replace(task, verifier=even)
  )
  counted = evaluator.evaluate(policy[1], heldout)
  np.testing.assert_array_equal(counted.correct, verdicts.sum(axis=1))
  np.testing.assert_array_equal(counted.first_correct, verdicts[:, 0])
  assert (verdicts[:, 0] != verdicts[:, 1]).any()


def test_a_pass_rate_is_the_mean_over_all_completions():
  counted = Evaluation(
    correct=np.array([3, 0, 1], np.int32),
    samples=np.array([4, 4, 4], np.int32),
    mean_length=np.zeros(3, np.float32),
    truncated=np.zeros(3, np.int32),
    completions=[[""] * 4] * 3,
    verdicts=np.zeros((3, 4), bool),
  )
  assert counted.pass_rate == 4 / 12


def test_every_evaluation_draws_the_same_random_numbers(
  evaluator, policy, heldout, found
):
  _assert_same(evaluator.evaluate(policy[1], heldout), found)


def test_a_prompt_is_judged_alone(evaluator, policy, heldout, found):
  # Its random numbers are its own: neither slots nor neighbours matter.
  some = [5, 2, 6]
  part = evaluator.evaluate(policy[1], [heldout[n] for n in some])
  np.testing.assert_array_equal(part.correct, found.correct[some])
  np.testing.assert_array_equal(part.truncated, found.truncated[some])
  assert part.texts == [found.texts[n] for n in some]


def test_other_parameters_are_evaluated_without_a_retrace(
  evaluator, policy, heldout, found
):
  with compilations() as seconds:
    other = evaluator.evaluate(moved(policy[1], 0.5, seed=3), heldout)
  assert not seconds
  assert other.texts != found.texts
  _assert_same(evaluator.evaluate(policy[1], heldout), found)


def test_another_seed_draws_other_random_numbers(task, policy, heldout, found):
  config = dataclasses.replace(TINY.evaluation, seed=7)
  other = Evaluator(task, *policy, config, TINY.sampler, make_mesh())
  assert other.evaluate(policy[1], heldout).texts != found.texts
