"""What a recorder writes and says, on a pipeline that only counts."""

import io
import json
import types

import numpy as np
import pytest

from scalerl_jax.data.tasks import load_task
from scalerl_jax.pipeline.loop import Pipeline, StepEvent, Totals
from scalerl_jax.run.accounting import Compute
from scalerl_jax.run.evaluate import Evaluation, Evaluator
from scalerl_jax.run.metrics import MetricsWriter
from scalerl_jax.run.peaks import Peak, Peaks
from scalerl_jax.run.progress import Progress
from scalerl_jax.run.recorder import CUT_STEPS, SHOWN_SAMPLES, Recorder
from scalerl_jax.sampling.work import Work
from tests.runs import TINY, curve, evaluations, metrics, vary

PROMPTS, SAMPLES = TINY.task.heldout_prompts, TINY.evaluation.samples
DEVICES = 3


class _Pipeline(Pipeline):
  """Totals, watches and published weights; nothing runs."""

  def __init__(self):
    self.totals = Totals()
    self.transport = types.SimpleNamespace(fetch=lambda: (0, self.weights))
    self.learner_watch, self.sampler_watch, self.weights_watch = (
      types.SimpleNamespace(busy_seconds=0.0, seconds={"chunk": 0.0})
      for _ in range(3)
    )
    self.weights = "those in use"


class _Evaluator(Evaluator):
  """Says what it is told to: `rates` in turn."""

  def __init__(self, rates):
    self.rates = iter(rates)
    self.params = []

  def evaluate(self, params, heldout):
    self.params.append(params)
    rate = next(self.rates)
    right = round(rate * PROMPTS * SAMPLES)
    correct = np.full(PROMPTS, right // PROMPTS, np.int32)
    correct[: right % PROMPTS] += 1
    return Evaluation(
      correct=correct,
      samples=np.full(PROMPTS, SAMPLES, np.int32),
      mean_length=np.full(PROMPTS, 5.5, np.float32),
      truncated=np.arange(PROMPTS, dtype=np.int32) % 3,
      completions=[[f"text {rate} {n}"] for n in range(len(heldout))],
      verdicts=(correct > 0)[:, None],
    )


# Of a step: six decode steps, and two micro-batches.
SAMPLED = Work(
  prefilled_rows=4,
  prefilled_tokens=20,
  prefilled_keys=100,
  decoded_slots=6 * 8,
  decoded_keys=6 * 8 * 12,
  decoded_columns=6 * 8 * 12,
)
COMPUTED = {
  "micro_batches": 2,
  "computed_logits": 16 * 11,
  "computed_tokens": 16 * 12,
  "computed_keys": 16 * 12**2,
}


class Bench:
  """A recorder whose run is moved on by hand.

  Args:
    folder: the workdir.
    rates: of the evaluations.
    config: of the run.
    second: seconds that a step takes; the clock of the test.
  """

  def __init__(self, folder, rates=(), config=TINY, second=0.5, peaks=None):
    self.folder, self.config, self.second = folder, config, second
    self.task = load_task(config.task, config.supervised, max_prompt_tokens=5)
    self.pipeline, self.evaluator = _Pipeline(), _Evaluator(rates)
    self.said = io.StringIO()
    self.writer = MetricsWriter(folder, resume_step=None)
    self.recorder = Recorder(
      config,
      folder,
      task=self.task,
      evaluator=self.evaluator,
      writer=self.writer,
      pipeline=self.pipeline,
      devices=DEVICES,
      progress=Progress(config.run.steps, "run", plain=True, stream=self.said),
      seconds_before=1000.0,
      peaks=peaks,
    )

  def step(self, step, **changes):
    """An update of 50 tokens, 40 of them kept, 60 generated."""
    totals = self.pipeline.totals
    totals.chunks += 2
    totals.decode_steps += 6
    totals.count_sampled(SAMPLED)
    totals.drawn_tokens += 48
    totals.generated_tokens += 60
    totals.prompt_tokens += 20
    totals.trained_tokens += 50
    totals.count_computed(COMPUTED)
    totals.train_seconds += self.second
    self.pipeline.learner_watch.busy_seconds += 0.25 * self.second
    self.pipeline.sampler_watch.busy_seconds += 0.75 * self.second
    self.pipeline.sampler_watch.seconds["chunk"] += 0.5 * self.second
    self.pipeline.weights_watch.busy_seconds += 0.125 * self.second
    values = {
      "loss": 0.1 * step,
      "kept_tokens": 40.0,
      "batch_tokens": 50,
      "truncated": 0.0,
      "staleness_mean": 1.0,
      "train_pass_rate": 0.4,
    }
    self.recorder.on_step(StepEvent(step, values | changes, totals, []))

  def warnings(self):
    """Lines that warn, so far."""
    lines = self.said.getvalue().splitlines()
    return [line for line in lines if line.startswith("warning")]


@pytest.fixture
def bench(tmp_path):
  """Makes benches, and closes their files."""
  made = []

  def make(*arguments, name="run", **keywords):
    made.append(Bench(tmp_path / name, *arguments, **keywords))
    return made[-1]

  yield make
  for one in made:
    one.writer.close()


def _cut(bench, shares):
  """Warnings after each step of these truncated shares."""
  counts = []
  for n, share in enumerate(shares, 1):
    bench.step(2 * n - 1, truncated=share)  # odd: never evaluated
    counts.append(len(bench.warnings()))
  return counts


LONG = vary(TINY, run={"steps": 100})


def test_mostly_cut_completions_are_warned_of_once_and_the_setting_named(bench):
  one = bench(config=LONG)
  assert CUT_STEPS == 3
  assert _cut(one, [0.6, 0.9, 0.75, 0.8, 0.9]) == [0, 0, 1, 1, 1]
  (text,) = one.warnings()
  assert "75% of the completions ran out of budget for 3 steps" in text
  assert "raise sampler.max_completion_tokens (7)" in text


def test_under_interruption_it_is_the_answer_that_is_cut(bench):
  length = {"control": "interruption", "max_thinking_tokens": 2}
  length |= {"min_thinking_tokens": 1, "answer_tokens": 1}
  one = bench(config=vary(LONG, length=length))
  assert _cut(one, [0.9] * 3)[-1] == 1
  assert "raise length.answer_tokens (1)" in one.warnings()[0]


@pytest.mark.parametrize(
  "shares",
  [
    [0.9, 0.9, 0.5, 0.9, 0.9],  # half is not mostly
    [0.5, 0.5, 0.5, 0.5],
    [0.9, 0.9, 0.1, 0.9, 0.9],  # three in a row
    [0.9, 0.9],
  ],
)
def test_less_is_not_warned_of(bench, shares):
  assert _cut(bench(config=LONG), shares)[-1] == 0


def test_a_second_streak_is_warned_of_again(bench):
  one = bench(config=LONG)
  assert _cut(one, [0.9] * 3 + [0.0] + [0.9] * 3)[-1] == 2


@pytest.mark.parametrize(
  ("every", "steps", "wanted"),
  [(2, 6, {2, 4, 6}), (4, 6, {4, 6}), (10, 3, {3}), (1, 3, {1, 2, 3})],
)
def test_evaluations_are_at_their_cadence_and_at_the_end(
  bench, every, steps, wanted
):
  config = vary(TINY, run={"steps": steps}, evaluation={"every": every})
  one = bench([0.5] * (1 + steps), config)
  one.recorder.evaluate(0)
  found = set()
  for step in range(1, steps + 1):
    one.step(step)
    if len(one.evaluator.params) > 1 + len(found):
      found.add(step)
    assert one.recorder.evaluates_at(step) == (step in found)
  assert found == wanted
  assert {int(row["step"]) for row in curve(one.folder)} == {0, *wanted}


def test_every_compute_axis_of_a_row_is_what_was_counted(bench):
  one = bench([0.25, 0.5])
  one.recorder.evaluate(0)
  one.step(1)
  one.step(2)
  start, row = curve(one.folder, without=())
  compute = Compute(
    TINY.model,
    TINY.sampler,
    TINY.batch,
    vocab_size=one.task.tokenizer.vocab_size,
  )
  totals = one.pipeline.totals
  assert row["task"] == "chain_arithmetic"
  assert int(row["trained_tokens"]) == 100
  assert int(row["generated_tokens"]) == 120
  assert float(row["flops_full"]) == compute.full(2, 100)
  assert float(row["flops_spent"]) == compute.spent(totals)
  assert float(row["device_seconds"]) == DEVICES * 2 * 0.5
  # Earlier sittings count; evaluations are in the wall's time alone.
  assert float(row["wall_seconds"]) > 1000.0
  assert float(row["pass_rate"]) == 0.5
  assert (row["prompts"], row["samples_per_prompt"]) == ("7", "4")
  assert start["step"] == "0"
  for name in ("trained_tokens", "generated_tokens", "device_seconds"):
    assert float(start[name]) == 0.0
  assert one.evaluator.params == ["those in use"] * 2
  arrays = evaluations(one.folder)
  assert arrays["chain_arithmetic/step"] == [0, 2]
  assert np.sum(arrays["chain_arithmetic/correct"], 1).tolist() == [7, 14]
  assert arrays["chain_arithmetic/truncated"][1] == [0, 1, 2, 0, 1, 2, 0]


def test_shares_and_rates_of_a_step(bench):
  one = bench(config=LONG)
  one.step(1)
  one.step(3)
  line = metrics(one.folder, without=())[1]
  assert line["step"] == 3
  assert line["loss"] == pytest.approx(0.3)
  assert line["sampler_occupancy"] == 48 / (6 * TINY.sampler.slots)
  assert line["useful_token_fraction"] == 0.8
  assert line["time/step_seconds"] == 0.5
  assert line["time/sampler_tokens_per_second"] == 60 / 0.5
  assert line["time/learner_idle_share"] == 0.75
  assert line["time/sampler_idle_share"] == 0.25
  assert line["time/device_seconds"] == DEVICES * 1.0
  assert line["time/publish_seconds"] == 0.0625
  assert "time/learner_mfu" not in line  # no peaks were measured


def test_tokens_of_replaced_groups_are_not_useful(bench):
  one = bench(config=LONG)
  one.step(1)
  one.pipeline.totals.discarded_tokens += 30
  one.step(3)
  one.step(5)
  told = [m["useful_token_fraction"] for m in metrics(one.folder)]
  assert told == [40 / 50, 40 / 80, 40 / 50]


def test_work_of_a_step_is_told_as_shares_of_what_the_machine_can_do(bench):
  rates = {"learner": 2e9, "sampler": 4e9, "copy": 8e9}
  peaks = Peaks(*(Peak(rate, lambda: 0.0, 1.0) for rate in rates.values()))
  one = bench(config=LONG, peaks=peaks)
  one.step(1)
  one.step(3)
  line = metrics(one.folder, without=())[1]
  vocab_size = one.task.tokenizer.vocab_size
  compute = Compute(TINY.model, TINY.sampler, TINY.batch, vocab_size=vocab_size)
  step = Totals(decode_steps=6)
  step.count_sampled(SAMPLED)
  step.count_computed(COMPUTED)
  busy = {"learner": 0.125, "sampler": 0.375, "copy": 0.25}
  work = {
    "learner": compute.spent_on_training(step),
    "sampler": compute.spent_on_generation(step),
    "copy": compute.decoded_bytes(step),
  }
  names = ("learner_mfu", "sampler_mfu", "sampler_bandwidth_share")
  for name, side in zip(names, rates, strict=True):
    share = work[side] / busy[side] / rates[side]
    assert 0.0 < share < 1.0
    assert line[f"time/{name}"] == pytest.approx(share)
  # What no machine can do was counted wrongly.
  one.second = 1e-9
  with pytest.raises(ValueError, match="time/learner_mfu must be a share"):
    one.step(5)


def test_a_side_without_work_in_a_step_has_no_share(bench):
  peaks = Peaks(*(Peak(1e12, lambda: 0.0, 1.0) for _ in range(3)))
  one = bench(config=LONG, peaks=peaks)
  one.step(1)
  one.pipeline.sampler_watch.busy_seconds -= 0.75 * one.second
  one.pipeline.sampler_watch.seconds["chunk"] -= 0.5 * one.second
  one.step(3)
  both, learner = metrics(one.folder, without=())
  assert both["time/sampler_mfu"] > 0.0
  assert both["time/sampler_bandwidth_share"] > 0.0
  assert learner["time/learner_mfu"] > 0.0
  assert "time/sampler_mfu" not in learner
  assert "time/sampler_bandwidth_share" not in learner


def test_what_follows_the_clock_is_under_time(bench):
  # The same run on a machine that is seven times slower.
  lines = []
  for name, second in (("quick", 0.5), ("slow", 3.5)):
    one = bench([0.3, 0.4, 0.5, 0.6], second=second, name=name)
    one.recorder.evaluate(0)
    for step in range(1, 7):
      one.step(step)
    lines.append(one.folder)
  assert metrics(lines[0]) == metrics(lines[1])
  quick, slow = (metrics(folder, without=()) for folder in lines)
  changed = {
    n for a, b in zip(quick, slow, strict=True) for n in a if (a[n] != b[n])
  }
  assert changed
  assert all(name.startswith("time/") for name in changed)


@pytest.mark.parametrize(
  ("changes", "name"),
  [
    ({"kept_tokens": 51.0}, "useful_token_fraction"),
    ({"drawn": 10_000}, "sampler_occupancy"),
  ],
)
def test_a_share_above_one_is_an_error(bench, changes, name):
  one = bench(config=LONG)
  one.pipeline.totals.drawn_tokens = changes.pop("drawn", 0)
  with pytest.raises(ValueError, match=name):
    one.step(1, **changes)


def test_the_same_prompts_are_shown_before_and_after(bench):
  one = bench([0.25, 0.5, 0.75])
  one.recorder.evaluate(0)
  for step in range(1, 5):
    one.step(step)
  rows = json.loads((one.folder / "samples.json").read_text())
  heldout = one.task.heldout["chain_arithmetic"][:SHOWN_SAMPLES]
  assert [row["prompt"] for row in rows] == [p.text for p in heldout]
  assert [row["answer"] for row in rows] == [p.answer for p in heldout]
  for n, row in enumerate(rows):
    assert row["before"] == {"text": f"text 0.25 {n}", "correct": True}
    assert row["after"] == {"text": f"text 0.75 {n}", "correct": True}


def test_the_end_is_forecast_once_there_are_points_enough(bench):
  config = vary(TINY, run={"steps": 16}, evaluation={"every": 1})
  steps = np.arange(17)
  rates = 0.2 + 0.7 / (1 + (3 / np.maximum(steps, 1e-9)) ** 2.0)
  one = bench(rates, config)
  one.recorder.evaluate(0)
  for step in range(1, 17):
    one.step(step)
  lines = metrics(one.folder)
  told = [line["step"] for line in lines if "forecast/mean" in line]
  first = told[0]
  assert 1 < first <= 8  # the first half of a run suffices
  assert told == list(range(first, 17))
  for line in lines[first - 1 :]:
    low, mean, high = (line[f"forecast/{n}"] for n in ("low", "mean", "high"))
    assert 0.0 <= low <= mean <= high <= 1.0
  # From all points the end is known: it has been measured.
  assert lines[-1]["forecast/mean"] == pytest.approx(rates[-1], abs=0.05)
  assert "forecast" in one.said.getvalue().splitlines()[-1]


def test_no_forecast_without_points(bench):
  one = bench([0.25, 0.5])
  one.recorder.evaluate(0)
  one.step(1)
  one.step(2)
  assert not any("forecast/mean" in line for line in metrics(one.folder))
  assert "pass rate 0.500" in one.said.getvalue()


def test_the_run_stops_early_where_little_is_left(bench):
  config = vary(
    TINY,
    run={"steps": 40, "early_stop_gain": 0.1},
    evaluation={"every": 1},
  )
  steps = np.arange(41)
  rates = 0.2 + 0.6 / (1 + (3 / np.maximum(steps, 1e-9)) ** 2.0)
  one = bench(rates, config)
  one.recorder.evaluate(0)
  for step in range(1, 41):
    one.step(step)
    found = one.recorder.early_stop
    if found is not None and found.stop:
      break
  assert 6 < step < 40
  assert rates[-1] - rates[step] < 0.1  # it was right
  assert found.probability >= 0.95
  lines = metrics(one.folder)
  told = [line.get("forecast/stop_probability") for line in lines]
  assert told[-1] == pytest.approx(found.probability)
  # Before that the rest was worth going on for.
  assert all(p is None or p < 0.95 for p in told[:-1])


def test_without_a_gain_asked_for_nothing_stops(bench):
  config = vary(TINY, run={"steps": 12}, evaluation={"every": 1})
  one = bench(np.full(13, 0.5), config)
  one.recorder.evaluate(0)
  for step in range(1, 13):
    one.step(step)
  assert one.recorder.early_stop is None
