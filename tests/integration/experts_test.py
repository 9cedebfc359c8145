"""A whole run of a policy with experts: the same on shared experts."""

import jax
import numpy as np
import pytest

from scalerl_jax.run.train import Run
from tests.runs import TINY, metrics, shared_cache, vary

MIXTURE = vary(
  TINY,
  run={"steps": 3},
  model={
    "num_experts": 4,
    "experts_per_token": 2,
    "expert_width": 12,
    "router": "softmax_chosen",
  },
)


@pytest.mark.slow
def test_a_run_learns_the_same_when_devices_share_the_experts(
  tmp_path, tmp_path_factory
):
  told = []
  with shared_cache(tmp_path_factory):
    for ways in (1, 2):
      folder = tmp_path / str(ways)
      run = Run(vary(MIXTURE, pipeline={"expert": ways}), folder)
      run.train()
      weights = run.learner.state.params["layers"]["expert_up"][...]
      held = {shard.data.shape for shard in weights.addressable_shards}
      assert held == {(1, 4 // ways, 16, 12)}
      told.append(metrics(folder))
      # The sampler, on its own mesh, knows what the learner will find.
      assert told[-1][0]["logp_gap_max"] < 1e-4
  assert len(jax.devices()) == 8
  for one, two in zip(*told, strict=True):
    for name in ("loss", "gradient_norm", "logp_gap_max", "kept_tokens"):
      np.testing.assert_allclose(one[name], two[name], rtol=1e-4, atol=1e-5)
