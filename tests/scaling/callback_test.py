import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from scalerl_jax.scaling import fit, forecast, verdict
from scalerl_jax.scaling.callback import ForecastCallback

# The events of transformers 5.24 that a trainer calls on every callback.
EVENTS = (
  *("init_end", "train_begin", "epoch_begin", "step_begin", "substep_end"),
  *("pre_optimizer_step", "optimizer_step", "step_end", "prediction_step"),
  *("evaluate", "log", "save", "predict", "push_begin", "epoch_end"),
  *("train_end",),
)
STEPS = range(0, 45, 3)


@dataclasses.dataclass
class State:
  """The fields of `transformers.TrainerState` that matter here."""

  global_step: int = 0
  max_steps: int = 60
  epoch: float = 0.0
  num_input_tokens_seen: int = 0
  is_world_process_zero: bool = True
  log_history: list = dataclasses.field(default_factory=list)


class Trainer:
  """Calls callbacks as `transformers.Trainer` does: state and log included.

  `merged` is whether a metric that TRL adds in its log also shows up in the
  metrics of the evaluation, as it does since it changes them in place.
  """

  def __init__(self, callback, *, merged=True, state=None):
    self.callbacks, self.merged = [callback], merged
    self.state, self.control = state or State(), object()
    self.event("on_init_end")

  def event(self, name, **kwargs):
    for callback in self.callbacks:
      result = getattr(callback, name)(
        "args",
        self.state,
        self.control,
        model="model",
        processing_class="tokenizer",
        optimizer=None,
        lr_scheduler=None,
        train_dataloader=None,
        eval_dataloader=None,
        **kwargs,
      )
      assert result is None

  def log(self, logs):
    now = {"epoch": self.state.epoch, "step": self.state.global_step}
    self.state.log_history.append(logs | now)
    self.event("on_log", logs=logs)

  def evaluate(self, reward, name="eval_reward"):
    metrics = {"eval_loss": 0.0}
    if self.merged:
      metrics[name] = reward
    self.log(metrics | {name: reward})
    self.event("on_evaluate", metrics=metrics)

  def train(self, steps=STEPS, rate=None):
    self.event("on_train_begin")
    for step in steps:
      self.state.global_step = step
      self.state.num_input_tokens_seen = 1000 * step
      self.log({"reward": 0.5})
      self.evaluate((rate or pass_rate)(step))
    self.event("on_train_end")


def pass_rate(step):
  noise = 0.004 * np.sin(7.0 * step)
  return float(0.2 + 0.6 / (1.0 + (9.0 / max(step, 1e-9)) ** 2) + noise)


def expected(steps=STEPS, end=60_000.0):
  x, y = [1000.0 * s for s in steps], [pass_rate(s) for s in steps]
  fitted = fit.fit_curve(x, y)
  return fitted, forecast.forecast_from(fitted, end)


@pytest.mark.parametrize("merged", [True, False])
def test_forecast_is_that_of_the_points_so_far(capsys, merged):
  trainer = Trainer(ForecastCallback(), merged=merged)
  trainer.train()
  fitted, told = expected()
  record = trainer.state.log_history[-1]
  assert record["forecast/compute"] == 42_000.0
  assert record["forecast/end"] == 60_000.0  # max_steps / global_step
  assert record["forecast/mean"] == told.mean
  assert record["forecast/low"] == told.low
  assert record["forecast/high"] == told.high
  assert record["forecast/asymptote"] == fitted.params.asymptote
  assert record["forecast/identified"] == float(fitted.identified)
  assert record["step"] == 42
  json.dumps(trainer.state.log_history)  # as trainer_state.json is written
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == len(STEPS)
  assert lines[0] == "forecast: 1 evaluation, a fit needs 6"
  assert lines[-1] == (
    f"forecast: {pass_rate(42):.3f} at compute 4.2e+04; {told.mean:.3f}"
    f" [{told.low:.3f}, {told.high:.3f}] at 6e+04;"
    f" {verdict.asymptote_line(fitted)}"
  )


def test_every_event_of_a_trainer_is_answered():
  trainer = Trainer(ForecastCallback())
  for event in EVENTS:
    trainer.event(f"on_{event}")
  with pytest.raises(AttributeError, match="'teacher'"):
    _ = ForecastCallback().teacher


def test_resumed_run_knows_its_points():
  first = Trainer(ForecastCallback())
  first.train(STEPS[:8])
  saved = State(**json.loads(json.dumps(dataclasses.asdict(first.state))))
  second = Trainer(ForecastCallback(), state=saved)
  second.train(STEPS[8:])
  _, told = expected()
  assert second.state.log_history[-1]["forecast/mean"] == told.mean


def test_a_second_training_starts_anew(capsys):
  callback = ForecastCallback()
  Trainer(callback).train(STEPS[:8])
  capsys.readouterr()
  Trainer(callback).train(STEPS[:1])
  assert capsys.readouterr().out == "forecast: 1 evaluation, a fit needs 6\n"


def test_log_takes_the_record_and_nothing_is_logged_twice():
  callback = ForecastCallback(end=50_000.0, level=0.5)
  trainer = Trainer(callback)
  callback.log = trainer.log
  trainer.train()
  records = [e for e in trainer.state.log_history if "forecast/compute" in e]
  assert len(records) == len(STEPS)
  fitted, _ = expected()
  told = forecast.forecast_from(fitted, 50_000.0, 0.5)
  assert records[-1]["forecast/low"] == told.low
  kept = []
  trainer = Trainer(ForecastCallback(log=kept.append))
  trainer.train(STEPS[:3])
  assert [r["forecast/compute"] for r in kept] == [0.0, 3000.0, 6000.0]


def test_other_sets_and_other_processes_add_nothing(capsys):
  trainer = Trainer(ForecastCallback("eval_math_reward"))
  trainer.event("on_train_begin")
  trainer.state.num_input_tokens_seen = 10
  trainer.evaluate(0.3, "eval_math_reward")
  trainer.evaluate(0.9, "eval_code_reward")
  assert capsys.readouterr().out == "forecast: 1 evaluation, a fit needs 6\n"
  trainer.state.global_step += 1
  trainer.evaluate(0.4, "eval_math_reward")
  assert capsys.readouterr().out == "forecast: 2 evaluations, a fit needs 6\n"
  other = Trainer(ForecastCallback(), state=State(is_world_process_zero=False))
  other.train(STEPS[:2])
  assert capsys.readouterr().out == ""
  assert not any("forecast/compute" in e for e in other.state.log_history)


def test_compute_and_pass_rate_may_be_functions():
  callback = ForecastCallback(
    compute=lambda state: 2.0 * state.global_step,
    pass_rate=lambda reward: (reward + 1.0) / 2.0,
  )
  trainer = Trainer(callback)
  trainer.train(STEPS[:2], rate=lambda step: -0.5)
  record = trainer.state.log_history[-1]
  assert record["forecast/compute"] == 6.0
  assert record["forecast/pass_rate"] == 0.25


@pytest.mark.parametrize(
  ("settings", "rate", "sentence"),
  [
    ({"metric": "eval_acc"}, 0.5, "no 'eval_acc' in the evaluation; it has"),
    ({}, 1.7, "eval_reward must be a pass rate in [0, 1], got 1.7"),
    ({}, float("nan"), "eval_reward must be a pass rate in [0, 1], got nan"),
    ({"compute": "flops"}, 0.5, "compute (flops) must be finite"),
    ({"compute": lambda _: 0.0}, 0.5, "got 0 at step 3"),
  ],
)
def test_what_cannot_be_used_is_said_and_stops_nothing(
  capsys, settings, rate, sentence
):
  trainer = Trainer(ForecastCallback(**settings))
  trainer.train([3, 6], rate=lambda step: rate)
  out = capsys.readouterr().out
  assert sentence in out
  assert not any("forecast/compute" in e for e in trainer.state.log_history)


def test_the_same_complaint_is_made_once(capsys):
  trainer = Trainer(ForecastCallback("eval_acc"))
  trainer.train(STEPS[:4])
  assert len(capsys.readouterr().out.splitlines()) == 1


def test_without_an_end_the_asymptote_is_told(capsys):
  trainer = Trainer(ForecastCallback(), state=State(max_steps=0))
  trainer.train()
  fitted, _ = expected()
  last = capsys.readouterr().out.splitlines()[-1]
  assert last.endswith(f"give end=; {verdict.asymptote_line(fitted)}")
  assert "forecast/mean" not in trainer.state.log_history[-1]


@pytest.mark.parametrize(
  ("settings", "sentence"),
  [
    ({"level": 90.0}, "level must be in"),
    ({"end": 0.0}, "end must be a finite number above 0"),
    ({"trials": -1.0}, "trials must be a finite number above 0"),
  ],
)
def test_bad_settings_are_refused_before_training(settings, sentence):
  with pytest.raises(ValueError, match=sentence):
    ForecastCallback(**settings)


def test_importing_it_does_not_import_transformers():
  code = (
    "import sys, scalerl_jax.scaling.callback; "
    "print([m for m in ('transformers', 'trl', 'torch') if m in sys.modules])"
  )
  found = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  assert found.stdout == "[]\n"
