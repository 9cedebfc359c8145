"""The points of a curve as the fitter takes them: checked and windowed.

What a curve tells about R_0 is decided here; reading files is `curves.py`.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64

from scalerl_jax.scaling import posterior

FEWEST_POINTS = 6
FEWEST_COMPUTES = 4
MOST_POINTS = 1024
# R_0's prior sd about the first evaluation, when compute 0 was not evaluated.
_INITIAL_SD = 0.03
# The sd that stands for "given exactly", and for "measured, so prior is moot".
_EXACT_SD, _MOOT_SD = 1e-9, 1.0
# Weight of a given R_0 in least squares, in points.
_EXACT_WEIGHT = 1e12


class Chosen(NamedTuple):
  """The points to fit, in order of compute, and what is known of R_0."""

  compute: Float64[np.ndarray, "N"]  # Above 0.
  pass_rate: Float64[np.ndarray, "N"]
  noise: Float64[np.ndarray, "N"]  # Shape of the noise variance.
  initial: posterior.Initial
  initial_weight: float | None  # In points; None for a prior only.
  noise_prior: tuple[float, float]  # Centre and sd of ln noise.
  binomial: bool  # Whether `noise` goes with p(1−p).


def bernoulli(pass_rate: npt.ArrayLike) -> np.ndarray:
  """p(1−p), kept away from 0 where a finite sample shows 0 or 1."""
  p = np.clip(pass_rate, 0.02, 0.98)
  return p * (1.0 - p)


def enough(compute: Float64[np.ndarray, "N"]) -> bool:
  """Whether a fit can be made: 6 points, at 4 values of compute above 0."""
  different = len(np.unique(compute[compute > 0]))
  return len(compute) >= FEWEST_POINTS and different >= FEWEST_COMPUTES


def _checked(compute, pass_rate, trials):
  """The three as float64 arrays in order of compute, or one sentence."""
  x, y = np.asarray(compute, np.float64), np.asarray(pass_rate, np.float64)
  if x.ndim != 1 or x.shape != y.shape:
    raise ValueError(
      "compute and pass_rate must be two lists of the same length, got "
      f"shapes {x.shape} and {y.shape}."
    )
  for name, values, rule, good in (
    ("compute", x, "finite and at least 0", np.isfinite(x) & (x >= 0)),
    ("pass_rate", y, "in [0, 1]", (y >= 0) & (y <= 1)),
  ):
    if not good.all():
      first = int(np.argmin(good))
      raise ValueError(
        f"{name} must be {rule}, got {values[first]} at index {first}; drop "
        "such points, and divide percents by 100."
      )
  n = np.full_like(x, np.nan)
  if trials is not None:
    n = np.asarray(trials, np.float64)
    if n.ndim > 1 or (n.ndim and n.shape != x.shape) or not (n >= 1).all():
      raise ValueError(
        "trials must be one number of samples, or one for each point, at "
        f"least 1, got {trials!r}."
      )
    n = np.broadcast_to(n, x.shape)
  order = np.argsort(x, kind="stable")
  return x[order], y[order], n[order]


def _thinned(x, y, noise):
  """Neighbours averaged until at most `MOST_POINTS` points are left."""
  size = -(-len(x) // MOST_POINTS)
  if size == 1:
    return x, y, noise
  starts = np.arange(0, len(x), size)
  count = np.diff(np.append(starts, len(x)))

  def mean(values):
    return np.add.reduceat(values, starts) / count

  return np.exp(mean(np.log(x))), mean(y), mean(noise) / count


def _counted_noise(counts, pass_rate, order):
  """Variance of each evaluation from its prompts' own binomials, checked.

  Σ_j p_j(1−p_j) / (n_j−1) / P²: the unbiased within-prompt part. How prompts
  differ is the same in each evaluation of a fixed set, and no noise.
  """
  try:
    correct, samples = (np.asarray(c, np.float64) for c in counts)
    samples = np.broadcast_to(samples, correct.shape)
  except (TypeError, ValueError) as error:
    raise ValueError(
      "counts must be two arrays, correct and samples of each evaluation and "
      f"prompt, got {type(counts).__name__} that is not: {error}."
    ) from error
  if correct.ndim != 2 or len(correct) != len(pass_rate):
    raise ValueError(
      "counts must hold a row for each evaluation and a column for each "
      f"prompt, got shape {correct.shape} for {len(pass_rate)} evaluations."
    )
  if not ((samples >= 2) & (correct >= 0) & (correct <= samples)).all():
    raise ValueError(
      "counts must have 2 or more samples of each prompt and between 0 and "
      "that many correct; leave counts out for one sample a prompt."
    )
  correct, samples = correct[order], samples[order]
  p = correct / samples
  off = np.abs(p.mean(1) - pass_rate)
  if off.max() > 0.01:
    raise ValueError(
      "counts must have pass_rate as their mean over prompts, got "
      f"{p[off.argmax()].mean():.4f} where pass_rate is "
      f"{pass_rate[off.argmax()]:.4f}; are the rows in the same order?"
    )
  noise = (p * (1.0 - p) / (samples - 1.0)).sum(1) / p.shape[1] ** 2
  # Where all prompts are solved or failed, this estimate would be 0.
  return np.maximum(noise, 0.02 * bernoulli(pass_rate) / samples.sum(1))


def what_is_known(
  x: Float64[np.ndarray, "N"],
  y: Float64[np.ndarray, "N"],
  first_pass_rate: float,
  initial: float | None = None,
  initial_sd: float | None = None,
) -> posterior.Initial:
  """R_0's prior where compute 0 was not evaluated.

  Args:
    x: compute, above 0, rising.
    y: pass rates.
    first_pass_rate: the centre of the prior, where R_0 is not given.
    initial: R_0, given.
    initial_sd: the prior's sd; None for exactly (R_0 given), or else for 0.03
      and as much more as the line through the first two points falls back to
      compute 0: the first evaluation may already stand above R_0.
  """
  if initial is not None:
    sd = _EXACT_SD if initial_sd is None else initial_sd
    return posterior.Initial(float(initial), float(sd), float(initial), np.inf)
  if initial_sd is None:
    step = max(x[1] - x[0], 1e-9 * x[0])
    back = min(abs(y[1] - y[0]) * x[0] / step, first_pass_rate)
    initial_sd = float(np.hypot(_INITIAL_SD, back))
  return posterior.Initial(first_pass_rate, float(initial_sd), 0.0, np.inf)


def _known(x, y, first_pass_rate, at_zero, zero_noise, initial, initial_sd):
  """R_0's prior and measurement, and their weight in points."""
  if initial is not None and initial_sd is None:
    return what_is_known(x, y, first_pass_rate, initial), _EXACT_WEIGHT
  if len(at_zero):
    value = float(at_zero.mean())
    noise = float(zero_noise.mean()) / len(at_zero)
    prior = value if initial is None else float(initial)
    sd = _MOOT_SD if initial is None else float(initial_sd)
    return posterior.Initial(prior, sd, value, noise), float(len(at_zero))
  return what_is_known(x, y, first_pass_rate, initial, initial_sd), None


def choose(
  compute: npt.ArrayLike,
  pass_rate: npt.ArrayLike,
  trials: npt.ArrayLike | None = None,
  *,
  initial: float | None = None,
  initial_sd: float | None = None,
  min_compute: float = 0.0,
  max_compute: float | None = None,
  counts: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
) -> Chosen:
  """Checks a curve and takes the points to fit.

  Args:
    compute: of each evaluation, at least 0, in any unit and order.
    pass_rate: of each evaluation, in [0, 1].
    trials: samples behind each evaluation (one number, or one a point).
    initial: R_0 when known; None to infer it.
    initial_sd: sd of R_0's prior about `initial`, or else about the first
      evaluation; None for exactly, or else for the prior of `what_is_known`.
    min_compute: points below it are left out, except at compute 0.
    max_compute: points above it are left out; None for no limit.
    counts: correct and samples, each of every evaluation and prompt.

  Returns:
    The points above compute 0, at most 1,024 (neighbours are averaged beyond
    that), and R_0's prior and measurement.

  Raises:
    ValueError: for arrays that do not match, values outside their domain, or
      fewer than 6 usable points.
  """
  if initial is not None and not 0.0 <= initial <= 1.0:
    raise ValueError(f"initial must be in [0, 1] or None, got {initial!r}.")
  if initial_sd is not None and not 0.0 < initial_sd <= 1.0:
    raise ValueError(
      f"initial_sd must be in (0, 1] or None, got {initial_sd!r}."
    )
  if trials is not None and counts is not None:
    raise ValueError(
      "trials and counts were both given; counts hold the trials, leave trials "
      "out."
    )
  x, y, n = _checked(compute, pass_rate, trials)
  noise = np.ones_like(y)
  if trials is not None:
    noise = bernoulli(y) / n
  elif counts is not None:
    order = np.argsort(np.asarray(compute, np.float64), kind="stable")
    noise = _counted_noise(counts, y, order)
  most = np.inf if max_compute is None else max_compute
  keep = (x == 0) | ((x >= min_compute) & (x <= most))
  if not enough(x[keep]):
    raise ValueError(
      f"a fit needs at least {FEWEST_POINTS} points, at {FEWEST_COMPUTES} or "
      f"more values of compute above 0, got {int(keep.sum())} of {len(x)} "
      f"between min_compute {min_compute:g} and max_compute {most:g}."
    )
  first_pass_rate = float(y[0])
  x, y, noise = x[keep], y[keep], noise[keep]
  noise_prior = posterior.LOG_NOISE
  if trials is not None:
    noise_prior = posterior.LOG_NOISE_RATIO
  elif counts is not None:
    noise_prior = posterior.LOG_NOISE_COUNTED
  zero = x == 0
  known, weight = _known(
    x[~zero],
    y[~zero],
    first_pass_rate,
    y[zero],
    noise[zero],
    initial,
    initial_sd,
  )
  thinned = _thinned(x[~zero], y[~zero], noise[~zero])
  binomial = trials is not None or counts is not None
  return Chosen(*thinned, known, weight, noise_prior, binomial)
