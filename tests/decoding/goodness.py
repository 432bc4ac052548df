"""Goodness of fit. Seeds are fixed, so a test's outcome is too; the bounds say how it was chosen.

A right build has a uniform p-value, so p > FITS fails for one choice of seeds in a million. A wrong one is caught:
each test that uses FITS also holds its own sample against a slightly wrong distribution and demands p < MISFITS.
"""

import numpy as np
import numpy.typing as npt
from scipy import stats

FITS = 1e-6
MISFITS = 1e-9


def chi_square_p(counts: npt.NDArray[np.int64], probabilities: npt.NDArray[np.float64]) -> float:
    """Return the p-value of `counts` under `probabilities`; 0 if anything impossible was counted."""
    possible = probabilities > 0
    if counts[~possible].any():
        return 0.0
    expected = probabilities[possible] / probabilities[possible].sum() * counts.sum()
    assert expected.min() >= 5, "too few samples for a chi-square test"
    return float(stats.chisquare(counts[possible], expected).pvalue)


def uniform_p(values: npt.NDArray[np.int64], buckets: int) -> float:
    """Return the p-value of `values` in 0 to `buckets` - 1 being uniform."""
    return chi_square_p(np.bincount(values.ravel(), minlength=buckets), np.full(buckets, 1 / buckets))
