"""A whole run: training, evaluation, checkpoints, and what is told of them."""
