"""Rates are medians of the steps, totals those of the last one."""

from scalerl_jax.run import throughput

METRICS = [
  {
    "step": step,
    "time/step_seconds": seconds,
    "truncated": 0.02,
    "time/learner_mfu": 0.1 * step,
    "time/publish_seconds": 0.012,
    "generated_tokens": 1000 * step,
    "discarded_groups": 3 * step,
    "loss": None,
  }
  for step, seconds in ((1, 9.0), (2, 0.5), (3, 0.25))
]


def test_rates_are_medians_and_totals_the_last_ones():
  assert throughput.rows(METRICS) == [
    ("seconds a step", "0.5", "median of steps"),
    ("learner, of the matmul rate", "20%", "median of steps"),
    ("seconds a publication", "0.012", "median of steps"),
    ("completions out of budget", "2.0%", "median of steps"),
    ("tokens generated", "3k", "whole run"),
    ("groups replaced", "9", "whole run"),
  ]


def test_a_metric_that_is_no_number_is_left_out():
  steps, values = throughput.series(METRICS, "loss")
  assert len(steps) == len(values) == 0
  assert throughput.rows([]) == []
