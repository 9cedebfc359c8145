"""The policy: a sharded decoder-only transformer with an explicit KV cache."""
