"""Shapes that several benchmarks share."""

from scalerl_jax.config import ModelConfig

# That of the comparison with other systems, as in `peers/workloads.py`.
PEERS = ModelConfig(
  width=256,
  num_layers=4,
  num_heads=4,
  num_kv_heads=2,
  head_width=64,
  mlp_width=768,
  qk_norm="scaled",
)
