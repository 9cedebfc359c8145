"""The train step: filter, advantages and weights of the whole batch, then
micro-batches of the rows that are left, then one update.

The loss is `sum(weights * token_loss)` and the weights are made before
micro-batching and sharding, so neither can change it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float

from scalerl_jax.config import LossConfig
from scalerl_jax.learning.buckets import (
  Bucket,
  fill_buckets,
  layout,
  row_lengths,
)
from scalerl_jax.learning.packing import trained_rows, unpack
from scalerl_jax.learning.scoring import (
  CUT_LOGP,
  Warp,
  completion_logps,
  group_logps,
  row_logps,
)
from scalerl_jax.models.policy import Policy
from scalerl_jax.models.sharding import constrain
from scalerl_jax.objectives import clipping, losses
from scalerl_jax.objectives.advantages import group_advantages
from scalerl_jax.objectives.aggregation import aggregation_weights
from scalerl_jax.types import Batch, Packed

# name -> (logps [B, T], batch, advantages [B], the config's section) -> token
# losses [B, T]. A new loss is a line here.
TokenLoss = Callable[[Array, Batch, Array, LossConfig], Array]
LOSSES: dict[str, TokenLoss] = {
  "cispo": lambda logps, batch, advantages, config: losses.cispo_loss(
    logps, batch.behavior_logps, advantages, clip_max=config.clip_max
  ),
  "clipped_surrogate": lambda logps, batch, advantages, config: (
    losses.clipped_surrogate_loss(
      logps,
      batch.behavior_logps,
      advantages,
      clip_low=config.clip_low,
      clip_high=config.clip_high,
    )
  ),
  "gspo": lambda logps, batch, advantages, config: losses.gspo_loss(
    logps,
    batch.behavior_logps,
    advantages,
    batch.mask,
    clip_low=config.clip_low,
    clip_high=config.clip_high,
  ),
  "reinforce": lambda logps, batch, advantages, config: losses.reinforce_loss(
    logps, advantages
  ),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class LearnerState:
  """What an update changes; donated from step to step."""

  params: nnx.State  # float32
  optimizer: Any  # optax state
  step: Any  # int32 [], updates asked for, skipped ones included


@dataclasses.dataclass(frozen=True)
class TrainSettings:
  """What the compiled step depends on besides shapes."""

  policy: Any  # nnx.GraphDef
  optimizer: optax.GradientTransformation
  loss: LossConfig
  warp: Warp  # the sampler's
  group_size: int
  micro_batch: int
  max_completion_tokens: int
  packing: int = 0  # tokens of a row that completions share; 0: a row each
  width_buckets: int = 1  # widths that a row may be padded to
  share_prompts: bool = False  # a prompt is computed once for its group


def global_weights(
  batch: Batch, settings: TrainSettings
) -> tuple[Float[Array, " B"], Float[Array, "B T"], Bool[Array, " B"]]:
  """Advantages, aggregation weights and rows kept, of the whole batch."""
  loss = settings.loss
  keep = trained_rows(
    batch.mask,
    batch.correct,
    group_size=settings.group_size,
    # What `refill` could not replace is dropped.
    drop=loss.zero_variance != "keep",
  )
  advantages = group_advantages(
    batch.rewards,
    group_size=settings.group_size,
    normalization=loss.normalization,
    keep=keep,
  )
  weights = aggregation_weights(
    batch.mask & keep[:, None],
    group_size=settings.group_size,
    how=loss.aggregation,
    max_tokens=(
      settings.max_completion_tokens if loss.aggregation == "constant" else None
    ),
  )
  return advantages, weights, keep


def _check_groups(batch: Batch, settings: TrainSettings) -> None:
  """Raises where the prompts of a batch cannot be shared."""
  width, most = batch.mask.shape[1], settings.max_completion_tokens
  for holds, told in (
    (batch.packed is None, "packing must be 0, got a packed batch"),
    (
      batch.prompt_length is not None,
      "prompt_length must say where prompts end, got None: `collate` sets it",
    ),
    (
      settings.micro_batch % settings.group_size == 0,
      f"micro_batch must be a multiple of the groups of {settings.group_size},"
      f" got {settings.micro_batch}",
    ),
    (
      0 < most < width,
      f"max_completion_tokens must be below the {width} tokens of a row, got"
      f" {most}",
    ),
  ):
    if not holds:
      raise ValueError(f"with share_prompts {told}")


def step_buckets(batch: Batch, settings: TrainSettings) -> tuple[Bucket, ...]:
  """The shapes of micro-batch of a step, the widest first."""
  rows, width = batch.mask.shape
  shared = 0
  if settings.share_prompts:
    _check_groups(batch, settings)
    shared = settings.group_size
  prompt = width - settings.max_completion_tokens if shared else 0
  packed: Packed | None = batch.packed
  return layout(
    rows=rows,
    prompt=prompt,
    completion=width - prompt,
    micro_batch=settings.micro_batch,
    width_buckets=settings.width_buckets,
    packing=0 if packed is None else packed.tokens.shape[1],
    shared=shared,
  )


def train_step(
  state: LearnerState, batch: Batch, *, settings: TrainSettings
) -> tuple[LearnerState, dict[str, Array]]:
  """One update from one batch; a batch with nothing kept is skipped.

  Rows that the filter dropped are not computed at all: kept rows are moved to
  the front and only as many micro-batches run as they fill, of each width that
  there is. A packed batch has only kept completions in its rows, and
  micro-batches are of these rows.

  Args:
    state: donated.
    batch: B rows, groups adjacent; packed or not.
    settings: static.

  Returns:
    The new state and scalar metrics of the batch, float32; `micro_batches`
    has one for each of `step_buckets`.

  Raises:
    ValueError: `settings.micro_batch` does not divide the rows, or prompts are
      to be shared and cannot be.
  """
  total, length = batch.mask.shape
  if total % settings.micro_batch:
    raise ValueError(
      f"micro_batch must divide the {total} rows of the batch, got"
      f" {settings.micro_batch}"
    )
  advantages, weights, keep = global_weights(batch, settings)
  kept = keep.sum(dtype=jnp.float32)
  packed: Packed | None = batch.packed
  buckets = step_buckets(batch, settings)
  lengths = row_lengths(batch.segment_ids)
  filled = jnp.sum(lengths * keep, dtype=jnp.float32)
  # What is computed together: a row, or a group and its prompt.
  unit = buckets[0].group_size
  learnt = keep.reshape(-1, unit).any(axis=1)
  if settings.share_prompts:
    asked = batch.prompt_length
    # A row that is masked out is cut where its group is.
    lengths = jnp.where(keep, lengths - asked, 0).reshape(-1, unit).max(axis=1)
    filled -= jnp.sum(asked * keep, dtype=jnp.float32)
    filled += jnp.sum(asked[::unit] * learnt, dtype=jnp.float32)
  if packed is None:
    order, counts = fill_buckets(lengths, learnt, buckets)
  else:
    order = jnp.arange(total, dtype=jnp.int32)
    size = settings.micro_batch
    counts = ((packed.row.max() + size) // size,)
  chunk = settings.loss.logprob_chunk

  def rows(values: Array, index: Array, width: int) -> Array:
    picked = jnp.take(values, index, axis=0)
    if picked.ndim > 1:
      picked = picked[:, :width]
    return constrain(picked, ("batch",) + (None,) * (picked.ndim - 1))

  def objective(
    params: nnx.State, index: Array, shown: Array, bucket: Bucket
  ) -> tuple[Array, dict]:
    policy: Policy = nnx.merge(settings.policy, params)
    if settings.share_prompts:
      member = jnp.arange(unit, dtype=jnp.int32)[None]
      index = (index[:, None] * unit + member).reshape(-1)
      shown = jnp.repeat(shown, unit)
    cut = length if settings.share_prompts else bucket.width
    pick = functools.partial(rows, index=index, width=cut)
    if packed is None:
      part = jax.tree.map(pick, batch)
      pushes = pick(advantages)
      scores = (
        group_logps(
          policy,
          part,
          settings.warp,
          group_size=unit,
          prompt=bucket.prompt,
          width=bucket.width,
          chunk=chunk,
        )
        if settings.share_prompts
        else completion_logps(policy, part, settings.warp, chunk=chunk)
      )
      # A row that fills up the last micro-batch may have had its turn.
      shares = jnp.where(shown[:, None], pick(weights), 0.0)
      counted = part.mask & (pick(keep) & shown)[:, None]
    else:
      # Only the forward pass is over packed rows. Of the loss, which costs
      # nothing beside it, all completions are given and these rows' count.
      part, pushes = batch, advantages
      tokens, segments = pick(packed.tokens), pick(packed.segment_ids)
      scores = row_logps(policy, tokens, segments, settings.warp, chunk=chunk)
      scores, here = unpack(scores, packed, first=index[0], length=length)
      shares = jnp.where(here[:, None], weights, 0.0)
      counted = batch.mask & (keep & here)[:, None]
    logps, spread = scores
    token_loss = LOSSES[settings.loss.name](logps, part, pushes, settings.loss)
    loss = jnp.sum(shares * token_loss)
    return loss, _sums(logps, spread, part, counted, pushes, settings.loss)

  def accumulate(m: Array, carry: tuple, first: Array, bucket: Bucket) -> tuple:
    gradients, loss, sums = carry
    first += m * bucket.rows
    index = jax.lax.dynamic_slice_in_dim(order, first, bucket.rows)
    shown = first + jnp.arange(bucket.rows, dtype=jnp.int32) < ready
    (part, part_sums), gradient = jax.value_and_grad(objective, has_aux=True)(
      state.params, index, shown, bucket
    )
    return (
      jax.tree.map(jnp.add, gradients, gradient),
      loss + part,
      _merge(sums, part_sums),
    )

  zeros = jax.tree.map(jnp.zeros_like, state.params)
  summed = zeros, jnp.zeros(()), _no_sums()
  first, ready = jnp.int32(0), learnt.sum(dtype=jnp.int32)
  for bucket, count in zip(buckets, counts, strict=True):
    body = functools.partial(accumulate, first=first, bucket=bucket)
    summed = jax.lax.fori_loop(0, count, body, summed)
    first += count * bucket.rows
  gradients, loss, sums = summed
  norm = optax.tree.norm(gradients)

  def apply() -> tuple[nnx.State, Any]:
    updates, optimizer = settings.optimizer.update(
      gradients, state.optimizer, state.params
    )
    params = optax.apply_updates(state.params, updates)
    return cast(nnx.State, params), optimizer

  params, optimizer = jax.lax.cond(
    kept > 0, apply, lambda: (state.params, state.optimizer)
  )
  tokens = jnp.maximum(sums["tokens"], 1.0)
  metrics = {
    "loss": loss,
    "gradient_norm": norm,
    "skipped": (kept == 0).astype(jnp.float32),
    "effective_batch": kept,
    "micro_batches": jnp.stack(counts).astype(jnp.float32),
    "row_tokens": filled,
    "kept_tokens": sums["tokens"],
    "entropy": sums["entropy"] / tokens,
    "ratio_mean": jnp.where(kept > 0, sums["ratio"] / tokens, 1.0),
    "ratio_max": jnp.where(kept > 0, sums["ratio_max"], 1.0),
    "ratio_min": jnp.where(kept > 0, sums["ratio_min"], 1.0),
    "clip_fraction": sums["clipped"] / tokens,
    "behavior_kl": sums["kl"] / tokens,
    "logp_gap_mean": sums["gap"] / tokens,
    "logp_gap_max": sums["gap_max"],
  }
  state = LearnerState(params=params, optimizer=optimizer, step=state.step + 1)
  return state, metrics


_SUMS = ("tokens", "entropy", "ratio", "clipped", "kl", "gap")


def _no_sums() -> dict[str, Array]:
  sums = {name: jnp.zeros(()) for name in _SUMS}
  return sums | {
    "ratio_max": jnp.zeros(()),
    "ratio_min": jnp.full((), jnp.inf),
    "gap_max": jnp.zeros(()),
  }


def _merge(left: dict[str, Array], right: dict[str, Array]) -> dict:
  merged = {name: left[name] + right[name] for name in _SUMS}
  for name in ("ratio_max", "gap_max"):
    merged[name] = jnp.maximum(left[name], right[name])
  merged["ratio_min"] = jnp.minimum(left["ratio_min"], right["ratio_min"])
  return merged


def _clipped(
  logps: Float[Array, "B T"],
  ratio: Float[Array, "B T"],
  batch: Batch,
  advantages: Float[Array, " B"],
  config: LossConfig,
) -> Bool[Array, "B T"]:
  """Tokens that the loss has clipped; none for REINFORCE, which has no clip."""
  if config.name == "cispo":
    return clipping.above_cap(ratio, clip_max=config.clip_max)
  if config.name == "gspo":
    sequence = losses.sequence_ratio(logps, batch.behavior_logps, batch.mask)
    ratio = jnp.broadcast_to(sequence[:, None], ratio.shape)
  if config.name in ("gspo", "clipped_surrogate"):
    return clipping.outside_clip(
      ratio,
      advantages,
      clip_low=config.clip_low,
      clip_high=config.clip_high,
    )
  return jnp.zeros(ratio.shape, bool)


def _sums(
  logps: Float[Array, "B T"],
  spread: Float[Array, "B T"],
  batch: Batch,
  counted: Bool[Array, "B T"],
  advantages: Float[Array, " B"],
  config: LossConfig,
) -> dict[str, Array]:
  """Sums and extremes over the counted tokens of a micro-batch."""
  logps = jax.lax.stop_gradient(logps)
  ratio = losses.token_ratio(logps, batch.behavior_logps)
  # A token that the newer policy cuts has no log-prob to compare.
  known = logps > CUT_LOGP
  gap = jnp.where(known, jnp.abs(logps - batch.behavior_logps), 0.0)

  def total(values: Array) -> Array:
    return jnp.sum(jnp.where(counted, values, 0.0))

  return {
    "tokens": counted.sum(dtype=jnp.float32),
    "entropy": total(spread),
    "ratio": total(ratio),
    "clipped": total(
      _clipped(logps, ratio, batch, advantages, config).astype(jnp.float32)
    ),
    "kl": total(losses.behavior_kl(logps, batch.behavior_logps)),
    "gap": total(gap),
    "ratio_max": jnp.max(jnp.where(counted, ratio, 0.0)),
    "ratio_min": jnp.min(jnp.where(counted, ratio, jnp.inf)),
    "gap_max": jnp.max(jnp.where(counted, gap, 0.0)),
  }
