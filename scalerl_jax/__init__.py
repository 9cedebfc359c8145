"""ScaleRL in JAX: recipe, asynchronous pipeline and compute forecast.

Nothing heavy is imported here, so that the curve fitter starts alone.
"""

__version__ = "0.1.0"
