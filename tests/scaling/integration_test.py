import jax
import numpy as np
import pytest

from scalerl_jax.scaling import integration, laws, posterior

COUNT = 9
START = posterior.Initial(0.2, 0.05, 0.21, 0.5)


@pytest.fixture
def evidence():
  rng = np.random.default_rng(0)
  place = np.sort(rng.uniform(-2.5, 0.0, COUNT))
  pass_rate = 0.2 + 0.5 / (1.0 + np.exp(-1.6 * (place + 1.0)))
  pass_rate += rng.normal(scale=0.02, size=COUNT)
  pad = (0, 64 - COUNT)
  return posterior.Evidence(
    np.pad(place, pad),
    np.pad(pass_rate, pad),
    np.pad(np.ones(COUNT), pad),
    np.pad(rng.uniform(0.5, 2.0, COUNT), pad),
    np.array([0.25, 0.66, 0.4, -1.1]),
  )


def _sampled(evidence, prior, seed=0):
  with jax.enable_x64(True):
    return integration.sample_posterior(
      evidence,
      START,
      prior,
      curvature=np.array([[0.2, 0.1], [0.1, 0.6]]),
      residual=0.02,
      seed=seed,
    )


@pytest.mark.parametrize("law", ["sigmoid", "burr"])
def test_sampling_equals_plain_importance_sampling(evidence, law):
  """Draws of A, and the evidence, against sampling from the priors."""
  prior = posterior.weak_prior(law)._replace(asymptote=(posterior.UNIFORM,))
  draws = _sampled(evidence, prior)
  rng = np.random.default_rng(0)
  squares, means = [], []
  with jax.enable_x64(True):
    for _ in range(120):
      z = rng.normal(size=(512, 6))
      phi = prior.phi[:, 0] + z * prior.phi[:, 1]
      phi[:, 2:4] = np.maximum(phi[:, 2:4], np.log(posterior.NOISE_FLOOR))
      found = posterior.conditional(evidence, START, phi, law)
      squares.append(-0.5 * (found.square + found.log_det))
      means.append([found.asymptote + 0.66, found.asymptote_sd])
  log_p = np.concatenate(squares)
  mean, sd = np.concatenate(means, axis=1)
  normal = rng.normal(size=(40, len(mean)))
  asymptote = mean + sd * normal
  inside = (asymptote > 0) & (asymptote < 1)
  weight = np.exp(log_p - log_p.max()) * inside
  order = np.argsort(asymptote.ravel())
  share = np.cumsum(weight.ravel()[order]) / weight.sum()
  expected = asymptote.ravel()[order][
    np.searchsorted(share, [0.05, 0.25, 0.5, 0.75, 0.95])
  ]
  ours = np.quantile(draws.asymptote, [0.05, 0.25, 0.5, 0.75, 0.95])
  assert draws.effective > 300
  # Two Monte Carlo answers: 0.006 apart at most when this was written.
  np.testing.assert_allclose(ours, expected, atol=0.015)
  log_evidence = np.log(weight.mean()) + log_p.max()
  assert draws.log_evidence == pytest.approx(log_evidence, abs=0.15)
  assert (draws.law == laws.NAMES.index(law)).all()
  assert (draws.log_tail == 0).all() == (law == "sigmoid")


def test_parts_of_the_asymptotes_prior_are_drawn_by_their_evidence(evidence):
  """A mixture prior is the mixture of its parts' posteriors."""
  both = posterior.weak_prior("sigmoid")._replace(
    asymptote=((0.6, 0.5, np.inf), (0.4, 0.7, 0.01))
  )
  alone = [
    _sampled(evidence, both._replace(asymptote=((1.0, *part[1:]),)))
    for part in both.asymptote
  ]
  weight = np.array([0.6, 0.4]) * np.exp([a.log_evidence for a in alone])
  draws = _sampled(evidence, both)
  assert draws.log_evidence == pytest.approx(np.log(weight.sum()), abs=0.05)

  def near(d):
    return np.mean(np.abs(d.asymptote - 0.7) < 0.01)

  expected = weight @ [near(a) for a in alone] / weight.sum()
  assert near(draws) == pytest.approx(expected, abs=0.05)


def test_mixture_shares_draws_by_weight(evidence):
  prior = posterior.weak_prior("sigmoid")
  other = posterior.weak_prior("burr")._replace(weight=1.0)
  parts = [_sampled(evidence, p) for p in (prior, other)]
  tempered = [
    p._replace(log_evidence=e) for p, e in zip(parts, (0.0, 20.0), strict=True)
  ]
  mixture, weight = integration.mixed(tempered, [prior, other])
  odds = np.exp(20.0 * integration.TEMPER)
  np.testing.assert_allclose(weight, [1 / (1 + odds), odds / (1 + odds)])
  count = (mixture.law == laws.NAMES.index("burr")).sum()
  assert count == pytest.approx(integration.DRAWS * weight[1], abs=1)
  assert len(mixture.asymptote) == integration.DRAWS
  # What is believed of a law is not tempered.
  level = [p._replace(log_evidence=3.0) for p in parts]
  unequal = [prior._replace(weight=0.75), other._replace(weight=0.25)]
  np.testing.assert_allclose(integration.mixed(level, unequal)[1], [0.75, 0.25])
  # Priors of one law are weighted by their whole evidence.
  _, within = integration.mixed(
    [parts[0]._replace(log_evidence=e) for e in (0.0, 2.0)],
    [prior._replace(weight=0.8), prior._replace(weight=0.2)],
  )
  odds = 0.25 * np.exp(2.0)
  np.testing.assert_allclose(within, [1 / (1 + odds), odds / (1 + odds)])


def test_one_part_is_itself(evidence):
  prior = posterior.weak_prior("sigmoid")
  draws = _sampled(evidence, prior)
  mixture, weight = integration.mixed([draws], [prior])
  np.testing.assert_array_equal(mixture.asymptote, draws.asymptote)
  assert weight == [1.0]
  assert mixture.effective == pytest.approx(draws.effective)


def test_uniforms_are_even_and_shifted_by_the_seed():
  u = integration.uniforms(1000, 2, 0)
  assert ((u > 0) & (u < 1)).all()
  counts, _, _ = np.histogram2d(u[:, 0], u[:, 1], bins=5, range=[[0, 1]] * 2)
  assert counts.min() >= 34  # 40 a cell; independent draws leave about 28.
  assert not np.allclose(u, integration.uniforms(1000, 2, 1))
