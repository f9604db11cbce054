"""One training run, many canaries: the theorem's probabilities, exactly where they can be had."""

import math
from functools import cache

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import binom

from spectral_dp.accounting import gaussian_epsilon
from spectral_dp.audit.statistics.bounds import corrected
from spectral_dp.audit.statistics.one_run import bound_from_guesses, guess, one_run_lower_bound, one_run_p_value

CONFIDENCE, NO_DELTA = 0.95, 1e-12


def bounds(guesses, canaries, delta):
    """The lower bound for every possible number of right guesses."""
    return np.array(
        [one_run_lower_bound(guesses, v, canaries, delta=delta, confidence=CONFIDENCE) for v in range(guesses + 1)]
    )


@pytest.mark.parametrize(
    ("guesses", "correct", "canaries", "delta", "published"),
    [(100, 75, 1000, 1e-4, 0.673), (1510, 1439, 100_000, 1e-5, 2.675)],
)
def test_values_printed_in_the_paper(guesses, correct, canaries, delta, published):
    """Catches r for m in the delta term, or the term left out: both move the bound by more than 0.02."""
    ours = one_run_lower_bound(guesses, correct, canaries, delta=delta, confidence=CONFIDENCE)
    assert ours == pytest.approx(published, abs=1e-3)


@pytest.mark.parametrize(("guesses", "epsilon"), [(20, 1.0), (20, 3.0), (200, 0.1), (200, 3.0)])
def test_randomised_response_is_covered_exactly(guesses, epsilon):
    """It is the worst ε-DP mechanism: each guess right with probability e^ε / (1 + e^ε)."""
    missed = binom.pmf(np.arange(guesses + 1), guesses, expit(epsilon))[bounds(guesses, 500, NO_DELTA) > epsilon].sum()
    assert missed <= 1 - CONFIDENCE
    if guesses == 200:  # with few guesses, or near certainty, the steps of a binomial are too coarse
        assert missed > 0.5 * (1 - CONFIDENCE)


@pytest.mark.parametrize(("given_away", "probability"), [(1, 0.5), (10, 0.05), (40, 0.05), (100, 0.05)])
def test_canaries_given_away_by_delta_are_covered(given_away, probability):
    """With some probability so many of 100 random canaries are published: δ = probability * given_away / 100.

    The rest answers by randomised response. Negative control: without the δ term the bound fails.
    """
    epsilon, canaries = 1.0, 100
    right = np.arange(canaries + 1)
    distribution = (1 - probability) * binom.pmf(right, canaries, expit(epsilon))
    distribution += probability * binom.pmf(right - given_away, canaries - given_away, expit(epsilon))
    delta = probability * given_away / canaries
    assert distribution[bounds(canaries, canaries, delta) > epsilon].sum() <= 1 - CONFIDENCE
    if given_away >= 40:
        assert distribution[bounds(canaries, canaries, NO_DELTA) > epsilon].sum() > 1.5 * (1 - CONFIDENCE)


@pytest.mark.parametrize("delta", [1e-9, 1e-3, 1e-1])
@pytest.mark.parametrize(("guesses", "correct"), [(30, 21), (30, 30), (300, 250)])
def test_what_is_ruled_out_begins_at_zero(guesses, correct, delta):
    """The bisection relies on it: below 1/4 the p-value grows with epsilon."""
    p = np.array(
        [one_run_p_value(guesses, correct, 300, epsilon=e, delta=delta) for e in np.linspace(0, 8, 200)],
    )
    small = p[p < 0.25]
    assert np.array_equal(small, p[: len(small)])
    assert bool((np.diff(small) >= 0).all())


def test_gaussian_canaries_are_bounded_from_below():
    rng = np.random.default_rng(0)
    for sigma in (0.5, 1.0):
        included = rng.random(2000) < 0.5
        result = bound_from_guesses(
            included + sigma * rng.normal(size=2000),
            included,
            guesses=(50, 200, 600),
            delta=1e-5,
            confidence=CONFIDENCE,
        )
        assert 0.25 * gaussian_epsilon(sigma, 1e-5) < result.epsilon < gaussian_epsilon(sigma, 1e-5)
        assert result.canaries == 2000


def test_a_leaking_run_is_found():
    """Claimed sigma 1, true sigma 0.05."""
    rng = np.random.default_rng(1)
    included = rng.random(2000) < 0.5
    scores = included + 0.05 * rng.normal(size=2000)
    result = bound_from_guesses(scores, included, guesses=(50, 600), delta=1e-5, confidence=CONFIDENCE)
    assert result.guesses == result.correct == 600
    assert result.epsilon > gaussian_epsilon(1.0, 1e-5)


def test_several_tries_are_corrected_for_each_other():
    rng = np.random.default_rng(3)
    included = rng.random(200) < 0.5
    scores = included + 0.5 * rng.normal(size=200)
    result = bound_from_guesses(scores, included, guesses=(20, 101, 180), delta=1e-5, confidence=0.91)
    alone = bound_from_guesses(scores, included, guesses=(result.guesses,), delta=1e-5, confidence=0.97)
    assert result.epsilon == pytest.approx(alone.epsilon)
    assert (result.correct, result.canaries) == (alone.correct, 200)
    for r in (20, 101, 180):
        assert bound_from_guesses(scores, included, guesses=(r,), delta=1e-5, confidence=0.97).epsilon <= result.epsilon


def test_the_number_of_guesses_must_not_be_chosen_by_its_success():
    """Negative control: the best of thirty tries fails far more often than stated, unless it is corrected for."""
    rng = np.random.default_rng(2)
    epsilon, canaries, runs = 1.0, 300, 300
    tries = range(10, 301, 10)
    p_value = cache(lambda r, v: one_run_p_value(r, v, canaries, epsilon=epsilon, delta=NO_DELTA))
    least = []
    for _ in range(runs):
        included = rng.random(canaries) < 0.5
        right = rng.random(canaries) < expit(epsilon)
        scores = np.where(right == included, 1, -1) * rng.random(canaries)  # the surer, the farther from zero
        truth = np.where(included, 1, -1)
        least.append(min(p_value(r, int((guess(scores, r // 2, r // 2) == truth).sum())) for r in tries))
    allowed = binom.ppf(0.999, runs, 1 - CONFIDENCE)
    assert np.count_nonzero(np.array(least) < 1 - CONFIDENCE) > allowed
    assert np.count_nonzero(np.array(least) < 1 - corrected(CONFIDENCE, len(tries))) <= allowed


def test_guesses_are_the_extremes():
    assert guess([0.3, 2.0, -1.0, 0.1], 1, 1).tolist() == [0, 1, -1, 0]
    assert guess([0.3, 2.0, -1.0, 0.1], 0, 0).tolist() == [0, 0, 0, 0]
    assert guess(np.zeros(5), 2, 3).tolist() == [-1, -1, -1, 1, 1], "ties are split, never guessed twice"


def test_chance_proves_nothing():
    assert one_run_lower_bound(100, 50, 100, delta=1e-5, confidence=CONFIDENCE) == 0
    assert one_run_lower_bound(0, 0, 100, delta=1e-5, confidence=CONFIDENCE) == 0


def test_bad_values_are_refused():
    for counts in ((10, 11, 20), (30, 10, 20), (10, -1, 20)):
        with pytest.raises(ValueError, match="correct <= guesses <= canaries"):
            one_run_lower_bound(*counts, delta=1e-5, confidence=CONFIDENCE)
    with pytest.raises(ValueError, match="cannot guess 3 in and 2 out among 4"):
        guess([1.0, 2.0, 3.0, 4.0], 3, 2)
    with pytest.raises(ValueError, match="NaN"):
        guess([1.0, math.nan], 1, 0)
    with pytest.raises(ValueError, match="one coin per canary"):
        bound_from_guesses([1.0, 2.0], [True], guesses=(1,), delta=1e-5, confidence=CONFIDENCE)
    with pytest.raises(ValueError, match="at least one number of guesses"):
        bound_from_guesses([1.0], [True], guesses=(), delta=1e-5, confidence=CONFIDENCE)
    with pytest.raises(ValueError, match="confidence must be"):
        one_run_lower_bound(1, 1, 1, delta=1e-5, confidence=0.5)
