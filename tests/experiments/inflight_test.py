"""The slow reference decode, on a run of seconds; the promise, on its own."""

import numpy as np
import pytest

from experiments import inflight
from scalerl_jax import config as config_lib
from tests.runs import TINY, shared_cache, vary

SHORT = vary(TINY, run={"steps": 4})


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory):
  with shared_cache(tmp_path_factory) as folder:
    yield folder


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
  """(what was found, (arguments, log-probs) of each reference decode)."""
  calls = []
  reference = inflight.reference_logps

  def remembered(*arguments):
    calls.append((arguments, reference(*arguments)))
    return calls[-1][1]

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(inflight, "get_config", lambda: SHORT)
    patch.setattr(inflight, "reference_logps", remembered)
    found = inflight.check(tmp_path_factory.mktemp("inflight") / "run")
  return found, calls


def _versions(rollout, row):
  return rollout.versions[row, : rollout.length[row]]


def test_weights_change_under_completions_and_log_probs_are_exact(checked):
  found, calls = checked
  steps, batch = SHORT.run.steps, SHORT.batch
  assert found["rollouts"] == steps * batch.completions
  assert len(calls) == steps * batch.completions
  assert found["several_versions"] > 0.0
  assert found["max_logp_gap"] <= 1e-4
  # Some of those that were decoded again had their weights switched.
  assert any(len(set(_versions(*a[1:3]))) > 1 for a, _ in calls)


def test_the_reference_is_the_slow_one(checked):
  _, calls = checked
  for (_, rollout, row, _), logps in calls:
    assert len(logps) == rollout.length[row]
    recorded = rollout.behavior_logps[row, : len(logps)]
    np.testing.assert_allclose(logps, recorded, atol=1e-4)


def test_a_switch_at_another_position_would_be_seen(checked):
  # The largest gap is a test only if wrong weights make it large.
  _, calls = checked
  (policies, rollout, row, warp), logps = next(
    call for call in calls if len(set(_versions(*call[0][1:3]))) > 1
  )
  oldest = [policies[_versions(rollout, row)[0]]] * len(policies)
  frozen = inflight.reference_logps(oldest, rollout, row, warp)
  assert np.abs(np.array(frozen) - np.array(logps)).max() > 1e-3


def test_the_config_publishes_at_every_chunk_of_three():
  config = inflight.get_config()
  assert config.sampler.chunk == 3
  assert config.pipeline.chunks_per_step == 1
  assert config.pipeline.schedule == "logical"
  assert config_lib.from_dict(config_lib.to_dict(config)) == config


@pytest.mark.slow
def test_the_promise_is_kept(tmp_path):
  found = inflight.check(tmp_path / "run")
  assert found["several_versions"] >= 0.5
  assert found["max_logp_gap"] <= 1e-4
