"""Bounds from canary scores: they hold as often as they say, and they are close enough to convict.

Where the probability of a mistake can be computed it is, instead of simulated. Simulations are seeded; how many misses
they may show is the 99.99 % quantile of a bound that is exactly as good as it says.
"""

import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from spectral_dp.accounting import gaussian_epsilon
from spectral_dp.audit.statistics.bounds import (
    clopper_pearson,
    corrected,
    count_mistakes,
    gaussian_lower_bound,
)

DELTA, CONFIDENCE = 1e-5, 0.95
RUNS = 2000
ALLOWED = binom.ppf(0.9999, RUNS, 1 - CONFIDENCE)


def scores(rng, mu, n):
    return rng.normal(mu, 1, n), rng.normal(0, 1, n)


def bound(inside, outside):
    return gaussian_lower_bound(inside, outside, delta=DELTA, confidence=CONFIDENCE)


@pytest.mark.parametrize("confidence", [0.75, 0.95, 0.999])
@pytest.mark.parametrize("trials", [1, 7, 60])
def test_clopper_pearson_covers_every_rate(trials, confidence):
    """Catches bounds that are two-sided (too wide: the worst rate would be covered too often) or not exact."""
    low, high = np.transpose([clopper_pearson(k, trials, confidence) for k in range(trials + 1)])
    worst = np.concatenate([high[:-1] + 1e-9, low[1:] - 1e-9])  # a rate just beyond a bound
    rates = np.concatenate([np.linspace(0, 1, 101), worst])[:, None]
    probability = binom.pmf(np.arange(trials + 1), trials, rates)
    for wrong in (high < rates, low > rates):
        missed = (probability * wrong).sum(1).max()
        assert 0.9 * (1 - confidence) < missed <= (1 - confidence) * (1 + 1e-6)


def test_clopper_pearson_at_the_ends():
    assert clopper_pearson(0, 10, 0.95) == (0.0, pytest.approx(1 - 0.05**0.1))
    assert clopper_pearson(10, 10, 0.95) == (pytest.approx(0.05**0.1), 1.0)


@pytest.mark.parametrize("confidence", [0.75, 0.95])
def test_counting_both_kinds_of_mistakes_together_is_valid(confidence):
    """The two kinds have different rates, so their total is no binomial: Hoeffding's theorem, checked exactly."""
    missed = []
    for trials in (1, 2, 10, 40):
        limits = np.array([clopper_pearson(k, 2 * trials, confidence)[1] for k in range(2 * trials + 1)])
        kinds = [binom.pmf(np.arange(trials + 1), trials, rate) for rate in np.linspace(0, 1, 21)]
        for i, false_positives in enumerate(kinds):
            for j, false_negatives in enumerate(kinds):
                total = np.convolve(false_positives, false_negatives)
                missed.append(total[limits < min((i + j) / 40, 0.5) - 1e-12].sum())
    assert 0.8 * (1 - confidence) < max(missed) <= 1 - confidence


@pytest.mark.parametrize(("mu", "n"), [(0.5, 300), (2.0, 60)])
def test_the_bound_holds_as_often_as_it_says(mu, n):
    rng = np.random.default_rng(0)
    missed = sum(bound(*scores(rng, mu, n)).mu > mu for _ in range(RUNS))
    assert 0.2 * (1 - CONFIDENCE) * RUNS < missed <= ALLOWED


def test_a_threshold_chosen_on_the_scores_it_judges_would_not():
    """Negative control: the best of all thresholds, uncorrected, promises too much."""
    rng = np.random.default_rng(0)
    missed = 0
    for _ in range(RUNS):
        inside, outside = (np.sort(kind) for kind in scores(rng, 0.5, 300))
        thresholds = np.concatenate([inside, outside])
        mistakes = np.searchsorted(inside, thresholds) + 300 - np.searchsorted(outside, thresholds)
        missed += -2 * norm.ppf(clopper_pearson(int(mistakes.min()), 600, CONFIDENCE)[1]) > 0.5
    assert missed > ALLOWED


@pytest.mark.parametrize("mu", [0.5, 1.0, 2.0])
def test_the_bound_is_closer_than_bounding_each_rate(mu):
    rng = np.random.default_rng(1)
    ours, theirs = [], []
    for _ in range(100):
        inside, outside = scores(rng, mu, 500)
        result = bound(inside, outside)
        ours.append(result.mu)
        each = corrected(CONFIDENCE, 2)
        false_positive = clopper_pearson(result.false_positives, result.trials, each)[1]
        false_negative = clopper_pearson(result.false_negatives, result.trials, each)[1]
        theirs.append(norm.isf(false_positive) - norm.ppf(false_negative))
    assert mu - np.mean(ours) < 0.7 * (mu - np.mean(theirs))


def test_ten_percent_too_little_noise_is_found_and_enough_noise_is_not():
    rng = np.random.default_rng(2)
    claimed = gaussian_epsilon(1.0, DELTA)
    assert bound(*scores(rng, 1 / 0.9, 6000)).epsilon > claimed
    assert bound(*scores(rng, 1.0, 6000)).epsilon <= claimed


def test_epsilon_belongs_to_mu():
    result = bound(*scores(np.random.default_rng(3), 1.0, 1000))
    assert result.epsilon == pytest.approx(gaussian_epsilon(1 / result.mu, DELTA))
    assert result.error_bound == pytest.approx(norm.cdf(-result.mu / 2))


@pytest.mark.parametrize(("present", "absent"), [(1.0, 0.0), (math.inf, 0.0), (math.inf, -math.inf)])
def test_a_direction_without_noise_is_convicted(present, absent):
    """Every score right: no mistake in 2n trials leaves an error rate of at most 1 - 0.05^(1/2n)."""
    result = bound(np.full(220, present), np.full(220, absent))
    assert result.false_positives == result.false_negatives == 0
    assert result.trials == 200
    assert result.error_bound == pytest.approx(1 - 0.05 ** (1 / 400))
    assert result.mu > 4.8


@pytest.mark.parametrize(("present", "absent"), [(0.0, 0.0), (0.0, 1.0)])
def test_scores_that_say_nothing_prove_nothing(present, absent):
    result = bound(np.full(100, present), np.full(100, absent))
    assert result.mu == result.epsilon == 0


def test_the_threshold_comes_from_scores_that_are_not_judged():
    inside, outside = scores(np.random.default_rng(4), 1.0, 110)
    before = count_mistakes(inside, outside, CONFIDENCE)
    held_out = np.arange(110) % 11 == 0
    moved = count_mistakes(np.where(held_out, inside + 1, inside), outside, CONFIDENCE)
    judged = count_mistakes(np.where(held_out, inside, 100.0), outside, CONFIDENCE)
    assert moved.threshold == pytest.approx(before.threshold + 0.5)
    assert judged.threshold == before.threshold
    assert judged.false_negatives == 0


def test_surplus_scores_are_left_out():
    inside, outside = scores(np.random.default_rng(5), 1.0, 330)
    assert bound(inside, outside[:110]).trials == bound(inside[:110], outside).trials == 100


def test_several_looks():
    assert corrected(0.95, 1) == pytest.approx(0.95)
    assert corrected(0.95, 50) == pytest.approx(0.999)
    with pytest.raises(ValueError, match="positive; got 0"):
        corrected(0.95, 0)


@pytest.mark.parametrize("bad", [0.0, 0.7, 1.0, 95, math.nan])
def test_a_confidence_that_is_none_is_refused(bad):
    for call in (
        lambda: clopper_pearson(1, 2, bad),
        lambda: corrected(bad, 2),
        lambda: gaussian_lower_bound([1.0, 1.0], [0.0, 0.0], delta=DELTA, confidence=bad),
    ):
        with pytest.raises(ValueError, match="confidence must be"):
            call()


@pytest.mark.parametrize("bad", [[], [1.0], [1.0, math.nan], [[1.0, 2.0]]])
def test_bad_scores_are_refused_by_name(bad):
    with pytest.raises(ValueError, match="scores_in must be"):
        bound(bad, [0.0, 0.0])
    with pytest.raises(ValueError, match="scores_out must be"):
        bound([0.0, 0.0], bad)


def test_other_bad_values_are_refused():
    with pytest.raises(ValueError, match="delta must be"):
        gaussian_lower_bound([1.0, 1.0], [0.0, 0.0], delta=0.0, confidence=CONFIDENCE)
    with pytest.raises(ValueError, match="got 3 of 2"):
        clopper_pearson(3, 2, CONFIDENCE)
