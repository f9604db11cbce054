"""What the scores of a canary prove about many Poisson-sampled Gaussian steps.

The canary is a record of the data set, or it is not; if it is, it joins every batch with probability q. The auditor
sees all releases and computes for step t the score x_t = <release_t * B, v>/C: N(1, σ²) in the steps in which the
canary took part, N(0, σ²) in the others. :func:`log_likelihood_ratio` sums up the steps; a threshold on it decides.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spectral_dp import accounting
from spectral_dp.accounting.privacy_loss import NOISE_RANGE, checked, checked_phase
from spectral_dp.audit.statistics.bounds import Mistakes, Numbers, count_mistakes

_RESOLUTION = 1e-3  # how closely, relatively, the largest explaining noise multiplier is found


def log_likelihood_ratio(x: NDArray[np.floating], sigma: float, q: float) -> NDArray[np.float64]:
    """Returns log P[x | in] / P[x | out], summed over the steps: the most powerful score (Neyman-Pearson).

    Args:
        x: Per-step scores ``(..., T)``.
        sigma: Claimed noise multiplier, positive.
        q: Claimed sample rate.
    """
    if not checked("noise_multiplier", sigma) > 0:
        raise ValueError("the likelihood ratio needs noise: the claimed noise multiplier is 0")
    joined = math.log(checked("sample_rate", q)) + (2 * np.asarray(x, dtype=np.float64) - 1) / (2 * sigma**2)
    stayed_away = math.log1p(-q) if q < 1 else -math.inf
    return np.asarray(np.logaddexp(stayed_away, joined).sum(-1))


@dataclass(frozen=True, kw_only=True)
class SampledLowerBound(Mistakes):
    """How much is revealed at least, with the confidence that was asked for.

    Attributes:
        noise_multiplier: More noise than this cannot have been added. Infinite if the scores say nothing; 0 if *no*
            amount of noise explains them: then the canary took part more often than claimed.
        epsilon: What that noise multiplier spends at the ``delta`` that was asked for, by our accountant.
        direct_epsilon: A lower bound for epsilon that assumes neither Gaussian noise nor Poisson sampling. Never more
            than ``epsilon``, but for the bisection's resolution.
    """

    noise_multiplier: float
    epsilon: float
    direct_epsilon: float


def sampled_lower_bound(
    scores_in: Numbers,
    scores_out: Numbers,
    *,
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    delta: float,
    confidence: float,
) -> SampledLowerBound:
    """Returns a lower bound for the epsilon of a run of sampled Gaussian steps.

    Formal guarantee:

    * Bounded: with probability at least ``confidence`` the true noise multiplier s is at most
      ``result.noise_multiplier``, so that the accountant's epsilon for s is at least ``result.epsilon``.
    * Assumption: the scores are independent, each a function of the releases of a run of ``steps`` Poisson-sampled
      Gaussian steps of noise multiplier s and rate ``sample_rate``, with (``scores_in``) or without (``scores_out``)
      the canary.

    Proof: in general FNR + e^ε FPR >= 1 - δ_s(ε), and the same with FPR and
    FNR exchanged. At ε = 0 both say FPR + FNR >= 1 - δ_s(0), total variation being symmetric, and that is the sum which
    :func:`count_mistakes` bounds. The accountant's δ_s is an upper bound and falls with s, so every s with
    1 - δ_s(0) > 2 ``error_bound`` is ruled out; a bisection finds the least of them.

    The claimed noise multiplier has no part in the proof: it only weighs the steps and starts the search.

    Args:
        scores_in: Per-step scores ``(n, steps)`` of n canaries that were in the data, or any ``(n,)`` numbers that are
            larger for those: one per canary, in an order that is not that of their values.
        scores_out: The same of canaries that were not.
        noise_multiplier: The claimed noise multiplier.
        sample_rate: The claimed probability that a record takes part in a step.
        steps: Number of releases.
        delta: The failure probability at which epsilon is stated, between 0 and 1.
        confidence: Probability with which the bound must hold, at least 3/4.
    """
    claimed = checked_phase(noise_multiplier, sample_rate, steps)
    checked("delta", delta)
    inside, outside = (
        log_likelihood_ratio(_checked_steps(scores, steps), claimed.noise_multiplier, sample_rate)
        if np.ndim(scores) == 2
        else scores
        for scores in (scores_in, scores_out)
    )
    mistakes = count_mistakes(inside, outside, confidence)
    most = _most_noise(claimed, 1 - 2 * mistakes.error_bound)
    # Both (ε, δ) inequalities, FNR + e^ε FPR >= 1 - δ and its mirror image, added up.
    odds = (1 - delta) / mistakes.error_bound - 1
    return SampledLowerBound(
        **vars(mistakes),
        noise_multiplier=most,
        epsilon=accounting.epsilon(most, sample_rate, steps, delta) if math.isfinite(most) else 0.0,
        direct_epsilon=math.log(max(odds, 1.0)),
    )


def _most_noise(claimed: accounting.Phase, distance: float) -> float:
    """Returns the least noise multiplier, up to ``_RESOLUTION``, whose total variation is below ``distance``."""

    def ruled_out(sigma: float) -> bool:
        return accounting.delta(sigma, claimed.sample_rate, claimed.steps, 0.0) < distance

    if distance <= 0:
        return math.inf
    least, most = NOISE_RANGE
    low = high = min(max(claimed.noise_multiplier, least), most)
    while ruled_out(low):
        if low == least:
            return 0.0
        low, high = max(low / 2, least), low
    while not ruled_out(high):
        if high == most:
            return math.inf
        low, high = high, min(2 * high, most)
    while high > low * (1 + _RESOLUTION):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if ruled_out(middle) else (middle, high)
    return high


def _checked_steps(scores: Numbers, steps: int) -> NDArray[np.float64]:
    values = np.asarray(scores, dtype=np.float64)
    if values.shape[1] != steps:
        raise ValueError(f"per-step scores must be of shape (canaries, {steps}); got {values.shape}")
    return values
