"""A callback for `transformers` and TRL that forecasts while they train.

It imports neither: a trainer asks of a callback only that it has the events'
methods, so that this file runs, and is tested, without them.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from scalerl_jax.scaling import fit as fit_lib
from scalerl_jax.scaling import forecast as forecast_lib
from scalerl_jax.scaling import points, verdict

_COMPUTE, _RATE = "forecast/compute", "forecast/pass_rate"


class ForecastCallback:
  """Refits the curve at each evaluation, prints and logs where it will end.

  One line an evaluation: the forecast of the end of the run with its band,
  and the asymptote or why it is not known yet. The same numbers go into
  `state.log_history`, thus into `trainer_state.json`, from which a resumed run
  takes its points again. Only the world's first process fits. What cannot be
  used is said in the line and left out: a forecast never stops a training.

  Args:
    metric: name of a pass rate in the metrics of an evaluation; TRL's
      `eval_reward` is one where rewards are 0 and 1.
    compute: field of the trainer's state that counts compute, or a function
      from the state to a number of at least 0. `num_input_tokens_seen` needs
      `include_num_input_tokens_seen` in plain `transformers`; TRL counts it.
    end: compute at the end of the run; None to scale what was used so far by
      `max_steps / global_step`.
    level: probability inside bands and intervals, in (0, 1).
    trials: samples behind each evaluation (prompts times completions), from
      which the size of its noise is expected; None when unknown.
    pass_rate: function from the metric to a pass rate in [0, 1], for rewards
      on another scale; None where the metric is one.
    log: where the record of an evaluation goes besides the printed line, as
      `trainer.log` does for every tracker the trainer knows; None for
      `state.log_history` alone. May be set after the trainer is made.

  Raises:
    ValueError: for a level outside (0, 1), or an end or trials that are not
      above 0.

  Example:
    >>> from types import SimpleNamespace
    >>> callback = ForecastCallback("eval_reward", compute="total_flos", end=64)
    >>> state = SimpleNamespace(
    ...   global_step=0, max_steps=0, epoch=0.0, log_history=[], total_flos=0
    ... )
    >>> for flos in range(0, 33, 4):  # doctest: +ELLIPSIS
    ...   state.total_flos = state.global_step = flos
    ...   rate = 0.2 + 0.6 / (1 + (8 / max(flos, 1e-9)) ** 2)
    ...   evaluated = {"eval_reward": rate}
    ...   callback.on_evaluate(None, state, None, metrics=evaluated)
    forecast: 1 evaluation, a fit needs 6
    forecast: 2 evaluations, a fit needs 6
    forecast: 3 evaluations, a fit needs 6
    forecast: 4 evaluations, a fit needs 6
    forecast: 5 evaluations, a fit needs 6
    ...
    >>> round(state.log_history[-1]["forecast/mean"], 2)  # the law: 0.791
    0.79

    With a trainer, which runs the loop above itself::

      callback = ForecastCallback("eval_reward", trials=256 * 8)
      trainer = GRPOTrainer(..., callbacks=[callback])
      callback.log = trainer.log

  Reference:
    `transformers.TrainerCallback`, whose events pass `args, state, control`
    by position and all else by keyword (checked with 5.24); TRL 1.16 puts
    rewards into the metrics of an evaluation, older ones into its log alone.
  """

  def __init__(
    self,
    metric: str = "eval_reward",
    *,
    compute: str | Callable[[Any], float] = "num_input_tokens_seen",
    end: float | None = None,
    level: float = 0.9,
    trials: float | None = None,
    pass_rate: Callable[[float], float] | None = None,
    log: Callable[[dict[str, float]], Any] | None = None,
  ):
    if not 0.0 < level < 1.0:
      raise ValueError(f"level must be in (0, 1), got {level!r}.")
    for name, value in (("end", end), ("trials", trials)):
      if value is not None and not 0.0 < value < math.inf:
        raise ValueError(
          f"{name} must be a finite number above 0, or None, got {value!r}."
        )
    self.log = log
    self._metric, self._compute, self._end = metric, compute, end
    self._level, self._trials, self._pass_rate = level, trials, pass_rate
    self._points: list[tuple[float, float]] = []
    self._read = 0  # entries of the log that were looked at
    self._told: set[str] = set()

  def __getattr__(self, name: str) -> Callable[..., None]:
    """Events of a trainer, of any version, that are not answered here."""
    if name.startswith("on_"):
      return lambda *args, **kwargs: None
    raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")

  def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any):
    """Takes the points of the run so far from the log that it resumes with."""
    del args, control, kwargs
    self._points = [
      (entry[_COMPUTE], entry[_RATE])
      for entry in state.log_history
      if _COMPUTE in entry and _RATE in entry
    ]
    self._read = len(state.log_history)

  def on_evaluate(
    self,
    args: Any,
    state: Any,
    control: Any,
    metrics: Mapping[str, Any] | None = None,
    **kwargs: Any,
  ):
    """Adds the evaluation to the curve and forecasts the end of the run."""
    del args, control, kwargs
    if not getattr(state, "is_world_process_zero", True):
      return
    point = self._point(state, metrics or {})
    self._read = len(state.log_history)
    if point is None:
      return
    self._points.append(point)
    record = {_COMPUTE: point[0], _RATE: point[1]}
    x, y = np.array(self._points, np.float64).T
    if points.enough(x):
      record |= self._forecast(x, y, state)
    else:
      count = f"{len(x)} evaluation{'s' if len(x) > 1 else ''}"
      needs = f"{points.FEWEST_POINTS}"
      if len(x) >= points.FEWEST_POINTS:
        needs = f"{points.FEWEST_COMPUTES} different values of compute above 0"
      print(f"forecast: {count}, a fit needs {needs}")
    if self.log is not None:
      self.log(dict(record))
    if not any(e.get(_COMPUTE) == point[0] for e in self._new(state)):
      now = {"epoch": state.epoch, "step": state.global_step}
      state.log_history.append(record | now)
    self._read = len(state.log_history)

  def _new(self, state: Any) -> list[Mapping[str, Any]]:
    """What was logged since the last evaluation."""
    return state.log_history[self._read :]

  def _point(self, state, metrics) -> tuple[float, float] | None:
    """Compute and pass rate of this evaluation, or None and why not."""
    found = dict(metrics)
    for entry in self._new(state):
      if entry.get("step") == state.global_step:
        found |= entry
    if found.get(self._metric) is None:
      if not self._points:  # another held-out set's turn, once there are some
        listed = ", ".join(sorted(map(str, found)))
        self._say(f"no {self._metric!r} in the evaluation; it has {listed}")
      return None
    value = float(found[self._metric])
    rate = float(self._pass_rate(value)) if self._pass_rate else value
    if not 0.0 <= rate <= 1.0:
      self._say(
        f"{self._metric} must be a pass rate in [0, 1], got {rate:g}; give "
        "pass_rate=, a function that makes it one. Such evaluations are left "
        "out"
      )
      return None
    if callable(self._compute):
      compute = float(self._compute(state))
    else:
      compute = float(getattr(state, self._compute, math.nan))
    if not 0.0 <= compute < math.inf or (compute == 0 and state.global_step):
      self._say(
        f"compute ({self._compute}) must be finite and above 0 after the first "
        f"step, got {compute:g} at step {state.global_step}; name another "
        "field of the trainer's state, such as global_step"
      )
      return None
    return compute, rate

  def _say(self, sentence: str) -> None:
    """Prints once what would be the same at each evaluation."""
    if sentence not in self._told:
      print(f"forecast: {sentence}.")
    self._told.add(sentence)

  def _forecast(self, x, y, state) -> dict[str, float]:
    fit = fit_lib.fit_curve(x, y, trials=self._trials)
    known = verdict.asymptote_line(fit, self._level)
    low, high = fit.intervals(self._level)["asymptote"]
    record = {
      "forecast/asymptote": fit.params.asymptote,
      "forecast/asymptote_low": low,
      "forecast/asymptote_high": high,
      "forecast/identified": float(fit.identified),
    }
    end = self._end
    if end is None and state.global_step and state.max_steps > 0:
      end = x[-1] * state.max_steps / state.global_step
    now = f"forecast: {y[-1]:.3f} at compute {x[-1]:.4g}"
    if end is None:
      print(f"{now}; no end to forecast: give end=; {known}")
      return record
    told = forecast_lib.forecast_from(fit, float(end), self._level)
    print(
      f"{now}; {told.mean:.3f} [{told.low:.3f}, {told.high:.3f}] at "
      f"{end:.4g}; {known}"
    )
    return record | {
      "forecast/end": float(end),
      "forecast/mean": told.mean,
      "forecast/low": told.low,
      "forecast/high": told.high,
    }
