"""The paper's efficiency plot: runs of one asymptote as straight lines.

With a common A for all runs only B and C_mid are left to compare.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from jaxtyping import Bool, Float64

from scalerl_jax.scaling import compare
from scalerl_jax.scaling.curve_fit import CurveFit


class EfficiencyLine(NamedTuple):
  """ln F against ln C of one run; where `defined`, slope B and intercept 0."""

  asymptote: float
  exponent: float
  midpoint: float
  log_compute: Float64[np.ndarray, "N"]
  log_efficiency: Float64[np.ndarray, "N"]
  defined: Bool[np.ndarray, "N"]


def log_efficiency(
  pass_rate: npt.ArrayLike,
  *,
  initial: float,
  asymptote: float,
  exponent: float,
  midpoint: float,
) -> np.ndarray:
  """The logarithm of the efficiency F, whose slope in ln C is B.

  F(R) = C_mid^B / ((A − R_0)/(R − R_0) − 1), which is C^B on the law;
  ln F = B · ln C_mid + ln((R − R_0)/(A − R)), so that no power overflows.

  Args:
    pass_rate: R.
    initial: R_0, in [0, 1].
    asymptote: A, in [0, 1], above `initial`; one for all runs compared.
    exponent: B, above 0.
    midpoint: C_mid, above 0.

  Returns:
    ln F in the shape of `pass_rate`; NaN where F is undefined: R at or below
    R_0, or at or above A, as noise puts some points.

  Raises:
    ValueError: for parameters outside their domain.

  Example:
    >>> known = dict(initial=0.2, asymptote=0.6, exponent=2.0, midpoint=10.0)
    >>> at_midpoint, above = log_efficiency([0.4, 0.61], **known)
    >>> round(float(np.exp(at_midpoint / 2.0)), 4), bool(np.isnan(above))
    (10.0, True)

  Reference:
    Khatri et al., 2025, arXiv 2510.13786, section 5 (leave one out).
  """
  if not 0.0 <= initial < asymptote <= 1.0:
    raise ValueError(
      "initial and asymptote must be in [0, 1], asymptote the larger, got"
      f" {initial!r} and {asymptote!r}."
    )
  if not (0.0 < exponent < np.inf and 0.0 < midpoint < np.inf):
    raise ValueError(
      "exponent and midpoint must be finite and above 0, got"
      f" {exponent!r} and {midpoint!r}."
    )
  rate = np.asarray(pass_rate, np.float64)
  defined = (rate > initial) & (rate < asymptote)
  inner = np.where(defined, rate, 0.5 * (initial + asymptote))
  found = exponent * np.log(midpoint)
  found = found + np.log(inner - initial) - np.log(asymptote - inner)
  return np.where(defined, found, np.nan)


def efficiency_lines(
  fits: Mapping[str, CurveFit], asymptote: float | None = None
) -> dict[str, EfficiencyLine]:
  """Every run with one A held: its B, C_mid and efficiency.

  Args:
    fits: name to fit, in one unit of compute.
    asymptote: the common A, in (0, 1]; None for the mean of the fits' own.

  Returns:
    Name to line, the points in order of compute; points where F is undefined
    are NaN and not `defined`.

  Raises:
    ValueError: without fits, or for an asymptote not above a run's R_0.
  """
  if not fits:
    raise ValueError("fits must hold at least one run, got none.")
  if asymptote is None:
    asymptote = float(np.mean([f.params.asymptote for f in fits.values()]))
  lines = {}
  for name, fit in fits.items():
    initial = fit.params.initial
    if not initial < asymptote <= 1.0:
      raise ValueError(
        f"asymptote must be above R_0 of every run, and at most 1, got"
        f" {asymptote:g} where {name} starts at {initial:g}."
      )
    refit = compare.refit_exponent(
      fit.compute, fit.pass_rate, initial=initial, asymptote=asymptote
    )
    found = log_efficiency(
      fit.pass_rate,
      initial=initial,
      asymptote=asymptote,
      exponent=refit.exponent,
      midpoint=refit.midpoint,
    )
    lines[name] = EfficiencyLine(
      float(asymptote),
      refit.exponent,
      refit.midpoint,
      np.log(fit.compute),
      found,
      np.isfinite(found),
    )
  return lines
