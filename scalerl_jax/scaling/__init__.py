"""Curves of pass rate against compute: laws, fits, bands and forecasts.

Usable alone: numpy, jax and scipy, and nothing of the training program.
"""
