"""Which of several runs, or sets of seeds, wins at a budget.

Fits in, probabilities out; `in_words` says it to a reader. Intervals of plain
numbers over seeds, without fits, are in `compare.py`.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from scalerl_jax.scaling import compare, intervals
from scalerl_jax.scaling import draws as draws_lib
from scalerl_jax.scaling.crossing import Crossing, find_crossing
from scalerl_jax.scaling.curve_fit import CurveFit
from scalerl_jax.scaling.seeds import mean_over_seeds

# Scale of a half-Cauchy prior of what equal runs vary by, which several seeds
# then decide: of pass rate and A as in the paper (±.015), of ln B and ln C_mid.
BETWEEN_SEEDS = {"pass_rate": 0.015, "asymptote": 0.015, "log": 0.1}
# From where a winner is told without advice to measure more, and from where
# a crossing counts as expected.
SURE, _EXPECTED = 0.9, 0.5


class Estimate(NamedTuple):
  """A value with its interval."""

  mean: float
  low: float
  high: float


class Side(NamedTuple):
  """One run, or one recipe over its seeds."""

  name: str
  seeds: int
  last: float  # Compute to which every seed was run.
  pass_rate: Estimate  # At the budget.
  asymptote: Estimate
  exponent: Estimate
  midpoint: Estimate
  reasons: tuple[str, ...]  # Why A is unknown, in any of the seeds.

  @property
  def identified(self) -> bool:
    """Whether every seed determines its asymptote."""
    return not self.reasons


class SharedAsymptote(NamedTuple):
  """The margin rule: one A for both, and B of each with it held."""

  asymptote: float
  exponents: tuple[float, float]


class Pair(NamedTuple):
  """Two sides, the likelier winner at the budget first."""

  first: str
  second: str
  probability: float  # That `first` is above `second` at the budget.
  difference: Estimate  # First minus second, at the budget.
  crossing: Crossing | None
  shared: SharedAsymptote | None


class Contest(NamedTuple):
  """Sides in order of their pass rate at the budget, and all their pairs."""

  budget: float
  level: float
  sides: tuple[Side, ...]
  pairs: tuple[Pair, ...]


def _estimate(draws: np.ndarray, level: float) -> Estimate:
  low, high = np.quantile(draws, (0.5 - level / 2, 0.5 + level / 2))
  return Estimate(float(draws.mean()), float(low), float(high))


def _side(name, fits, budget, level, rng) -> tuple[Side, np.ndarray]:
  """A side, and the draws of its pass rate at the budget."""
  by_seed = [
    intervals.parameter_draws(f._draws, float(f.compute[-1])) for f in fits
  ]
  seen = [draws_lib.curve_draws(f, budget)[0] for f in fits]
  rates = mean_over_seeds(seen, BETWEEN_SEEDS["pass_rate"], rng).clip(0.0, 1.0)

  def parameter(key):
    draws = [d[key] for d in by_seed]
    if key == "asymptote":
      scale = BETWEEN_SEEDS["asymptote"]
      return _estimate(mean_over_seeds(draws, scale, rng).clip(0.0, 1.0), level)
    logs = [np.log(d) for d in draws]
    found = mean_over_seeds(logs, BETWEEN_SEEDS["log"], rng)
    tails = (0.5, 0.5 - level / 2, 0.5 + level / 2)
    middle, low, high = np.exp(np.quantile(found, tails))
    return Estimate(float(middle), float(low), float(high))

  return Side(
    name,
    len(fits),
    min(float(f.compute[-1]) for f in fits),
    _estimate(rates, level),
    parameter("asymptote"),
    parameter("exponent"),
    parameter("midpoint"),
    tuple(dict.fromkeys(reason for f in fits for reason in f.reasons)),
  ), rates


def probability_above(
  first: Float64[np.ndarray, "M"], second: Float64[np.ndarray, "N"]
) -> float:
  """P(X > Y) + P(X = Y)/2 over all pairs of draws of independent X and Y."""
  ordered = np.sort(second)
  below = np.searchsorted(ordered, first, "left")
  upto = np.searchsorted(ordered, first, "right")
  return float((below + upto).mean() / (2 * len(ordered)))


def _exponent_at(fits: Sequence[CurveFit], asymptote: float) -> float | None:
  """B with A held: the geometric mean over seeds, None where A is too low."""
  if any(f.params.initial >= asymptote for f in fits):
    return None
  logs = [
    np.log(
      compare.refit_exponent(
        f.compute,
        f.pass_rate,
        initial=f.params.initial,
        asymptote=asymptote,
      ).exponent
    )
    for f in fits
  ]
  return float(np.exp(np.mean(logs)))


def _shared(one, ones, other, others, margin) -> SharedAsymptote | None:
  if not (one.identified and other.identified):
    return None
  shared = compare.shared_asymptote(
    one.asymptote.mean, other.asymptote.mean, margin
  )
  if shared is None:
    return None
  first, second = (_exponent_at(fits, shared) for fits in (ones, others))
  if first is None or second is None:
    return None
  return SharedAsymptote(shared, (first, second))


def compare_runs(
  runs: Mapping[str, CurveFit | Sequence[CurveFit]],
  budget: float,
  *,
  level: float = 0.9,
  margin: float = compare.MARGIN,
  seed: int = 0,
) -> Contest:
  """How two or more runs, or recipes of several seeds, stand at a budget.

  The pass rate at the budget is that of the curve itself, misfit included. Of
  several seeds it is the recipe's mean over all seeds: the average of their
  posteriors and τ/√n, where τ is what seeds vary by (`between_seeds`). A
  single run stands for itself alone: another seed of it may end elsewhere.

  Args:
    runs: name to a fit, or to the fits of several seeds of one recipe; all in
      one unit of compute and of one held-out set.
    budget: compute at which they are compared, above 0.
    level: probability inside the intervals, in (0, 1).
    margin: A of two sides closer than it count as one: B is then compared
      with A held at their average.
    seed: of the order in which draws of different runs are put together.

  Returns:
    The sides, the highest at the budget first, and each pair of them: the
    probability that one is above the other, the difference, the last crossing
    of their laws up to 4 times budget and data (None where fewer than 5 % of
    the draws cross), and B at the shared A (None where the asymptotes differ
    by the margin, or one is not identified).

  Raises:
    ValueError: for fewer than two runs, a run without fits, or a budget, level
      or margin outside its domain.

  Example:
    >>> import numpy as np
    >>> from scalerl_jax.scaling.fit import fit_curve
    >>> compute = np.linspace(0.0, 40.0, 21)
    >>> def run(a, b):
    ...   rate = 0.2 + (a - 0.2) / (1 + (8.0 / np.maximum(compute, 1e-9)) ** b)
    ...   return fit_curve(compute, rate)
    >>> contest = compare_runs({"x": run(0.6, 2.0), "y": run(0.8, 2.0)}, 80.0)
    >>> print("\\n".join(in_words(contest)))
    y beats x at 80 with probability >0.99 (.794 against .596); no crossing is
    expected (probability 0.00).
      asymptotes: A .800 against .600.
      of these runs alone: what another seed would change is not in it.

  Reference:
    The margin rule: Khatri et al., 2025, arXiv 2510.13786, section 2.4.
  """
  if len(runs) < 2:
    raise ValueError(f"runs must hold at least two names, got {len(runs)}.")
  if not 0.0 < level < 1.0:
    raise ValueError(f"level must be in (0, 1), got {level!r}.")
  if not 0.0 < budget < np.inf:
    raise ValueError(f"budget must be a compute above 0, got {budget!r}.")
  rng = np.random.default_rng(seed)
  fits = {
    name: [given] if isinstance(given, CurveFit) else list(given)
    for name, given in runs.items()
  }
  sides, rates = {}, {}
  for name, own in fits.items():
    if not own:
      raise ValueError(
        f"runs must hold a fit for each name, got none of {name}."
      )
    sides[name], rates[name] = _side(name, own, budget, level, rng)
  order = sorted(sides, key=lambda name: -sides[name].pass_rate.mean)
  pairs = []
  for one, other in itertools.combinations(order, 2):
    probability = probability_above(rates[one], rates[other])
    if probability < 0.5:
      one, other, probability = other, one, 1.0 - probability
    size = min(len(rates[one]), len(rates[other]))
    difference = (
      rng.permutation(rates[one])[:size] - rng.permutation(rates[other])[:size]
    )
    pairs.append(
      Pair(
        one,
        other,
        probability,
        _estimate(difference, level),
        find_crossing(fits[one], fits[other], budget, level, rng),
        _shared(sides[one], fits[one], sides[other], fits[other], margin),
      )
    )
  return Contest(
    float(budget), level, tuple(sides[name] for name in order), tuple(pairs)
  )


def _rate(value: float) -> str:
  return f"{value:.3f}".removeprefix("0")


def _chance(value: float) -> str:
  return ">0.99" if value > 0.995 else f"{value:.2f}"


def _told_crossing(pair: Pair, budget: float, unit: str) -> str:
  found = pair.crossing
  if found is None or found.probability < _EXPECTED:
    chance = 0.0 if found is None else found.probability
    return f"no crossing is expected (probability {chance:.2f})"
  where = (
    f"{found.compute:.3g}{unit} [{found.low:.3g}, {found.high:.3g}]"
    f" (probability {found.probability:.2f})"
  )
  if found.compute <= budget:
    return f"the curves cross at {where}: before it {pair.second} leads"
  return f"the curves cross at {where}: beyond it {pair.second} leads"


def _told_asymptotes(pair: Pair, sides: Mapping[str, Side]) -> str:
  one, other = sides[pair.first], sides[pair.second]
  unknown = [s.name for s in (one, other) if not s.identified]
  if unknown:
    return (
      f"the asymptote of {' and of '.join(unknown)} is unidentified: nothing is"
      " said of compute far beyond the data"
    )
  values = (
    f"A {_rate(one.asymptote.mean)} against {_rate(other.asymptote.mean)}"
  )
  if pair.shared is None:
    return f"asymptotes: {values}"
  b = pair.shared.exponents
  faster = pair.first if b[0] >= b[1] else pair.second
  return (
    f"asymptotes: {values} count as one; with A {_rate(pair.shared.asymptote)}"
    f" for both, B {b[0]:.2f} against {b[1]:.2f}: {faster} rises more sharply"
  )


def in_words(contest: Contest, unit: str = "") -> list[str]:
  """A contest as lines that a reader can act on, a few for each pair.

  Args:
    contest: of `compare_runs`.
    unit: of compute, such as "FLOPs".

  Returns:
    For each pair, who beats whom with what probability and where the curves
    cross; then, indented, what is known of the asymptotes, and what would make
    an uncertain answer surer.
  """
  sides = {side.name: side for side in contest.sides}
  unit = f" {unit}" if unit else ""
  lines = []
  for pair in contest.pairs:
    one, other = sides[pair.first], sides[pair.second]
    lines.append(
      f"{pair.first} beats {pair.second} at {contest.budget:.4g}{unit} with"
      f" probability {_chance(pair.probability)}"
      f" ({_rate(one.pass_rate.mean)} against {_rate(other.pass_rate.mean)});"
      f" {_told_crossing(pair, contest.budget, unit)}."
    )
    lines.append(f"  {_told_asymptotes(pair, sides)}.")
    low, high = pair.difference.low, pair.difference.high
    spread = f"the difference is {low:+.3f} to {high:+.3f}"
    if pair.probability < SURE:
      further = min(one.last, other.last) < contest.budget
      more = "train on towards the budget, or run" if further else "run"
      lines.append(
        f"  too close to call: {spread} at {contest.level:.0%}; {more} more"
        " seeds."
      )
    if min(one.seeds, other.seeds) == 1:
      lines.append(
        "  of these runs alone: what another seed would change is not in it."
      )
  return lines
