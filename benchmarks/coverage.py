"""Do 90 % bands cover? `python -m benchmarks.coverage [CURVES [SCENARIO...]]`.

Simulated curves, 1,000 by default for each scenario; prints a table. Half of
the compute is fitted, and a new noisy evaluation and the law itself are looked
for in the bands, inside the window and at twice its compute.
"""

import functools
import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import special

from scalerl_jax.scaling.fit import CurveFit, fit_curve

NOISES, COUNTS = (0.003, 0.01, 0.02), (12, 24, 48)
LEVEL = 0.9


class Truth(NamedTuple):
  """A law to simulate: R_0, A, B, and C_mid as a share of the window."""

  initial: float
  asymptote: float
  exponent: float
  midpoint: float


Law = Callable[[np.ndarray, Truth], np.ndarray]


def draw_truth(rng: np.random.Generator) -> Truth:
  """A law whose rise is well inside the window."""
  initial = rng.uniform(0.1, 0.35)
  return Truth(
    initial,
    rng.uniform(initial + 0.2, 0.95),
    np.exp(rng.normal(np.log(1.7), 0.35)),
    rng.uniform(0.12, 0.4),
  )


def _between(truth: Truth, share: np.ndarray) -> np.ndarray:
  return truth.initial + (truth.asymptote - truth.initial) * share


def _z(place: np.ndarray, truth: Truth) -> np.ndarray:
  return truth.exponent * np.log(np.maximum(place, 1e-12) / truth.midpoint)


def sigmoid(place: np.ndarray, truth: Truth) -> np.ndarray:
  """The law that the fit knows."""
  return _between(truth, special.expit(_z(place, truth)))


def burr(tail: float) -> Law:
  """A heavier (tail < 1) or lighter upper tail than the sigmoid's."""

  def law(place, truth):
    scale = 2.0 ** (1.0 / tail) - 1.0
    rest = (1.0 + scale * np.exp(_z(place, truth))) ** -tail
    return _between(truth, 1.0 - rest)

  return law


def log_normal(place: np.ndarray, truth: Truth) -> np.ndarray:
  """Φ in place of the logistic, with the same slope at C_mid."""
  return _between(truth, special.ndtr(_z(place, truth) * np.sqrt(np.pi / 8)))


def two_populations(place: np.ndarray, truth: Truth) -> np.ndarray:
  """Half of the prompts learn at a third, half at three times the compute."""
  early, late = (
    sigmoid(place, truth._replace(midpoint=truth.midpoint * f))
    for f in (1 / 3, 3.0)
  )
  return 0.5 * (early + late)


def late_knee(place: np.ndarray, truth: Truth) -> np.ndarray:
  """From 0.7 of the window on, half of the gain that the law still has."""
  known, at = sigmoid(place, truth), sigmoid(np.array(0.7), truth)
  return np.where(place < 0.7, known, at + 0.5 * (known - at))


class Scenario(NamedTuple):
  """What is simulated, and how it is fitted."""

  law: Law
  correlation: float  # Of the errors of neighbouring evaluations.
  fit: Callable[..., CurveFit] = fit_curve


knows_the_law = functools.partial(fit_curve, law="sigmoid", misfit=False)
SCENARIOS: dict[str, Scenario] = {
  "well specified, law known": Scenario(sigmoid, 0.0, knows_the_law),
  "well specified, default": Scenario(sigmoid, 0.0),
  "Burr tail 0.5": Scenario(burr(0.5), 0.0),
  "Burr tail 3": Scenario(burr(3.0), 0.0),
  "log-normal": Scenario(log_normal, 0.0),
  "two populations": Scenario(two_populations, 0.0),
  "AR(1) residuals 0.5": Scenario(sigmoid, 0.5),
  "late knee": Scenario(late_knee, 0.0),
}
COLUMNS = ("observed inside", "observed at 2x", "law inside", "law at 2x")


class Outcome(NamedTuple):
  """Of one curve: what was covered, in the order of `COLUMNS`, and widths."""

  noise: float
  count: int
  covered: tuple[bool, ...]
  widths: tuple[float, ...]


def simulate(scenario: Scenario, rng: np.random.Generator, index: int):
  """One curve, fitted and looked at; `index` goes round noises and counts."""
  noise = NOISES[index % len(NOISES)]
  count = COUNTS[index // len(NOISES) % len(COUNTS)]
  truth = draw_truth(rng)
  # Every other place is fitted; the new evaluation lies between two of them.
  place = np.linspace(0.0, 2.0, 4 * count + 1)
  true = scenario.law(place, truth)
  error = rng.normal(size=len(place)) * noise
  step = np.sqrt(scenario.correlation)
  for i in range(1, len(error)):
    error[i] = step * error[i - 1] + np.sqrt(1.0 - step**2) * error[i]
  new = true + error
  fitted = np.arange(0, 2 * count + 1, 2)
  fit = scenario.fit(place[fitted], new[fitted].clip(0, 1))
  at = np.array([2 * rng.integers(count // 8, count) + 1, 4 * count])
  covered, widths = [], []
  for kind, values in (("observation", new), ("mean", true)):
    _, low, high = fit.predict(place[at], LEVEL, kind)
    inside = (low <= values[at]) & (values[at] <= high)
    covered += [bool(v) for v in inside]
    widths += (high - low).tolist()
  return Outcome(noise, count, tuple(covered), tuple(widths))


def run(name: str, curves: int, seed: int = 0) -> list[Outcome]:
  """The outcomes of a scenario: the same truths for each of them."""
  rng = np.random.default_rng(seed)
  return [simulate(SCENARIOS[name], rng, i) for i in range(curves)]


def row(outcomes: list[Outcome]) -> tuple[np.ndarray, np.ndarray]:
  """Shares covered, and mean widths, in the order of `COLUMNS`."""
  covered = np.array([o.covered for o in outcomes]).mean(0)
  return covered, np.array([o.widths for o in outcomes]).mean(0)


def main() -> None:
  """Prints the table."""
  curves = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
  print(f"{curves} curves a row; share inside the {LEVEL:.0%} band, mean width")
  print(f"{'':<34}" + "".join(f"{c:>18}" for c in COLUMNS))

  def tell(name, outcomes):
    cells = [f"{c:.3f} ({w:.3f})" for c, w in zip(*row(outcomes), strict=True)]
    print(f"{name:<34}" + "".join(f"{c:>18}" for c in cells), flush=True)

  for name in sys.argv[2:] or SCENARIOS:
    outcomes = run(name, curves)
    tell(name, outcomes)
    if not name.startswith("well"):
      continue
    for noise in NOISES:
      tell(f"  noise {noise}", [o for o in outcomes if o.noise == noise])
    for count in COUNTS:
      tell(f"  {count} points", [o for o in outcomes if o.count == count])


if __name__ == "__main__":
  main()
