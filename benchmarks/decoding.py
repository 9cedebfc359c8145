"""What the sampler's choices are worth: `python -m benchmarks.decoding`.

One JSON line a figure, as ratios within one run, at the shape of the
comparison with other systems (`peers/workloads.py`). Run it on a quiet machine.
"""

import dataclasses
import time

from scalerl_jax.run.host import prepare_cpu

prepare_cpu()

import jax  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402

from benchmarks.bench import median, tell  # noqa: E402
from benchmarks.shapes import PEERS  # noqa: E402
from scalerl_jax.config import SamplerConfig  # noqa: E402
from scalerl_jax.models.policy import Policy  # noqa: E402
from scalerl_jax.models.sharding import make_mesh  # noqa: E402
from scalerl_jax.sampling.sampler import Group, Sampler  # noqa: E402
from scalerl_jax.types import Rollout  # noqa: E402

REPEATS = 5
VOCABULARY = 1024


def make_policy():
  """A random policy on both devices."""
  mesh = make_mesh(jax.devices())
  policy = Policy(PEERS, vocab_size=VOCABULARY, rngs=nnx.Rngs(0), mesh=mesh)
  return mesh, *nnx.split(policy)


def timed(sampler: Sampler, params, groups: list[Group]) -> dict[str, float]:
  """Median seconds of entering and of writing all tokens.

  Args:
    sampler: empty, with room for all groups.
    params: of the policy.
    groups: that enter at once.
  """
  seconds: dict[str, list[float]] = {"prefill": [], "decode": []}
  for _ in range(1 + REPEATS):
    start = time.perf_counter()
    sampler.insert(params, 0, groups)
    jax.block_until_ready(sampler.state)
    entered = time.perf_counter()
    while sampler.busy:
      sampler.start_chunk(params, 0)
      sampler.finished()
    seconds["prefill"].append(entered - start)
    seconds["decode"].append(time.perf_counter() - entered)
  return {name: median(found[1:]) for name, found in seconds.items()}


def rows(rollouts: list[Rollout], name: str) -> np.ndarray:
  """An array of all completions, one a row."""
  return np.concatenate([getattr(r, name) for r in rollouts])


def first_difference(left: np.ndarray, right: np.ndarray) -> np.ndarray:
  """Columns before the first token in which two completions differ."""
  return np.where(
    (left != right).any(axis=1), (left != right).argmax(axis=1), left.shape[1]
  )


def sharing() -> None:
  """256 completions of 256-token prompts: groups of 16, or everybody alone.

  Both draw with the same random numbers, so tokens are the same and only the
  work differs.
  """
  mesh, graph, params = make_policy()
  config = SamplerConfig(
    slots=256, chunk=32, max_prompt_tokens=256, max_completion_tokens=64
  )
  rng = np.random.default_rng(0)
  prompts = rng.integers(0, VOCABULARY, (16, 256)).astype(np.int32)
  settings = {"eos_ids": (VOCABULARY,), "seed": 0, "mesh": mesh}
  together = Sampler(graph, params, config, group_size=16, **settings)
  alone = Sampler(graph, params, config, group_size=1, **settings)
  groups = [Group(i, i, 0, prompt) for i, prompt in enumerate(prompts)]
  singles = [
    Group(16 * i + j, i, j, prompt)
    for i, prompt in enumerate(prompts)
    for j in range(16)
  ]
  shared, single = (
    sampler.generate(params, 0, work)
    for sampler, work in ((together, groups), (alone, singles))
  )
  tokens, others = rows(shared, "tokens"), rows(single, "tokens")
  same = np.arange(tokens.shape[1]) < first_difference(tokens, others)[:, None]
  gap = np.abs(rows(shared, "behavior_logps") - rows(single, "behavior_logps"))[
    same
  ].max()
  fast, slow = timed(together, params, groups), timed(alone, params, singles)
  tell(
    "sharing",
    prefilled_tokens_ratio=len(singles) / len(groups),
    prefill_seconds_ratio=slow["prefill"] / fast["prefill"],
    decode_seconds_ratio=slow["decode"] / fast["decode"],
    largest_logp_gap=float(gap),
    share_of_tokens_compared=float(same.mean()),
  )


def kv_dtype() -> None:
  """Keys and values in bfloat16 against float32: time and log-prob error."""
  mesh, graph, params = make_policy()
  config = SamplerConfig(
    slots=256, chunk=32, max_prompt_tokens=32, max_completion_tokens=128
  )
  rng = np.random.default_rng(0)
  groups = [
    Group(i, i, 0, rng.integers(0, VOCABULARY, 32).astype(np.int32))
    for i in range(256)
  ]
  found, seconds = [], []
  for dtype in ("float32", "bfloat16"):
    sampler = Sampler(
      graph,
      params,
      dataclasses.replace(config, kv_dtype=dtype),
      group_size=1,
      eos_ids=(VOCABULARY,),
      seed=0,
      mesh=mesh,
    )
    found.append(sampler.generate(params, 0, groups))
    seconds.append(timed(sampler, params, groups)["decode"])
  tokens, others = (rows(rollouts, "tokens") for rollouts in found)
  same = np.arange(tokens.shape[1]) < first_difference(tokens, others)[:, None]
  gap = np.abs(
    rows(found[0], "behavior_logps") - rows(found[1], "behavior_logps")
  )[same]
  tell(
    "kv_dtype",
    bfloat16_decode_seconds_ratio=seconds[1] / seconds[0],
    largest_logp_gap=float(gap.max()),
    mean_logp_gap=float(gap.mean()),
    share_of_tokens_compared=float(same.mean()),
  )


if __name__ == "__main__":
  sharing()
  kv_dtype()
