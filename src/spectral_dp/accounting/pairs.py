"""The pairs of distributions that dominate one step, by their hockey-stick divergences.

``calibration.py`` says why these pairs dominate. Their divergences have closed forms, which are evaluated here for a
whole grid at once, and to a small relative error. They are given for ε >= 0 and both orders of a pair, because at
negative ε one follows from the other: δ(-ε) = 1 - e^-ε + e^-ε reverse(ε). In units of the sensitivity, with μ = 1/σ and
G(u) = Φ(μ/2 - u/μ) - e^u Φ(-μ/2 - u/μ) the divergence of two Gaussians at distance one:

- A record is removed: δ(ε) = q G(u) at e^u = 1 + (e^ε - 1)/q (Balle, Barthe & Gaboardi 2018, Thm. 2).
- A record is added: δ(ε) = q e^(ε+u) G(-u) at e^u = 1 + (e^-ε - 1)/q, and 0 where no such u exists.
- A record is replaced, means ±1/2: the two mixtures differ by factor e^ε at one threshold, which is solved for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr

from spectral_dp.relations import Relation

_REACH = 9.9  # standard deviations; a Gaussian is further out with a probability of less than 1e-22

Vector = NDArray[np.float64]


class Pair(NamedTuple):
    """Two distributions, by their hockey-stick divergence at epsilons from 0 on, in both orders."""

    divergence: Callable[[Vector], Vector]
    reverse: Callable[[Vector], Vector]
    lowest: float  # all but 1e-22 of the losses are not below, and not above
    highest: float


def dominating_pairs(noise_multiplier: float, sample_rate: float, relation: Relation) -> tuple[Pair, ...]:
    """Returns the dominating pairs of one step; where there is one only, it is its own mirror image."""
    mu, q = 1 / noise_multiplier, sample_rate

    def loss(deviations: float, mean: float) -> float:
        """The logarithm of the mixture with this mean over N(0), so many deviations from 0."""
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


def _gaussian(mu: float, u: Vector) -> Vector:
    upper = log_ndtr(mu / 2 - u / mu)
    lower = u + log_ndtr(-mu / 2 - u / mu)
    return -np.exp(upper) * np.expm1(np.minimum(lower - upper, 0.0))


def _removed(mu: float, q: float, epsilons: Vector) -> Vector:
    if q == 1:
        return _gaussian(mu, epsilons)
    small = np.log1p(np.expm1(np.minimum(epsilons, 1.0)) / q)
    large = epsilons - math.log(q) + np.log1p((q - 1) * np.exp(-np.maximum(epsilons, 1.0)))
    return q * _gaussian(mu, np.where(epsilons < 1, small, large))  # both are u; neither cancels where it is taken


def _added(mu: float, q: float, epsilons: Vector) -> Vector:
    if q == 1:
        return _gaussian(mu, epsilons)
    deltas = np.zeros_like(epsilons)
    eps = epsilons[solvable := epsilons < -math.log1p(-q)]
    with np.errstate(divide="ignore"):  # just below the largest loss, rounding may make u minus infinity
        small = np.log1p(np.maximum(np.expm1(-np.minimum(eps, 0.5)) / q, -1.0))
        u = np.where(eps < 0.5, small, np.log(np.maximum(np.exp(-eps) - (1 - q), 0.0)) - math.log(q))
    u = np.maximum(u, -700.0)  # δ grows with u
    deltas[solvable] = q * np.exp(eps + u) * _gaussian(mu, -u)
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
