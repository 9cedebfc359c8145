"""Speed of the curve fits: `python -m benchmarks.fitting`.

One JSON line a figure: the posterior, one least-squares fit, bootstrap refits,
and beside them the paper's grid and SciPy from several starts. Two cores; the
fastest repeat is told, with the median and the slowest. `figure_one` prints
the forecasts of Figure 1's extension by each procedure. Quiet machine only.
"""

import csv
import pathlib
import sys
import time
from collections.abc import Callable

import numpy as np

from benchmarks.bench import REPEATS, median, tell

FIGURE_ONE = (
  pathlib.Path(__file__).parents[1]
  / "tests/fixtures/curves/scalerl_fig1_dense.csv"
)
# The curve that the authors drew through Figure 1, as a third party read it.
DRAWN = {
  "initial": 0.4017,
  "asymptote": 0.6446,
  "exponent": 1.682,
  "midpoint": 10920.0,
}


def curve(count: int) -> tuple[np.ndarray, np.ndarray]:
  """A noisy sigmoid of `count` points above compute 0, and one at 0."""
  compute = np.arange(count + 1.0)
  share = 1.0 / (1.0 + (0.25 * count / np.maximum(compute, 1e-9)) ** 1.8)
  noise = np.random.default_rng(0).normal(scale=0.008, size=count + 1)
  return compute, (0.2 + 0.5 * share + noise).clip(0, 1)


def timed(name: str, work: Callable[[], object], **values: int) -> None:
  """Seconds of `work`, after a first call that compiles."""
  start = time.perf_counter()
  work()
  first = time.perf_counter() - start
  seconds = []
  for _ in range(REPEATS):
    start = time.perf_counter()
    work()
    seconds.append(time.perf_counter() - start)
  tell(
    name,
    milliseconds=1e3 * min(seconds),
    median=1e3 * median(seconds),
    slowest=1e3 * max(seconds),
    first_call_seconds=first,
    **values,
  )


def scipy_multi_start(compute: np.ndarray, pass_rate: np.ndarray) -> float:
  """The smallest loss of SciPy's bounded least squares from nine starts."""
  from scipy import optimize, special

  seen = compute > 0
  place = np.log(compute[seen] / compute[-1])

  def residuals(p):
    gain = special.expit(np.exp(p[2]) * (place - p[3]))
    law = p[0] + (p[1] - p[0]) * gain
    return np.append(law - pass_rate[seen], p[0] - pass_rate[~seen])

  low, high = [0.0, 0.0, -2.3, -8.0], [1.0, 1.0, 3.0, 6.0]
  return min(
    optimize.least_squares(residuals, [0.2, 0.7, b, m], bounds=(low, high)).cost
    for b in (-0.3, 0.5, 1.3)
    for m in (-2.0, -1.0, 0.0)
  )


def fits() -> None:
  """All figures of speed, on curves of 30 points."""
  import jax

  from scalerl_jax.scaling import bootstrap, fit, least_squares
  from scalerl_jax.scaling.host import host_mesh

  compute, pass_rate = curve(30)
  timed(
    "fit_curve, one law",
    lambda: fit.fit_curve(compute, pass_rate, law="sigmoid"),
    points=30,
  )
  timed("fit_curve", lambda: fit.fit_curve(compute, pass_rate), points=30)
  fitted = fit.fit_curve(compute, pass_rate)
  timed("predict", lambda: fitted.predict([40.0, 60.0]), points=30)
  place = np.pad(np.log(compute[1:] / compute[-1]), (0, 34))
  points = least_squares.Points(
    place,
    np.pad(pass_rate[1:], (0, 34)),
    np.pad(np.ones(30), (0, 34)),
    pass_rate[0],
    np.array(1.0),
  )

  def solve():
    with jax.enable_x64(True), jax.set_mesh(host_mesh()):
      return jax.block_until_ready(fit._solve(points, "sigmoid"))

  timed("least squares", solve, points=30, starts=12)
  timed(
    "bootstrap refits",
    lambda: bootstrap.bootstrap_refits(fitted),
    points=30,
    refits=10_000,
  )
  rows = figure_one_points()
  timed(
    "the paper's grid",
    lambda: fit.fit_grid(*rows[0], initial=float(rows[0][1][0])),
    points=len(rows[0][0]),
    pairs=7100,
  )
  timed(
    "scipy least squares, 9 starts",
    lambda: scipy_multi_start(compute, pass_rate),
    points=30,
  )


def figure_one_points():
  """(compute, pass rate) that the authors fitted, and of the extension."""
  with FIGURE_ONE.open(encoding="utf-8") as file:
    rows = list(csv.DictReader(file))
  parts = []
  for split in ("train", "ext"):
    of = [r for r in rows if r["split"] == split]
    parts.append(
      (
        np.array([float(r["compute_gpu_hours"]) for r in of]),
        np.array([float(r["pass_rate"]) for r in of]),
      )
    )
  return parts


def figure_one() -> None:
  """RMSE, coverage and width on the extension of Figure 1, by procedure."""
  from scalerl_jax.scaling import fit, laws

  (compute, pass_rate), (beyond, truth) = figure_one_points()

  def show(name, mean, low=None, high=None):
    values = {"rmse": float(np.sqrt(np.mean((mean - truth) ** 2)))}
    if low is not None:
      values["coverage_90"] = float(np.mean((low <= truth) & (truth <= high)))
      values["width_90"] = float(np.mean(high - low))
    tell(f"figure 1: {name}", **values)

  show("authors' drawn curve", np.asarray(laws.sigmoid(beyond, **DRAWN)))
  for lowered in (0.0, 0.01, 0.02, 0.05):
    initial = float(pass_rate[0]) - lowered
    fitted = fit.fit_grid(compute, pass_rate, initial=initial)
    name = f"the paper's grid, R_0 {initial:.3f}, A {fitted.params.asymptote}"
    show(name, *fitted.predict(beyond))
  for sd in (0.01, 0.03, 0.1):
    plain = fit.fit_curve(
      compute, pass_rate, law="sigmoid", misfit=False, initial_sd=sd
    )
    show(f"sigmoid, independent noise, R_0 sd {sd}", *plain.predict(beyond))
    least = plain.least_squares._asdict()
    show(
      f"sigmoid, least squares, R_0 sd {sd}, A {least['asymptote']:.3f}",
      np.asarray(laws.sigmoid(beyond, **least)),
    )
    ours = fit.fit_curve(compute, pass_rate, initial_sd=sd)
    name = f"fit_curve, R_0 sd {sd}, A {ours.params.asymptote:.3f}"
    show(name, *ours.predict(beyond))


if __name__ == "__main__":
  if "figure_one" in sys.argv[1:]:
    figure_one()
  else:
    fits()
