"""Predictive bands of a fitted curve: law, misfit and noise together.

The misfit that the data end with is carried on and forgotten at its own
length, so a forecast near the data follows them and a far one follows the law.
"""

import numpy as np
from jaxtyping import Float64
from scipy import special

from scalerl_jax.scaling import integration, laws
from scalerl_jax.scaling import posterior as posterior_lib


def _law(
  draws: posterior_lib.Posterior, log_compute: Float64[np.ndarray, "K"]
) -> Float64[np.ndarray, "K M"]:
  """The law of each draw, without its drift."""
  exponent = np.exp(draws.log_exponent)
  z = exponent * (log_compute[:, None] - draws.log_midpoint)
  share = np.empty_like(z)
  for index in np.unique(draws.law):
    of = draws.law == index
    share[:, of] = laws.gain(
      laws.NAMES[index], z[:, of], draws.log_tail[of], xp=np
    )
  return draws.initial + (draws.asymptote - draws.initial) * share


def law(
  draws: posterior_lib.Posterior, log_compute: Float64[np.ndarray, "K"]
) -> Float64[np.ndarray, "K M"]:
  """The law of each draw: R_0 + (A − R_0) · gain(B · (ln C − ln C_mid)).

  ln C is measured from the last fitted point; −∞ (compute 0) gives R_0. What
  the law gains beyond that point is multiplied by 1 + drift.
  """
  curve = _law(draws, log_compute)
  beyond = log_compute > 0
  if beyond.any() and draws.drift.any():
    gain = curve[beyond] - _law(draws, np.zeros(1))
    curve[beyond] += draws.drift * gain
  return curve


def smoothed_misfit(
  draws: posterior_lib.Posterior,
  log_compute: Float64[np.ndarray, "N"],
  error: Float64[np.ndarray, "N M"],
  noise: Float64[np.ndarray, "N"],
  wanted: Float64[np.ndarray, "K"],
) -> tuple[Float64[np.ndarray, "K M"], Float64[np.ndarray, "K M"]]:
  """Mean and variance of the misfit at `wanted`, given all residuals.

  A Kalman filter and a Rauch-Tung-Striebel smoother over the fitted points
  and the wanted ones, for all draws at once.

  Args:
    draws: the posterior.
    log_compute: of the fitted points, rising.
    error: pass rate minus law, for each fitted point and draw.
    noise: shape of the noise variance of each fitted point.
    wanted: log-compute of the predictions, in any order.

  Returns:
    Mean and variance for each wanted point and draw.
  """
  white, misfit = np.exp(2 * draws.log_noise), np.exp(2 * draws.log_misfit)
  rate = np.exp(-draws.log_length)
  place = np.concatenate([log_compute, wanted])
  order = np.argsort(place, kind="stable")
  mean, variance = np.zeros_like(white), misfit
  last = place[order[0]]
  means, variances, decays = [], [], []
  for index in order:
    decay = np.exp((last - place[index]) * rate)
    mean, variance = decay * mean, misfit + decay**2 * (variance - misfit)
    if index < len(log_compute):
      gain = variance / (variance + white * noise[index])
      mean = mean + gain * (error[index] - mean)
      variance = variance * (1.0 - gain)
    means.append(mean)
    variances.append(variance)
    decays.append(decay)
    last = place[index]
  for k in range(len(order) - 2, -1, -1):
    decay = decays[k + 1]
    ahead = misfit + decay**2 * (variances[k] - misfit)
    back = decay * variances[k] / ahead
    means[k] = means[k] + back * (means[k + 1] - decay * means[k])
    variances[k] = variances[k] + back**2 * (variances[k + 1] - ahead)
  rank = np.argsort(order)[len(log_compute) :]
  return np.stack(means)[rank], np.stack(variances)[rank].clip(0.0)


def quantiles(
  mean: Float64[np.ndarray, "K M"],
  variance: Float64[np.ndarray, "K M"],
  level: float,
) -> tuple[Float64[np.ndarray, "K"], Float64[np.ndarray, "K"]]:
  """Equal-tailed band of a mixture of M normals, kept within [0, 1].

  Args:
    mean: of each component, for K points.
    variance: of each component, at least 0.
    level: probability inside, in (0, 1).

  Returns:
    Low and high for each point.
  """
  # One normal a draw, the same at every compute, so that bands are smooth.
  z = special.ndtri(integration.uniforms(mean.shape[1], 1, 0)[:, 0])
  sample = mean + np.sqrt(variance) * z
  tails = [0.5 - level / 2, 0.5 + level / 2]
  low, high = np.quantile(sample, tails, axis=1)
  return low.clip(0.0, 1.0), high.clip(0.0, 1.0)
