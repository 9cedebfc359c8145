"""The flawed teacher's statistics and the token layout of its texts."""

import dataclasses

import numpy as np
import pytest

from scalerl_jax.config import SupervisedConfig, TaskConfig
from scalerl_jax.data import chain
from scalerl_jax.data.chain import ARITHMETIC, LOGIC
from scalerl_jax.data.tasks import load_task
from scalerl_jax.data.teacher import FlawedTeacher, make_teacher

TASK = TaskConfig(
  seed=5,
  modulus=7,
  min_operations=1,
  max_operations=4,
  train_prompts=40,
  heldout_prompts=30,
)
SUPERVISED = SupervisedConfig(batch_size=300, seed=9)
BOTH = pytest.mark.parametrize(
  "operations", [ARITHMETIC, LOGIC], ids=["arithmetic", "logic"]
)


@pytest.fixture(scope="module")
def task():
  return load_task(TASK, SUPERVISED, max_prompt_tokens=6)


def test_errors_follow_the_tables():
  teacher = make_teacher(TASK, SUPERVISED, ARITHMETIC)
  operators, a, b = (grid.ravel() for grid in np.indices((3, 7, 7)))
  draws, rng = 4000, np.random.default_rng(0)
  results = np.stack(
    [teacher.step(rng, operators, a, b) for _ in range(draws)], 1
  )
  right = np.array(
    [
      (x + y, x - y, x * y)[o] % 7
      for o, x, y in zip(operators, a, b, strict=True)
    ]
  )
  wrong = results != right[:, None]
  error = teacher.error.ravel()
  # Each entry's rate is its own probability: five standard errors.
  spread = 5 * np.sqrt(error * (1 - error) / draws) + 1e-3
  assert (np.abs(wrong.mean(1) - error) < spread).all()
  favorite = results == teacher.favorite.ravel()[:, None]
  assert not (favorite & ~wrong).any()
  # Half of all errors go to the favourite, the rest evenly to 5 others.
  assert abs(favorite.sum() / wrong.sum() - 0.5) < 0.005
  often = wrong.sum(1) > 2000
  assert often.any()
  for row in np.flatnonzero(often):
    shares = np.bincount(results[row][wrong[row]], minlength=7)
    shares = shares / wrong[row].sum()
    likes = int(teacher.favorite.ravel()[row])
    assert shares[right[row]] == 0
    assert abs(shares[likes] - 0.5) < 0.06
    others = np.delete(shares, [right[row], likes])
    assert len(others) == 5
    assert np.abs(others - 0.1).max() < 0.04


@BOTH
def test_error_probabilities_are_beta(operations):
  task = dataclasses.replace(TASK, modulus=16)
  errors = np.concatenate(
    [
      make_teacher(
        dataclasses.replace(task, seed=s), SUPERVISED, operations
      ).error.ravel()
      for s in range(20)
    ]
  )
  alpha, beta = SUPERVISED.error_alpha, SUPERVISED.error_beta
  total = alpha + beta
  variance = alpha * beta / (total**2 * (total + 1))
  assert abs(errors.mean() - alpha / total) < 0.01  # four standard errors
  assert abs(errors.var() - variance) < 0.005


def test_operations_have_tables_of_their_own():
  task = dataclasses.replace(TASK, modulus=8)
  sums, bits = (
    make_teacher(task, SUPERVISED, operations)
    for operations in (ARITHMETIC, LOGIC)
  )
  operators, a, b = np.indices((3, 8, 8))
  results = np.where(operators == 0, a & b, a | b)
  results = np.where(operators == 2, a ^ b, results)
  np.testing.assert_array_equal(bits.table, results)
  assert (bits.favorite != bits.table).all()
  # Six standard deviations of the correlation of 192 independent pairs.
  shared = np.corrcoef(sums.error.ravel(), bits.error.ravel())[0, 1]
  assert abs(shared) < 6 / np.sqrt(192)


@BOTH
def test_task_seed_alone_decides_the_teacher(operations):
  first = make_teacher(TASK, SUPERVISED, operations)
  again = make_teacher(
    TASK, dataclasses.replace(SUPERVISED, seed=1), operations
  )
  other = make_teacher(
    dataclasses.replace(TASK, seed=6), SUPERVISED, operations
  )
  np.testing.assert_array_equal(first.error, again.error)
  np.testing.assert_array_equal(first.favorite, again.favorite)
  assert (first.error != other.error).all()
  assert (first.favorite != other.favorite).any()


def test_with_two_values_every_error_is_the_other_one():
  teacher = FlawedTeacher(
    table=chain.operation_table(ARITHMETIC, 2),
    error=np.ones((3, 2, 2)),
    favorite=1 - chain.operation_table(ARITHMETIC, 2),
    guess_share=0.0,
    stop_early_share=0.0,
  )
  zeros = np.zeros(500, int)
  rng = np.random.default_rng(0)
  assert (teacher.step(rng, zeros, zeros, zeros) == 1).all()


def perfect(guess_share, stop_early_share):
  table = chain.operation_table(ARITHMETIC, 7)
  return FlawedTeacher(
    table=table,
    error=np.zeros(table.shape),
    favorite=(table + 1) % 7,
    guess_share=guess_share,
    stop_early_share=stop_early_share,
  )


def test_errors_are_carried_on():
  table = chain.operation_table(ARITHMETIC, 7)
  # Wrong only at 2 + 3, always by one: 2 +3 *2 -1 gives 6, 5, 4, not 5, 3, 2.
  error = np.zeros(table.shape)
  error[0, 2, 3] = 1.0
  favorite = (table + 1) % 7
  teacher = FlawedTeacher(table, error, favorite, 0.0, 0.0)
  chains = chain.parse("2+3*2-1.:", ARITHMETIC, 7)
  seen = set()
  for seed in range(40):
    written = teacher.write(np.random.default_rng(seed), chains)
    first, second, third, held = written.values[0].tolist()
    assert first != 5
    assert second == 2 * first % 7
    assert third == held == written.answers[0] == (second - 1) % 7
    seen.add(first)
  assert 6 in seen
  assert len(seen) > 2


def test_shares_of_guesses_and_early_stops():
  rng = np.random.default_rng(0)
  chains = chain.draw_chains(rng, 40_000, ARITHMETIC, TASK)
  written = perfect(0.15, 0.2).write(np.random.default_rng(1), chains)
  values = chain.running_values(chains, ARITHMETIC, 7)
  np.testing.assert_array_equal(written.values, values)
  guesses = written.steps == 0
  assert abs(guesses.mean() - 0.15) < 0.01
  counts = np.bincount(written.answers[guesses], minlength=7)
  assert np.abs(counts / guesses.sum() - 1 / 7).max() < 0.02
  # Among chains that can be cut, a fifth is, anywhere before the last step.
  for length in (2, 3, 4):
    rows = chains.lengths == length
    cut = rows & ~guesses & (written.steps < length)
    assert abs(cut.sum() / rows.sum() - 0.2) < 0.02
    for steps in range(1, length):
      share = (written.steps[cut] == steps).mean()
      assert abs(share - 1 / (length - 1)) < 0.04
  assert (written.steps <= chains.lengths).all()
  assert set(written.steps[chains.lengths == 1]) == {0, 1}
  # Whoever does not guess answers the value reached.
  rows = np.flatnonzero(~guesses)
  reached = values[rows, written.steps[rows] - 1]
  np.testing.assert_array_equal(written.answers[rows], reached)


def test_batches_read_back_as_prompts_and_completions(task):
  batch = task.supervised_batch(0)
  assert batch.tokens.shape == batch.mask.shape == (300, 13)
  assert (batch.tokens.dtype, batch.mask.dtype) == (np.int32, np.bool_)
  kinds = set()
  for tokens, mask, length in zip(*batch, strict=True):
    prompt = task.tokenizer.decode(tokens[:6])
    chains = chain.parse(prompt, ARITHMETIC, 7)
    expected = np.zeros(13, bool)
    expected[6:length] = True
    np.testing.assert_array_equal(mask, expected)
    assert tokens[length - 1] == task.tokenizer.eos_ids[0]
    assert (tokens[length:] == task.tokenizer.pad_id).all()
    steps, answer = task.tokenizer.decode(tokens[mask]).split("=")
    assert len(answer) == 1
    assert set(steps + answer) <= set("0123456")
    assert len(steps) <= chains.lengths[0]
    assert length == 6 + len(steps) + 3
    assert not steps or answer == steps[-1]
    kinds.add((len(steps) == 0, len(steps) == chains.lengths[0]))
  assert kinds == {(True, False), (False, True), (False, False)}


@BOTH
def test_a_perfect_teacher_works_out_every_step(operations):
  modulus = {ARITHMETIC: 7, LOGIC: 8}[operations]
  supervised = dataclasses.replace(
    SUPERVISED, error_alpha=1e-9, guess_share=0.0, stop_early_share=0.0
  )
  task = load_task(
    dataclasses.replace(TASK, name=operations.name, modulus=modulus),
    supervised,
    max_prompt_tokens=6,
  )
  batch = task.supervised_batch(3)
  for tokens, mask in zip(batch.tokens, batch.mask, strict=True):
    prompt = task.tokenizer.decode(tokens[~mask][:6])
    chains = chain.parse(prompt, operations, modulus)
    values = chain.running_values(chains, operations, modulus)
    values = values[0, : chains.lengths[0]]
    text = "".join(map(str, values)) + f"={values[-1]}"
    assert task.tokenizer.decode(tokens[mask]) == text


def test_a_step_stands_at_a_constant_offset_from_its_operand(task):
  batch = task.supervised_batch(1)
  names = np.array(task.tokenizer.pieces, object)
  for tokens, mask in zip(batch.tokens, batch.mask, strict=True):
    steps = task.tokenizer.decode(tokens[mask]).index("=")
    for k in range(steps):
      assert len(names[tokens[1 + k]]) == 2  # the packed operand of step k
      assert len(names[tokens[6 + k]]) == 1  # its result, always 5 later
      assert mask[6 + k]
      assert not mask[1 + k]


def test_batches_are_addressed_and_restartable(task):
  first = [task.supervised_batch(i) for i in range(3)]
  stream = task.supervised(start=1)
  for expected in first[1:]:
    for one, other in zip(next(stream), expected, strict=True):
      np.testing.assert_array_equal(one, other)
  assert (first[0].tokens != first[1].tokens).any()
  other = dataclasses.replace(SUPERVISED, seed=10)
  other = load_task(TASK, other, max_prompt_tokens=6).supervised_batch(0)
  assert (other.tokens != first[0].tokens).any()


@BOTH
def test_no_supervised_prompt_is_held_out(operations):
  # 11 of 24 chains of one step are held out: a plain draw would meet them.
  small = dataclasses.replace(
    TASK,
    name=operations.name,
    modulus=2,
    max_operations=2,
    train_prompts=20,
    heldout_prompts=20,
  )
  task = load_task(small, SUPERVISED, max_prompt_tokens=4)
  heldout = {prompt.text for prompt in task.heldout[operations.name]}
  seen = {
    task.tokenizer.decode(row[:4])
    for index in range(10)
    for row in task.supervised_batch(index).tokens
  }
  assert len(heldout) == 20
  assert not seen & heldout
  # 84 possible prompts: everything else does occur.
  assert len(seen) == 84 - 20
