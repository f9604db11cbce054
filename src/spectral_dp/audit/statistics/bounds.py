"""What the scores of a canary prove about one Gaussian release.

A *canary* is a record made to be noticed. Its *score* is the released value along the canary's direction, over σC:
about N(1/σ, 1) if the canary took part, N(0, 1) if not. The auditor says "took part" from a threshold upwards. How
often that is mistaken bounds the privacy of the release from below.

Why mistakes of both kinds are counted together. Every test of a mu-GDP mechanism (Dong, Roth & Su 2019) has
FPR + FNR >= 2 Φ(-mu/2). Among as many scores with the canary as without, a score is mistaken at the mean
rate (FPR + FNR)/2, for which the upper Clopper-Pearson bound is valid (see :func:`count_mistakes`): this gives
mu >= 2 Φ⁻¹(1 - rate). Bounding each rate on its own, mu >= Φ⁻¹(1 - FPR) - Φ⁻¹(FNR), pays for two bounds and adds up two
worst cases: it takes almost three times as many scores for the same precision.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri
from scipy.stats import beta

from spectral_dp.accounting.privacy_loss import checked, gaussian_epsilon

#: Numbers in one dimension, such as the scores of canaries.
Numbers = NDArray[np.floating] | Sequence[float]

_HELD_OUT = 11  # one score in so many chooses the threshold; a prime, to meet every direction of a cycling canary
_LEAST_MU = 1e-8  # a smaller one is no leak at all: epsilon is 0


def clopper_pearson(successes: int, trials: int, confidence: float) -> tuple[float, float]:
    """Returns exact lower and upper bounds for a rate, *each* one-sided at ``confidence`` (both at 2 confidence - 1).

    >>> [round(bound, 4) for bound in clopper_pearson(0, 100, 0.95)]
    [0.0, 0.0295]
    """
    checked_confidence(confidence)
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"need 0 <= successes <= trials and trials >= 1; got {successes} of {trials}")
    misses = trials - successes
    lower = float(beta.ppf(1 - confidence, successes, misses + 1)) if successes else 0.0
    upper = float(beta.isf(1 - confidence, successes + 1, misses)) if misses else 1.0
    return lower, upper


def corrected(confidence: float, looks: int) -> float:
    """Returns the confidence at which to take each of ``looks`` bounds, so that all hold at ``confidence``.

    Bonferroni: nothing is assumed of how the looks depend on each other. Use it to audit several directions or layers
    and report the worst.

    >>> round(corrected(0.95, 5), 6)
    0.99
    """
    if looks < 1:
        raise ValueError(f"the number of looks must be positive; got {looks}")
    return 1 - (1 - checked_confidence(confidence)) / looks


def checked_confidence(confidence: float) -> float:
    """Returns the confidence if it is valid, and raises ``ValueError`` otherwise.

    The bounds of this module are proved for confidences of at least 3/4.
    """
    if not 0.75 <= confidence < 1:
        raise ValueError(f"confidence must be at least 0.75 and below 1, for instance 0.95; got {confidence!r}")
    return confidence


@dataclass(frozen=True, kw_only=True)
class Mistakes:
    """How often "the canary took part" was wrong, judged on scores that had no say in the threshold.

    Attributes:
        threshold: From this score upwards the auditor says that the canary took part.
        false_positives: Scores without the canary that reached the threshold.
        false_negatives: Scores with the canary that did not.
        trials: Scores judged of *each* kind.
        error_bound: Upper bound for (FPR + FNR) / 2, at the confidence that was asked for.
    """

    threshold: float
    false_positives: int
    false_negatives: int
    trials: int
    error_bound: float


@dataclass(frozen=True, kw_only=True)
class LowerBound(Mistakes):
    """How much is revealed at least, with the confidence that was asked for.

    Attributes:
        mu: The release is no better than a Gaussian query of noise multiplier ``1 / mu``.
        epsilon: What such a query spends at the ``delta`` that was asked for.
    """

    mu: float
    epsilon: float


def gaussian_lower_bound(scores_in: Numbers, scores_out: Numbers, *, delta: float, confidence: float) -> LowerBound:
    """Returns a lower bound for mu, and the epsilon at ``delta`` that belongs to it, of one Gaussian release.

    Formal guarantee:

    * Bounded: ``result.mu <= mu`` and ``result.epsilon <= gaussian_epsilon(1 / mu, delta)``, both together with
      probability at least ``confidence``.
    * Assumption: the scores are independent, each a function of one mu-GDP release with (``scores_in``) or without
      (``scores_out``) the canary.

    Larger scores should speak for the canary. Nothing else is assumed of them: infinite scores, from a direction
    without noise, are allowed. Scores of several directions may be pooled, but a direction with less noise than the
    others shows best on its own.

    >>> rng = np.random.default_rng(0)
    >>> bound = gaussian_lower_bound(rng.normal(1, 1, 2000), rng.normal(0, 1, 2000), delta=1e-5, confidence=0.95)
    >>> 0.8 < bound.mu < 1 and 3.5 < bound.epsilon < gaussian_epsilon(1.0, 1e-5)
    True

    Args:
        scores_in: Scores of releases with the canary, in any order that is not that of their values.
        scores_out: Scores of releases without it.
        delta: The failure probability at which epsilon is stated, between 0 and 1.
        confidence: Probability with which the bound must hold, at least 3/4. For the worst of several bounds see
            :func:`corrected`.
    """
    checked("delta", delta)
    mistakes = count_mistakes(scores_in, scores_out, confidence)
    mu = max(-2 * float(ndtri(mistakes.error_bound)), 0.0)
    epsilon = gaussian_epsilon(1 / mu, delta) if mu > _LEAST_MU else 0.0
    return LowerBound(**vars(mistakes), mu=mu, epsilon=epsilon)


def count_mistakes(scores_in: Numbers, scores_out: Numbers, confidence: float) -> Mistakes:
    """Chooses a threshold on one part of the scores and counts the mistakes it makes on the rest.

    Formal guarantee:

    * Bounded: p = (FPR + FNR) / 2 is at most ``error_bound`` with probability at least ``confidence`` if p <= 1/2. If
      p > 1/2, ``error_bound`` is at least 1/2 with that probability.
    * Assumption: the scores are independent.

    Proof: given the threshold, which other scores chose, the mistakes are a sum of 2n independent Bernoullis of mean
    rate p. Let p <= 1/2 (lowering rates until it is only makes mistakes fewer). The bound fails if there are at most k
    mistakes, for a k to which the binomial (2n, p) gives a lower tail of at most 1 - confidence <= 1/4. Then
    k <= 2np - 1 (Greenberg & Mohri 2014, Thm. 1), and for such a k the lower tail of the sum is at most that of the
    binomial (Hoeffding 1956, Thm. 4).

    Midway between the means is the best threshold for Gaussian scores, and an eleventh of the scores finds it well
    enough: trying all thresholds on a half of them does worse. Surplus scores of the more numerous kind are left out.
    """
    inside, outside = _checked_scores("scores_in", scores_in), _checked_scores("scores_out", scores_out)
    threshold = float(sum(np.clip(scores[::_HELD_OUT], -1e100, 1e100).mean() for scores in (inside, outside)) / 2)
    inside, outside = (np.delete(scores, np.s_[::_HELD_OUT]) for scores in (inside, outside))
    trials = min(len(inside), len(outside))
    missed = int(np.count_nonzero(inside[:trials] < threshold))
    imagined = int(np.count_nonzero(outside[:trials] >= threshold))
    return Mistakes(
        threshold=threshold,
        false_positives=imagined,
        false_negatives=missed,
        trials=trials,
        error_bound=clopper_pearson(missed + imagined, 2 * trials, confidence)[1],
    )


def _checked_scores(name: str, scores: Numbers) -> NDArray[np.float64]:
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1 or len(values) < 2 or np.isnan(values).any():
        raise ValueError(
            f"{name} must be at least two numbers in one dimension, none of them NaN; got shape {values.shape}, "
            f"{int(np.isnan(values).sum())} of them NaN"
        )
    return values
