import pytest

from scalerl_jax.scaling import columns, tables


def _table(names, count=6, **cells):
  """A table whose columns all rise, except those given."""
  records = []
  for i in range(count):
    row = {name: 0.1 * i for name in names}
    row |= {name: of[i] for name, of in cells.items()}
    records.append((i + 1, row))
  return tables.from_records("t", records)


@pytest.mark.parametrize(
  "name",
  [
    *("Compute", "total FLOPs", "GPU-Hours", "gpu hours (h)", "Steps"),
    *("train/global_step", "Step", "_step", "progress/total_tokens"),
    *("trained_tokens", "num_input_tokens_seen", "compute [FLOPs]", "Epoch"),
  ],
)
def test_usual_names_of_compute(name):
  assert columns.choose(_table([name, "pass_rate"])).compute == name


@pytest.mark.parametrize(
  "name",
  [
    *("Pass Rate", "pass_rate (%)", "eval/pass_rate", "Accuracy", "val acc"),
    *("eval/mean_at_16", "mean@16", "eval/aime24/avg@32", "pass@1", "pass_1"),
    *("eval_accuracy", "validation/accuracy", "accuracy_pct", "success rate"),
    *("val-core/x/acc/mean@4", "val/test_score/x", "eval_rewards/accuracy_re"),
    *("reward/mean", "mean_reward", "eval_reward", "critic/score/mean"),
    *("rewards/accuracy_reward/mean", "eval_aime_pass1", "reward/all/mean"),
    *("eval/accuracy/aime24", "avg@16/openai/gsm8k", "eval/all/avg_score"),
  ],
)
def test_usual_names_of_pass_rate(name):
  if name.endswith("accuracy_re"):
    name += "ward_func/mean"
  assert columns.choose(_table(["step", name])).pass_rates == (name,)


@pytest.mark.parametrize(
  "name",
  [
    *("loss", "reward/std", "eval/aime24/pass@8", "acc/pass@8"),
    *("acc/maj@8/mean", "rewards/format_reward/mean", "response_length/mean"),
    *("eval_runtime", "mean", "eval", "pass@16", "accuracy/max"),
    *("acc/best@16/mean", "reward/format", "accuracy/response_len"),
  ],
)
def test_other_names_are_no_pass_rate(name):
  with pytest.raises(tables.CurveError, match="usual name of pass_rate"):
    columns.choose(_table(["step", name]))


@pytest.mark.parametrize(
  ("names", "chosen"),
  [
    (["reward", "eval_reward"], "eval_reward"),
    (["train/accuracy", "eval/reward"], "eval/reward"),
    (["train/accuracy", "reward"], "reward"),
    (["eval/reward", "pass_rate"], "pass_rate"),
    (["eval/reward", "eval/accuracy"], "eval/accuracy"),
    (["pass_rate", "eval/pass_rate"], "eval/pass_rate"),
    (["eval/mean@4", "eval/mean@16"], "eval/mean@16"),
    (
      ["val-core/x/reward/mean@4", "val-core/x/acc/mean@4"],
      "val-core/x/acc/mean@4",
    ),
    (["critic/rewards/mean", "val/test_score/x"], "val/test_score/x"),
  ],
)
def test_held_out_rates_come_first(names, chosen):
  for order in (names, names[::-1]):
    found = columns.choose(_table(["step", *order]))
    assert found.pass_rates == (chosen,)


def test_the_first_total_beside_the_pass_rates_is_compute():
  names = ["step", "flops", "tokens", "acc"]
  assert columns.choose(_table(names)).compute == "flops"
  per_step = [3, 2, 3, 4, 5, 6]
  found = columns.choose(_table(names, flops=per_step))
  assert found.compute == "tokens"
  assert "column flops does not grow" in found.notes[1]
  constant = [4096] * 6
  assert columns.choose(_table(names, flops=constant)).compute == "tokens"
  empty = [None, None, None, None, 5, 6]
  found = columns.choose(_table(names, flops=per_step, tokens=empty))
  assert found.compute == "step"
  assert "column tokens is empty at most" in found.notes[2]


def test_totals_of_each_run_may_start_again():
  table = _table(["acc"], step=[1, 2, 3] * 2, run=list("aaabbb"))
  tokens = [10, 20, 30, 5, 15, 25]
  rows = [
    row._replace(cells={**row.cells, "tokens": t})
    for row, t in zip(table.rows, tokens, strict=True)
  ]
  table = table._replace(rows=tuple(rows), columns=(*table.columns, "tokens"))
  assert columns.choose(table, keys=["run"]).compute == "tokens"


def test_counts_of_a_step_are_no_total_by_their_name():
  names = ["step", "progress/tokens", "acc"]
  assert columns.choose(_table(names)).compute == "step"


def test_a_column_asked_for_is_taken_and_its_fall_told():
  table = _table(["step", "tokens", "x/acc"], tokens=[9, 8, 7, 6, 5, 4])
  found = columns.choose(table, compute="tokens", pass_rate="acc")
  assert found.compute == "tokens"
  assert found.pass_rates == ("x/acc",)
  assert "column tokens does not grow with the step" in found.notes


def test_a_column_asked_for_by_its_end_must_be_one():
  with pytest.raises(tables.CurveError, match="columns are step, a/acc, b/acc"):
    columns.choose(_table(["step", "a/acc", "b/acc"]), pass_rate="acc")


@pytest.mark.parametrize(
  "cells",
  [
    {"p": [0.1, 0.2, 0.3, 0.4, 0.5, 1.2]},
    {"p": [-0.1, 0.2, 0.3, 0.4, 0.5, 0.6]},
    {"p": ["a", 0.2, 0.3, 0.4, 0.5, 0.6]},
    {"p": [None] * 6},
    {"kl": [0.1] * 6},
    {"policy_loss": [0.1] * 6},
  ],
)
def test_columns_of_unusual_names_are_runs_only_if_they_can_be(cells):
  assert columns.choose(_table(["step", "p", "q"])).labels == ("p", "q")
  with pytest.raises(tables.CurveError, match="usual name of pass_rate"):
    columns.choose(_table(["step", "p", "q"], **cells))


def test_labels_are_what_columns_do_not_share():
  table = _table(["step", "eval/a/acc/mean@4", "eval/b/c/acc/mean@4"])
  found = columns.choose(table)
  assert found.labels == ("a", "b/c")
  assert found.are_tasks
  found = columns.choose(_table(["step", "a/acc", "b/acc"]))
  assert found.labels == ("a", "b")
  assert not found.are_tasks
