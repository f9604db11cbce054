"""The pairs of distributions that dominate one step, given by their hockey-stick divergences.

``calibration.py`` proves that these pairs dominate. Their divergences have closed forms, which are evaluated here for
a whole grid at once and with a small relative error. They are given for ε >= 0 and for both orders of a pair. At
negative ε, one order follows from the other: δ(-ε) = 1 - e^-ε + e^-ε reverse(ε).

Let μ = 1/σ, and let G(u) = Φ(μ/2 - u/μ) - e^u Φ(-μ/2 - u/μ) be the divergence of two Gaussians whose means differ by
one, in units of the sensitivity:

- A record is removed: δ(ε) = q G(u) at e^u = 1 + (e^ε - 1)/q (Balle, Barthe & Gaboardi 2018, Thm. 2).
- A record is added: δ(ε) = q e^(ε+u) G(-u) at e^u = 1 + (e^-ε - 1)/q, and δ(ε) = 0 where no such u exists.
- A record is replaced (means ±1/2): the densities of the two mixtures differ by a factor of e^ε at one threshold. The
  code solves for this threshold.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr

from spectral_dp.relations import Relation

_REACH = 9.9  # standard deviations: a Gaussian exceeds this with a probability of less than 1e-22

Vector = NDArray[np.float64]


class Pair(NamedTuple):
    """Two distributions, given by their hockey-stick divergences in both orders, for epsilons from 0 on."""

    divergence: Callable[[Vector], Vector]
    reverse: Callable[[Vector], Vector]
    lowest: float  # losses are below this, or above ``highest``, with a probability of less than 1e-22
    highest: float


@lru_cache(maxsize=256)
def dominating_pairs(noise_multiplier: float, sample_rate: float, relation: Relation) -> tuple[Pair, ...]:
    """Returns the dominating pairs of one step: two, or a single one that is the same in both orders."""
    mu, q = 1 / noise_multiplier, sample_rate

    def loss(deviations: float, mean: float) -> float:
        """Returns log(mixture with this mean / N(0)), at a point so many standard deviations from 0."""
        u = mean * mu * (deviations - mean * mu / 2)
        if q == 1:
            return u
        return math.log1p(q * math.expm1(u)) if u < 1 else u + math.log(q) + math.log1p((1 - q) / q * math.exp(-u))

    if relation is Relation.REPLACE_ONE:
        replaced, far = partial(_replaced, mu, q), _REACH + mu / 2
        reach = loss(far, 0.5) - loss(far, -0.5)
        return (Pair(replaced, replaced, -reach, reach),)
    removed, added = partial(_removed, mu, q), partial(_added, mu, q)
    low, middle, high = (loss(deviations, 1.0) for deviations in (-_REACH, _REACH, _REACH + mu))
    return Pair(removed, added, low, high), Pair(added, removed, -max(middle, -low), -low)


def gaussian_divergence(mu: float, u: Vector) -> Vector:
    """Returns G(u), the divergence of two Gaussians whose means differ by μ standard deviations."""
    upper = log_ndtr(mu / 2 - u / mu)
    lower = u + log_ndtr(-mu / 2 - u / mu)
    return -np.exp(upper) * np.expm1(np.minimum(lower - upper, 0.0))


def _removed(mu: float, q: float, epsilons: Vector) -> Vector:
    if q == 1:
        return gaussian_divergence(mu, epsilons)
    small = np.log1p(np.expm1(np.minimum(epsilons, 1.0)) / q)
    large = epsilons - math.log(q) + np.log1p((q - 1) * np.exp(-np.maximum(epsilons, 1.0)))
    return q * gaussian_divergence(mu, np.where(epsilons < 1, small, large))  # both are u, each without cancellation


def _added(mu: float, q: float, epsilons: Vector) -> Vector:
    if q == 1:
        return gaussian_divergence(mu, epsilons)
    deltas = np.zeros_like(epsilons)
    eps = epsilons[solvable := epsilons < -math.log1p(-q)]
    with np.errstate(divide="ignore"):  # just below the largest loss, rounding may make u minus infinity
        small = np.log1p(np.maximum(np.expm1(-np.minimum(eps, 0.5)) / q, -1.0))
        u = np.where(eps < 0.5, small, np.log(np.maximum(np.exp(-eps) - (1 - q), 0.0)) - math.log(q))
    u = np.maximum(u, -700.0)  # δ grows with u
    deltas[solvable] = q * np.exp(eps + u) * gaussian_divergence(mu, -u)
    return deltas


def _replaced(mu: float, q: float, eps: Vector) -> Vector:
    log_rest = math.log1p(-q) if q < 1 else -math.inf
    with np.errstate(divide="ignore"):  # minus infinity at zero, as it should be
        log_expm1 = eps + np.log(-np.expm1(-eps))
    log_sinh = log_expm1 - eps / 2 - math.log(2)
    # The threshold t solves loss(t) = ε: t = 2σ² (arcsinh(α sinh(ε/2)) + ε/2), log α = 1/(8σ²) + log((1 - q)/q).
    log_argument = log_rest - math.log(q) + mu**2 / 8 + log_sinh
    arcsinh = np.logaddexp(np.logaddexp(0, 2 * log_argument) / 2, log_argument)
    deviations = 2 / mu * (arcsinh + eps / 2)
    upper, lower = log_ndtr(mu / 2 - deviations), eps + log_ndtr(-mu / 2 - deviations)
    drawn = -q * np.exp(upper) * np.expm1(np.minimum(lower - upper, 0.0))
    return np.maximum(drawn - np.exp(log_rest + log_expm1 + log_ndtr(-deviations)), 0.0)
