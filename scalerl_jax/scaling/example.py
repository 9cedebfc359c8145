"""The worked example: the curve of the paper's Figure 1, and its forecast."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64


class Example(NamedTuple):
  """Evaluations of one run: those to fit, and those that came later."""

  compute: Float64[np.ndarray, "N"]  # GPU-hours
  pass_rate: Float64[np.ndarray, "N"]
  later_compute: Float64[np.ndarray, "K"]
  later_pass_rate: Float64[np.ndarray, "K"]


_FITTED = (
  *((1328, 0.4021), (2670, 0.4203), (3998, 0.434), (5329, 0.4537)),
  *((6680, 0.4737), (7980, 0.4863), (9341, 0.5049), (10638, 0.5286)),
  *((11950, 0.5397), (13333, 0.5503), (14674, 0.5572), (15930, 0.5595)),
  *((17293, 0.569), (18645, 0.5705), (19966, 0.5785), (21234, 0.5834)),
  *((25369, 0.594), (26614, 0.5956), (29290, 0.6006), (30728, 0.6056)),
  *((32016, 0.6023), (34519, 0.6133), (37218, 0.6158), (39854, 0.6201)),
)
_LATER = (
  *((49272, 0.627), (50640, 0.6253), (53125, 0.6314), (56114, 0.6314)),
  *((60089, 0.6314), (69376, 0.6358), (73280, 0.6465), (74800, 0.6402)),
  *((78470, 0.6447), (89367, 0.6402)),
)


def fig1_dense() -> Example:
  """The dense 8B run of 100,000 GPU-hours, as far as its markers were read.

  The authors fitted its first half (here 24 points to 39.9k GPU-hours) and
  drew the second (here 10 points) to show that the law foresaw it.

  Example:
    >>> import numpy as np
    >>> from scalerl_jax.scaling import verdict
    >>> from scalerl_jax.scaling.fit import fit_curve
    >>> run = fig1_dense()
    >>> fit = fit_curve(run.compute, run.pass_rate)
    >>> print(verdict.asymptote_line(fit))
    asymptote: 0.64 [0.62, 0.7]

    The later evaluations, which the fit has not seen: how far off the forecast
    is (root mean square), and how many of them the 90 % band holds.

    >>> mean, low, high = fit.predict(run.later_compute)
    >>> float(np.sqrt(np.mean((mean - run.later_pass_rate) ** 2)))
    0.005
    >>> inside = (low <= run.later_pass_rate) & (run.later_pass_rate <= high)
    >>> float(inside.mean())
    1.0

  Reference:
    Khatri et al., 2025, arXiv 2510.13786 (CC BY 4.0), Figure 1, digitised by
    a third party (the public rlhf-book repository); about 0.001 off in pass
    rate and 1 % in compute, overlapping markers missing.
  """
  fitted, later = np.array(_FITTED, float), np.array(_LATER, float)
  return Example(*fitted.T, *later.T)
