"""The mathematics again, as scalar Python loops written from the paper.

Nothing here imports JAX or the package under test: lists of floats go in and
come out, so that a test compares two derivations and not one with itself.
"""
