"""A run whose batches are laid out otherwise is the same run."""

import pytest

from scalerl_jax.run.train import Run
from tests.runs import TINY, metrics, shared_cache, vary

LAYOUTS = {
  "rows": {},
  "groups": {"share_prompts": True, "width_buckets": 2},
  "packed": {"packing": 24},
}


@pytest.fixture(scope="module")
def first_steps(tmp_path_factory):
  """The metrics of each layout's first step, all of the same tokens."""
  folder = tmp_path_factory.mktemp("layouts")
  with shared_cache(tmp_path_factory):
    for name, batch in LAYOUTS.items():
      config = vary(TINY, run={"steps": 2}, batch=batch)
      Run(config, folder / name).train()
  return {name: metrics(folder / name)[0] for name in LAYOUTS}


@pytest.mark.parametrize("layout", ["groups", "packed"])
def test_a_layout_does_not_change_the_numbers_of_a_step(first_steps, layout):
  plain, other = first_steps["rows"], first_steps[layout]
  assert plain["gradient_norm"] > 0
  for name in ("loss", "gradient_norm", "entropy", "kept_tokens", "ratio_mean"):
    assert other[name] == pytest.approx(plain[name], rel=1e-4, abs=1e-6), name
  assert other["flops_full"] == plain["flops_full"]


def test_shared_prompts_and_cut_rows_cost_less(first_steps):
  spent = {name: step["flops_spent"] for name, step in first_steps.items()}
  assert spent["groups"] < 0.9 * spent["rows"]
