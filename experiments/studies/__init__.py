"""What `experiments.study` is made of: axes, runs, fits, table and figure."""
