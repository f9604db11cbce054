"""The true privacy of choosing the best of several trials, by brute force, and mistakes that it finds.

A trial here releases one number, N(0, σ²) or, for the neighbour, N(1, σ²), and the largest number wins. With F the law
of a trial and G the generating function of the number of trials, the winner's law is G(F), exactly.
"""

import math
import secrets

import numpy as np
from numpy.polynomial import Polynomial
from scipy.integrate import trapezoid
from scipy.stats import norm

from spectral_dp.accounting.selection import TrialsLaw


class FixedLaw(TrialsLaw):
    """A mistake: always the same number of trials, reported as random."""

    def draw(self, random_bits=secrets.randbits):
        return round(self.mean)


def winner_density(probabilities, mean, sigma, x):
    """Returns the density of the best of K trials N(mean, σ²); ``probabilities`` has that of each K from 0 on."""
    smaller, density = norm.cdf(x, mean, sigma), norm.pdf(x, mean, sigma)
    return density * Polynomial(probabilities).deriv()(smaller)  # the derivative of G(F)


def true_delta(probabilities, sigma, epsilon):
    """Returns the smallest δ for which the winner is (ε, δ)-DP, for the two data sets of this module, in both orders.

    The event that there is no trial at all has the same probability for both, and adds nothing.
    """
    x = np.linspace(-8 * sigma, 1 + 8 * sigma, 8_001)
    one, other = (winner_density(probabilities, mean, sigma, x) for mean in (0, 1))
    grown = math.exp(epsilon)
    return max(trapezoid(np.maximum(p - grown * q, 0), x) for p, q in ((one, other), (other, one)))


def true_delta_with_exact_score(probabilities, epsilon):
    """The same for trials that draw one of two settings, release nothing else, and have an *exact* private score.

    The records decide which of the two settings has the better score, so the winner is the better one unless all
    trials drew the other one. A trial by itself tells nothing at all (its ε is 0).
    """
    all_other = sum(p * 0.5**k for k, p in enumerate(probabilities) if k)
    some = sum(probabilities[1:])
    one, other = np.array([some - all_other, all_other]), np.array([all_other, some - all_other])
    return float(np.maximum(one - math.exp(epsilon) * other, 0).sum())
