import jax
import numpy as np
import pytest

from scalerl_jax.scaling import fit

TRUTH = fit.Parameters(0.18, 0.82, 2.1, 0.9e12)


def _law(compute, p=TRUTH):
  share = 1.0 / (1.0 + (p.midpoint / np.maximum(compute, 1e-9)) ** p.exponent)
  return p.initial + (p.asymptote - p.initial) * share


COMPUTE = np.linspace(0.0, 4.2e12, 41)


def _simulated(rng, correlation, scale, count=41):
  """A curve of random law with AR(1) residuals, over twice the compute."""
  law = fit.Parameters(
    rng.uniform(0.1, 0.3),
    rng.uniform(0.5, 0.95),
    np.exp(rng.normal(0.53, 0.35)),
    rng.uniform(0.12, 0.35) * count,
  )
  compute = np.arange(2.0 * count)
  error = np.empty_like(compute)
  error[0] = rng.normal() * scale
  for i in range(1, len(error)):
    fresh = rng.normal() * scale * np.sqrt(1.0 - correlation**2)
    error[i] = correlation * error[i - 1] + fresh
  true = _law(compute, law)
  return compute, true, np.clip(true + error, 0, 1)


def test_recovers_a_noiseless_curve():
  fitted = fit.fit_curve(COMPUTE, _law(COMPUTE))
  np.testing.assert_allclose(fitted.least_squares, TRUTH, rtol=1e-6)
  np.testing.assert_allclose(fitted.params, TRUTH, rtol=1e-6)
  assert fitted.identified


@pytest.mark.parametrize(
  "known", [{"initial": 0.18}, {}], ids=["initial given", "initial free"]
)
def test_recovers_a_noiseless_curve_without_its_start(known):
  fitted = fit.fit_curve(COMPUTE[1:], _law(COMPUTE[1:]), **known)
  np.testing.assert_allclose(fitted.least_squares, TRUTH, rtol=1e-6)
  np.testing.assert_allclose(fitted.params, TRUTH, rtol=3e-6)
  for low, high in fitted.intervals(0.9).values():
    assert high - low < 1e-4 * high


def test_recovers_a_noisy_curve():
  noise = np.random.default_rng(0).normal(scale=0.006, size=41)
  fitted = fit.fit_curve(COMPUTE, _law(COMPUTE) + noise)
  np.testing.assert_allclose(fitted.params, TRUTH, rtol=0.06)
  assert abs(fitted.params.asymptote - TRUTH.asymptote) < 0.015
  assert 0.003 < fitted.residual < 0.02


def test_the_unit_of_compute_does_not_matter():
  noise = np.random.default_rng(0).normal(scale=0.006, size=41)
  flops = fit.fit_curve(COMPUTE, _law(COMPUTE) + noise)
  hours = fit.fit_curve(COMPUTE / 3e11, _law(COMPUTE) + noise)
  np.testing.assert_allclose(
    hours.params,
    flops.params._replace(midpoint=flops.params.midpoint / 3e11),
    rtol=1e-6,
  )
  np.testing.assert_allclose(
    hours.predict(20.0), flops.predict(6e12), rtol=1e-6
  )


def test_order_does_not_matter_and_seeds_nearly_not():
  noise = np.random.default_rng(0).normal(scale=0.006, size=41)
  pass_rate = _law(COMPUTE) + noise
  fitted = fit.fit_curve(COMPUTE, pass_rate)
  order = np.random.default_rng(1).permutation(41)
  shuffled = fit.fit_curve(COMPUTE[order], pass_rate[order])
  assert shuffled.params == fitted.params
  other = fit.fit_curve(COMPUTE, pass_rate, seed=1)
  assert other.params != fitted.params
  assert abs(other.params.asymptote - fitted.params.asymptote) < 0.002
  np.testing.assert_allclose(
    other.predict(8e12), fitted.predict(8e12), atol=4e-3
  )


def test_one_compilation_serves_a_growing_run():
  fit.fit_curve(COMPUTE[:10], _law(COMPUTE[:10]))
  before = fit._solve._cache_size()
  for count in (11, 20, 41):
    fit.fit_curve(COMPUTE[:count], _law(COMPUTE[:count]))
  assert fit._solve._cache_size() == before


def test_the_rest_of_the_program_stays_in_float32():
  fit.fit_curve(COMPUTE, _law(COMPUTE))
  assert jax.numpy.ones(3).dtype == jax.numpy.float32


def test_given_initial_is_kept_and_moves_the_asymptote():
  noise = np.random.default_rng(0).normal(scale=0.006, size=40)
  pass_rate = _law(COMPUTE[1:]) + noise
  low = fit.fit_curve(COMPUTE[1:], pass_rate, initial=0.14)
  high = fit.fit_curve(COMPUTE[1:], pass_rate, initial=0.18)
  assert low.params.initial == 0.14
  assert high.params.initial == 0.18
  assert low.params.asymptote > high.params.asymptote


def test_compute_zero_measures_initial():
  noise = np.random.default_rng(0).normal(scale=0.006, size=41)
  pass_rate = _law(COMPUTE) + noise

  def width(f):
    low, high = f.intervals(0.9)["initial"]
    return high - low

  late = {"min_compute": 1.2e12}
  measured = fit.fit_curve(COMPUTE, pass_rate, **late)
  assert len(measured.compute) == (COMPUTE >= 1.2e12).sum()
  free = fit.fit_curve(COMPUTE[1:], pass_rate[1:], **late)
  assert width(measured) < 0.7 * width(free)
  assert abs(measured.params.initial - pass_rate[0]) < 0.02


def test_window_is_kept():
  fitted = fit.fit_curve(
    COMPUTE, _law(COMPUTE), min_compute=1e12, max_compute=3e12
  )
  assert fitted.compute[0] >= 1e12
  assert fitted.compute[-1] <= 3e12


def test_trials_tell_the_noise():
  rng = np.random.default_rng(0)
  few, many = (
    fit.fit_curve(
      COMPUTE[:12], rng.binomial(n, _law(COMPUTE[:12])) / n, trials=n
    )
    for n in (300, 30_000)
  )
  assert few.residual > 2 * many.residual
  low, high = zip(*(f.predict(1.2e12)[1:] for f in (few, many)), strict=True)
  assert high[0] - low[0] > 2 * (high[1] - low[1])


def test_long_curves_are_averaged_and_fitted():
  rng = np.random.default_rng(0)
  compute = np.linspace(1e10, 4.2e12, 5000)
  noisy = np.clip(_law(compute) + rng.normal(scale=0.05, size=5000), 0, 1)
  fitted = fit.fit_curve(compute, noisy)
  assert len(fitted.compute) <= 1024
  assert abs(fitted.params.asymptote - TRUTH.asymptote) < 0.03


def test_bands_cover_with_correlated_residuals():
  """90 % bands at twice the compute, of a new evaluation and of the law."""
  rng = np.random.default_rng(0)
  observed, of_law, widths = [], [], []
  for _ in range(200):
    compute, true, pass_rate = _simulated(rng, 0.5, 0.008)
    fitted = fit.fit_curve(compute[:41], pass_rate[:41])
    _, low, high = fitted.predict(80.0)
    observed.append(low <= true[80] + rng.normal() * 0.008 <= high)
    _, low, high = fitted.predict(80.0, kind="mean")
    of_law.append(low <= true[80] <= high)
    widths.append(high - low)
  # Cautious by design where the law is exact: the misfit is believed in.
  assert np.mean(observed) >= 0.87
  assert np.mean(of_law) >= 0.87
  assert np.mean(widths) < 0.09


def test_predict_shapes_and_kinds():
  noise = np.random.default_rng(0).normal(scale=0.006, size=41)
  fitted = fit.fit_curve(COMPUTE, _law(COMPUTE) + noise)
  at = np.array([[0.0, 1e12, 2e12], [3e12, 4e12, 9e12]])
  mean, low, high = fitted.predict(at)
  assert mean.shape == low.shape == high.shape == (2, 3)
  assert (low < mean).all()
  assert (mean < high).all()
  _, low_mean, high_mean = fitted.predict(at, kind="mean")
  assert (high_mean - low_mean < high - low).all()
  _, low_three, high_three = fitted.predict(at, evaluations=3)
  assert (high_three - low_three < high - low).all()
  _, low_half, high_half = fitted.predict(at, 0.5)
  assert (high_half - low_half < high - low).all()
  assert abs(mean[0, 0] - fitted.params.initial) < 1e-3
  # Far beyond the data the forecast is the asymptote.
  assert abs(float(fitted.predict(1e18)[0]) - fitted.params.asymptote) < 5e-3


@pytest.mark.parametrize(
  ("change", "rule"),
  [
    ({"pass_rate": _law(COMPUTE)[:-1]}, "same length"),
    ({"pass_rate": 100 * _law(COMPUTE)}, r"in \[0, 1\]"),
    ({"pass_rate": np.full(41, np.nan)}, r"in \[0, 1\]"),
    ({"compute": COMPUTE - 1.0}, "at least 0"),
    ({"compute": np.ones(41)}, "4 or more values"),
    ({"max_compute": 4e11}, "at least 6 points"),
    ({"trials": 0}, "trials"),
    ({"trials": [3, 5]}, "trials"),
    ({"initial": 1.5}, "initial"),
    ({"law": "line"}, "law must be"),
  ],
)
def test_refuses_in_one_sentence(change, rule):
  arguments = {"compute": COMPUTE, "pass_rate": _law(COMPUTE)} | change
  with pytest.raises(ValueError, match=rule):
    fit.fit_curve(
      arguments.pop("compute"), arguments.pop("pass_rate"), **arguments
    )


def test_predict_refuses_in_one_sentence():
  fitted = fit.fit_curve(COMPUTE, _law(COMPUTE))
  with pytest.raises(ValueError, match="compute must be"):
    fitted.predict([-1.0])
  with pytest.raises(ValueError, match="level must be"):
    fitted.predict(1e12, 90)
  with pytest.raises(ValueError, match="level must be"):
    fitted.intervals(1.0)
  with pytest.raises(ValueError, match="kind must be"):
    fitted.predict(1e12, 0.9, "band")
  with pytest.raises(ValueError, match="evaluations must be"):
    fitted.predict(1e12, evaluations=0)


def test_fits_inside_a_mesh_without_using_it():
  alone = fit.fit_curve(COMPUTE, _law(COMPUTE))
  before = fit._solve._cache_size()
  mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[2:6])
  with jax.set_mesh(mesh):
    meshed = fit.fit_curve(COMPUTE, _law(COMPUTE))
    assert jax.sharding.get_mesh() == mesh
  assert meshed.params == alone.params
  assert fit._solve._cache_size() == before


def test_counts_and_trials_tell_the_noise_of_one_curve():
  """Prompts that are all easy or all hard: little noise, as counts know."""
  rng = np.random.default_rng(0)
  compute, prompts, samples = np.arange(21.0), 200, 4
  share = 1.0 / (1.0 + (6.0 / np.maximum(compute, 1e-9)) ** 1.8)
  solved = rng.uniform(size=prompts) < 0.2 + 0.5 * share[:, None]
  correct = rng.binomial(samples, np.where(np.sort(solved, 1), 0.97, 0.03))
  pass_rate = correct.mean(1) / samples
  counted = fit.fit_curve(compute, pass_rate, counts=(correct, samples))
  trials = fit.fit_curve(compute, pass_rate, trials=prompts * samples)

  def noise(fitted):
    return np.exp(np.median(fitted._draws.log_noise)) * np.sqrt(
      fitted._noise.mean()
    )

  expected = np.sqrt(0.97 * 0.03 / (prompts * samples))
  assert noise(counted) == pytest.approx(expected, rel=0.25)
  assert noise(trials) > 1.3 * noise(counted)


def test_no_misfit_is_independent_noise_alone():
  noise = np.random.default_rng(0).normal(scale=0.006, size=41)
  pass_rate = _law(COMPUTE) + noise
  exact = fit.fit_curve(COMPUTE, pass_rate, law="sigmoid", misfit=False)
  cautious = fit.fit_curve(COMPUTE, pass_rate, law="sigmoid")
  at = np.array([5e11, 2e12, 8e12])
  _, low, high = exact.predict(at, kind="mean")
  law = np.quantile(
    np.array(
      [
        _law(at, fit.Parameters(r, a, np.exp(b), np.exp(m) * COMPUTE[-1]))
        for r, a, b, m in zip(*exact._draws[:4], strict=True)
      ]
    ),
    [0.05, 0.95],
    axis=0,
  )
  np.testing.assert_allclose([low, high], law, atol=2e-4)
  _, low_cautious, high_cautious = cautious.predict(at, kind="mean")
  assert (high - low < high_cautious - low_cautious).all()


def test_auto_lies_between_the_laws_that_it_averages():
  noise = np.random.default_rng(0).normal(scale=0.006, size=41)
  pass_rate = _law(COMPUTE) + noise
  half = {"compute": COMPUTE[:21], "pass_rate": pass_rate[:21]}
  means = [
    float(fit.fit_curve(**half, law=law).predict(4.2e12)[0])
    for law in fit.AVERAGED
  ]
  averaged = fit.fit_curve(**half)
  mean = float(averaged.predict(4.2e12)[0])
  assert min(means) <= mean <= max(means)
  expected = sum(
    w * m for w, m in zip(averaged.weights.values(), means, strict=True)
  )
  assert mean == pytest.approx(expected, abs=2e-3)
