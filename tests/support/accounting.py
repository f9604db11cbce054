"""What several tests of accounting share: ledgers of given phases, and divergences by brute force."""

import math

import numpy as np
from scipy.integrate import trapezoid
from scipy.stats import norm

from spectral_dp.accounting import Ledger
from spectral_dp.relations import Relation


def ledger_of(*phases, relation=Relation.ADD_OR_REMOVE_ONE):
    """Returns a new ledger in which these phases were recorded."""
    ledger = Ledger(relation)
    for phase in phases:
        ledger.record(*phase)
    return ledger


def hockey_stick(upper, lower, eps, span):
    """Returns the divergence, the integral of max(0, upper - e^eps lower) over [-span, span]."""
    x = np.linspace(-span, span, 100_001)
    return trapezoid(np.maximum(upper(x) - math.exp(eps) * lower(x), 0), x)


def mixture(rate, mean, scale):
    """Returns the density of (1 - rate) N(0, scale²) + rate N(mean, scale²)."""
    return lambda x: (1 - rate) * norm.pdf(x, 0, scale) + rate * norm.pdf(x, mean, scale)
