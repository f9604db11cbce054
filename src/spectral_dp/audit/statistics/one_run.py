"""Auditing with one training run: many canaries at once (Steinke, Nasr & Jagielski 2023, arXiv:2305.08846).

Each of m canaries is put into the training data or left out by its own fair coin. After the one run the auditor says of
some which it was, and abstains from the others. Nothing is assumed of the training but (ε, δ)-DP.

Why that bounds ε. Given the release and the other coins, ε-DP lets no guess be right with probability above
q = e^ε / (1 + e^ε). So the number right out of r guesses is at most W ~ Binomial(r, q), in distribution. A δ adds F
canaries given away for free, at most 2mδ of them on average. Then (their Thm. 5.2 and Cor. 5.4)

    P[at least v right] <= P[W + F >= v] <= P[W >= v] + 2mδ * max_i P[v > W >= v - i] / i,

the worst F being one that gives away i canaries at once, with probability 2mδ / i.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit
from scipy.stats import binom

from spectral_dp.accounting.privacy_loss import bisect, checked
from spectral_dp.audit.statistics.bounds import Numbers, checked_confidence, corrected


@dataclass(frozen=True)
class OneRunBound:
    """The best of the bounds that were tried, each at a corrected confidence, so that all hold together.

    Attributes:
        epsilon: The run reveals at least this much at the ``delta`` that was asked for.
        guesses: How many canaries were guessed in the best try.
        correct: How many of these guesses were right.
        canaries: How many canaries there were.
    """

    epsilon: float
    guesses: int
    correct: int
    canaries: int


def guess(scores: Numbers, k_plus: int, k_minus: int) -> NDArray[np.int8]:
    """Guesses 1 ("was in") for the ``k_plus`` largest scores, -1 ("was out") for the ``k_minus`` least, 0 elsewhere.

    >>> guess([0.3, 2.0, -1.0, 0.1], 1, 2).tolist()
    [0, 1, -1, -1]
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1 or np.isnan(values).any():
        raise ValueError(f"scores must be numbers in one dimension, none of them NaN; got shape {values.shape}")
    if k_plus < 0 or k_minus < 0 or k_plus + k_minus > len(values):
        raise ValueError(f"cannot guess {k_plus} in and {k_minus} out among {len(values)} canaries")
    order = np.argsort(values, kind="stable")
    guesses = np.zeros(len(values), dtype=np.int8)
    guesses[order[:k_minus]] = -1
    guesses[order[len(values) - k_plus :]] = 1
    return guesses


def bound_from_guesses(
    scores: Numbers,
    included: NDArray[np.bool_] | Sequence[bool],
    *,
    guesses: Sequence[int],
    delta: float,
    confidence: float,
) -> OneRunBound:
    """Guesses the extreme scores, half of them in and half of them out, and returns the best bound of several tries.

    Formal guarantee:

    * Bounded: ``result.epsilon <= ε`` with probability at least ``confidence``, if the run was (ε, δ)-DP.
    * Assumption: each canary was included by an independent fair coin, and ``guesses`` was fixed before looking at
      ``included``. Nothing is assumed of noise or sampling.

    Args:
        scores: One score for each canary, computed from the releases alone. Larger scores speak for inclusion.
        included: Whether each canary was in the data, as its coin fell.
        guesses: How many canaries to guess, one number for each try. Every try is corrected for the others, so that few
            tries give better bounds.
        delta: The failure probability at which epsilon is stated, between 0 and 1.
        confidence: Probability with which the bound must hold, at least 3/4.
    """
    truth = np.where(np.asarray(included, dtype=bool), 1, -1)
    if truth.shape != np.shape(scores) or not guesses:
        raise ValueError(
            f"need one score and one coin per canary and at least one number of guesses; got scores of shape "
            f"{np.shape(scores)}, coins of shape {truth.shape}, guesses {list(guesses)}"
        )
    each = corrected(confidence, len(guesses))
    tries = []
    for r in guesses:
        correct = int(np.count_nonzero(guess(scores, r - r // 2, r // 2) == truth))
        epsilon = one_run_lower_bound(r, correct, len(truth), delta=delta, confidence=each)
        tries.append(OneRunBound(epsilon, r, correct, len(truth)))
    return max(tries, key=lambda tried: tried.epsilon)


def one_run_lower_bound(guesses: int, correct: int, canaries: int, *, delta: float, confidence: float) -> float:
    """Returns the epsilon that ``correct`` right ones among ``guesses`` rule out, for ``canaries`` fair coins.

    The guarantee is that of :func:`bound_from_guesses`, for a number of guesses that was fixed in advance.

    >>> round(one_run_lower_bound(100, 75, 1000, delta=1e-4, confidence=0.95), 3)  # the paper's appendix D
    0.673
    """
    least = 1 - checked_confidence(confidence)

    def ruled_out(epsilon: float) -> bool:
        return one_run_p_value(guesses, correct, canaries, epsilon=epsilon, delta=delta) < least

    if not ruled_out(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while ruled_out(high):
        low, high = high, 2 * high
    return bisect(ruled_out, good=low, bad=high)


def one_run_p_value(guesses: int, correct: int, canaries: int, *, epsilon: float, delta: float) -> float:
    """Returns a bound for the probability of at least ``correct`` right guesses under (epsilon, delta)-DP."""
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(f"need 0 <= correct <= guesses <= canaries; got {correct}, {guesses}, {canaries}")
    q = float(expit(checked("epsilon", epsilon)))
    enough = float(binom.sf(correct - 1, guesses, q))
    short_by = np.arange(1, correct + 1)
    almost = np.cumsum(binom.pmf(correct - short_by, guesses, q)) / short_by
    given_away = 2 * canaries * checked("delta", delta) * float(almost.max(initial=0.0))
    return min(enough + given_away, 1.0)
