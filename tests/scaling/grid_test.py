import csv
import functools
import pathlib

import jax
import numpy as np
import pytest
from scipy import optimize

from scalerl_jax.scaling import fit, grid

CURVES = pathlib.Path(__file__).parents[1] / "fixtures" / "curves"


@pytest.fixture(scope="module")
def dense():
  """The points of Figure 1 that the authors fitted, and those beyond."""
  with (CURVES / "scalerl_fig1_dense.csv").open() as file:
    rows = list(csv.DictReader(file))
  compute = np.array([float(r["compute_gpu_hours"]) for r in rows])
  pass_rate = np.array([float(r["pass_rate"]) for r in rows])
  train = np.array([r["split"] == "train" for r in rows])
  return compute[train], pass_rate[train], compute[~train], pass_rate[~train]


@pytest.mark.parametrize(
  ("lowered", "asymptote", "exponent"),
  [
    (0.0, 0.630, 1.90),
    (0.01, 0.635, 1.72),
    (0.02, 0.645, 1.53),
    (0.05, 0.660, 1.25),
  ],
)
def test_figure_one_gives_the_papers_values(
  dense, lowered, asymptote, exponent
):
  """A and B of the paper's grid, R_0 the first evaluation or lower."""
  compute, pass_rate, _, _ = dense
  fitted = fit.fit_grid(compute, pass_rate, initial=pass_rate[0] - lowered)
  assert fitted.params.asymptote == pytest.approx(asymptote, abs=1e-9)
  assert fitted.params.exponent == pytest.approx(exponent, abs=0.005)
  assert fitted.compute[0] > 1500


def test_power_law_of_figure_one_hits_its_bound(dense):
  compute, pass_rate, _, _ = dense
  known = {"law": "power_law", "initial": pass_rate[0]}
  early = fit.fit_curve(compute, pass_rate, min_compute=1500.0, **known)
  assert early.least_squares.asymptote == 1.0
  assert any("A at its bound 1" in r for r in early.reasons)
  late = fit.fit_curve(compute, pass_rate, min_compute=5000.0, **known)
  assert late.least_squares.asymptote == pytest.approx(0.732, abs=0.0005)


def test_intervals_of_least_squares_are_too_narrow_on_figure_one(dense):
  """Which is why the posterior has a misfit: 3 of 10 points at most."""
  compute, pass_rate, beyond, truth = dense
  fitted = fit.fit_grid(compute, pass_rate, initial=pass_rate[0])
  mean, low, high = fitted.predict(beyond)
  assert np.mean((low <= truth) & (truth <= high)) <= 0.3
  assert np.sqrt(np.mean((mean - truth) ** 2)) == pytest.approx(
    0.0133, abs=2e-4
  )


@pytest.mark.parametrize("sd", [0.01, 0.03, 0.1])
def test_the_posterior_forecasts_figure_one_whatever_is_believed_of_initial(
  dense, sd
):
  """Measured: RMSE .0064, .0055, .0050 and widths .028, .031, .030."""
  compute, pass_rate, beyond, truth = dense
  mean, low, high = fit.fit_curve(compute, pass_rate, initial_sd=sd).predict(
    beyond
  )
  assert np.sqrt(np.mean((mean - truth) ** 2)) <= 0.009
  assert np.mean(high - low) <= 0.035
  assert np.mean((low <= truth) & (truth <= high)) >= 0.9


def _half_law(asymptote, midpoint, compute, exponent):
  return 0.4 + (asymptote - 0.4) / (1.0 + (midpoint / compute) ** exponent)


def test_exponent_is_curve_fits(dense):
  """B of each pair, against SciPy's curve_fit from its default start."""
  compute, pass_rate, _, _ = dense
  pairs = np.array([[0.63, 10000.0], [0.65, 11000.0], [0.7, 15000.0]])
  with jax.enable_x64(True):
    found, loss, _ = grid.best_exponents(
      np.log(compute),
      pass_rate,
      np.array(0.4),
      pairs[:, 0],
      np.log(pairs[:, 1]),
    )
  for (asymptote, midpoint), ours, ssr in zip(pairs, found, loss, strict=True):
    law = functools.partial(_half_law, asymptote, midpoint)
    (exponent,), _ = optimize.curve_fit(law, compute, pass_rate, p0=[1.0])
    assert float(ours) == pytest.approx(exponent, rel=1e-5)
    expected = np.sum((law(compute, exponent) - pass_rate) ** 2)
    assert float(ssr) == pytest.approx(expected, rel=1e-9)


def test_answer_is_the_best_pair_of_the_grid():
  rng = np.random.default_rng(0)
  compute = np.linspace(1.0, 40.0, 23)
  pass_rate = 0.2 + 0.4 / (1.0 + (8.0 / compute) ** 2)
  pass_rate += rng.normal(scale=0.01, size=23)
  axes = {"asymptotes": [0.55, 0.6, 0.65, 0.7], "midpoints": [4.0, 8.0, 12.0]}
  fitted = fit.fit_grid(
    compute, pass_rate, initial=0.2, min_compute=2.0, **axes
  )
  seen = compute >= 2.0
  best = min(
    (
      optimize.minimize_scalar(
        lambda b, a=a, m=m: np.sum(
          (0.2 + (a - 0.2) / (1 + (m / compute[seen]) ** b) - pass_rate[seen])
          ** 2
        ),
        bounds=(0.1, 10.0),
        method="bounded",
      ).fun,
      a,
      m,
    )
    for a in axes["asymptotes"]
    for m in axes["midpoints"]
  )
  assert (fitted.params.asymptote, fitted.params.midpoint) == best[1:]
  assert fitted.params == fitted.least_squares
  low, high = fitted.intervals(0.9)["asymptote"]
  assert low <= fitted.params.asymptote <= high
  _, low, high = fitted.predict([10.0, 80.0])
  assert (low < high).all()
  assert fitted.decided_at is not None
  assert fitted.sensitivity(80.0) == ()


def test_edges_of_the_grid_are_told():
  compute = np.linspace(1.0, 40.0, 23)
  pass_rate = 0.2 + 0.7 / (1.0 + (8.0 / compute) ** 2)
  fitted = fit.fit_grid(compute, pass_rate, initial=0.2, min_compute=2.0)
  assert not fitted.identified
  assert "the best A is the grid's edge 0.8" in fitted.reasons


@pytest.mark.parametrize(
  ("change", "rule"),
  [
    ({"asymptotes": [0.5, 1.2]}, "asymptotes must be"),
    ({"asymptotes": []}, "asymptotes must be"),
    ({"midpoints": [0.0, 3.0]}, "midpoints must be"),
    ({"midpoints": [[3.0]]}, "midpoints must be"),
    ({"min_compute": 35.0}, "at least 6 points"),
    ({"initial": -0.1}, "initial must be"),
  ],
)
def test_refuses_in_one_sentence(change, rule):
  compute = np.linspace(1.0, 40.0, 23)
  options = {"initial": 0.2, "min_compute": 1.0} | change
  with pytest.raises(ValueError, match=rule):
    fit.fit_grid(compute, np.linspace(0.2, 0.6, 23), **options)
