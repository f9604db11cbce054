"""What Poisson sampling says about which records take part in which step."""

import math

import numpy as np
from scipy import stats


def poisson_p_values(drawn, q):
    """Two-sided p-values of what Poisson sampling says about a (steps, records) table of draws."""
    steps, size = drawn.shape
    x = (drawn - q) / math.sqrt(q * (1 - q))  # independent, mean 0, variance 1

    def chi_square(sums, count):
        lower = stats.chi2.cdf((sums**2).sum() / count, len(sums))
        return 2 * min(lower, 1 - lower)

    def normal(products):
        return 2 * stats.norm.sf(abs(products.sum()) / math.sqrt(products.size))

    return {
        "rate": normal(x),
        "inclusions of each record": chi_square(x.sum(0), steps),
        "size of each batch": chi_square(x.sum(1), size),
        "consecutive steps": normal(x[1:] * x[:-1]),
        "steps an epoch apart": normal(x[10:] * x[:-10]),
        "neighbouring records": normal(x[:, 1:] * x[:, :-1]),
    }


def table(batches, size):
    """A (steps, records) table of how often each record is in each batch."""
    drawn = np.zeros((len(batches), size))
    for row, batch in zip(drawn, batches, strict=True):
        np.add.at(row, np.asarray(batch, dtype=int), 1)
    return drawn
