"""Bounds from a canary in many sampled steps: valid for honest runs, and dishonest ones are found out."""

import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from spectral_dp.accounting import delta, epsilon
from spectral_dp.audit.statistics.bounds import count_mistakes, gaussian_lower_bound
from spectral_dp.audit.statistics.sampled import log_likelihood_ratio, sampled_lower_bound

DELTA, CONFIDENCE = 1e-5, 0.95
CLAIM = {"noise_multiplier": 1.0, "sample_rate": 0.2, "steps": 30}


def run(rng, n, *, noise_multiplier=1.0, sample_rate=0.2, steps=30):
    """Per-step scores of n canaries that were in, and of n that were not."""
    inside, outside = noise_multiplier * rng.normal(size=(2, n, steps))
    return inside + (rng.random((n, steps)) < sample_rate), outside


def bound(inside, outside, **claim):
    return sampled_lower_bound(inside, outside, **(CLAIM | claim), delta=DELTA, confidence=CONFIDENCE)


def test_log_likelihood_ratio_is_that_of_the_densities():
    x = np.random.default_rng(0).normal(size=(4, 6))
    sigma, q = 0.8, 0.3
    inside = (1 - q) * norm.pdf(x, 0, sigma) + q * norm.pdf(x, 1, sigma)
    expected = np.log(inside / norm.pdf(x, 0, sigma)).sum(1)
    np.testing.assert_allclose(log_likelihood_ratio(x, sigma, q), expected, rtol=1e-12)


def test_log_likelihood_ratio_neither_overflows_nor_needs_sampling():
    """exp(5e7) is no float; without sampling the ratio is linear in the score."""
    x = np.array([[100.0, 0.0], [-100.0, 0.0]])
    np.testing.assert_allclose(log_likelihood_ratio(x, 1e-3, 0.5), [199e6 / 2 - 2 * math.log(2), -2 * math.log(2)])
    np.testing.assert_allclose(log_likelihood_ratio(x, 2.0, 1.0), [(199 - 1) / 8, (-201 - 1) / 8])


def test_the_bound_holds_as_often_as_it_says():
    """The truth is ruled out if the error bound is below half of 1 - δ(0): one accounting serves all runs."""
    runs, missed = 2000, 0
    truth = delta(1.0, 0.2, 30, 0.0)
    rng = np.random.default_rng(0)
    for _ in range(runs):
        inside, outside = (log_likelihood_ratio(x, 1.0, 0.2) for x in run(rng, 110))
        missed += 1 - 2 * count_mistakes(inside, outside, CONFIDENCE).error_bound > truth
    assert 0.2 * (1 - CONFIDENCE) * runs < missed <= binom.ppf(0.9999, runs, 1 - CONFIDENCE)


def test_no_more_noise_is_possible_and_a_little_less_is():
    """The bisection ends where the accountant's total variation crosses the observed one."""
    result = bound(*run(np.random.default_rng(1), 1000))
    observed = 1 - 2 * result.error_bound
    assert delta(result.noise_multiplier, 0.2, 30, 0.0) < observed
    assert delta(result.noise_multiplier / 1.002, 0.2, 30, 0.0) > observed
    assert result.epsilon == pytest.approx(epsilon(result.noise_multiplier, 0.2, 30, DELTA))


def test_an_honest_run_is_bounded_closely_from_below():
    result = bound(*run(np.random.default_rng(2), 3000))
    claimed = epsilon(1.0, 0.2, 30, DELTA)
    assert 0.8 * claimed < result.epsilon <= claimed
    assert 1.0 <= result.noise_multiplier < 1.15


@pytest.mark.parametrize(("true_noise", "n"), [(0.9, 6000), (2 / 3, 300), (0.0, 100)])
def test_too_little_noise_is_found(true_noise, n):
    """A threshold fixed at zero would overlook the last: without noise *all* likelihood ratios are negative."""
    result = bound(*run(np.random.default_rng(3), n, noise_multiplier=true_noise))
    assert result.noise_multiplier < 1.0
    assert result.epsilon > epsilon(1.0, 0.2, 30, DELTA)


def test_a_canary_in_every_batch_is_explained_by_no_noise_at_all():
    """At q = 0.01 a canary stays out of all 30 batches three times in four: nobody could be right this often."""
    inside, outside = run(np.random.default_rng(4), 300, sample_rate=1.0)
    result = bound(inside, outside, sample_rate=0.01)
    assert result.noise_multiplier == 0
    assert result.epsilon == math.inf
    assert 0 < result.direct_epsilon < math.inf


def test_scores_that_say_nothing_prove_nothing():
    result = bound(np.zeros((50, 30)), np.zeros((50, 30)))
    assert (result.noise_multiplier, result.epsilon, result.direct_epsilon) == (math.inf, 0, 0)


def test_the_direct_bound_assumes_less_and_says_less():
    result = bound(*run(np.random.default_rng(7), 500, noise_multiplier=0.5))
    assert 0 < result.direct_epsilon < result.epsilon
    # (ε, δ)-DP makes FPR + FNR at least 2(1 - δ) / (1 + e^ε): the observed bound is met with equality.
    assert 2 * (1 - DELTA) / (1 + math.exp(result.direct_epsilon)) == pytest.approx(2 * result.error_bound)


def test_one_step_without_sampling_is_the_gaussian_bound():
    inside, outside = run(np.random.default_rng(5), 800, sample_rate=1.0, steps=1)
    ours = bound(inside, outside, sample_rate=1.0, steps=1)
    gaussian = gaussian_lower_bound(inside[:, 0], outside[:, 0], delta=DELTA, confidence=CONFIDENCE)
    assert 1 / ours.noise_multiplier == pytest.approx(gaussian.mu, rel=2e-3)
    assert gaussian.epsilon * 0.997 < ours.epsilon <= gaussian.epsilon


def test_any_score_of_a_whole_run_will_do():
    inside, outside = run(np.random.default_rng(6), 3000)
    result = bound(inside.sum(1), outside.sum(1))
    assert 1 < result.noise_multiplier < 2
    assert result.threshold == pytest.approx(3, abs=0.5), "half way between 0 and q * steps"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample_rate": 0.0}, "sample_rate must be"),
        ({"steps": 0}, "steps must be"),
        ({"steps": 29}, r"shape \(canaries, 29\); got \(5, 30\)"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be"),
        ({"noise_multiplier": 0.0}, "needs noise"),
    ],
)
def test_bad_claims_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        bound(np.zeros((5, 30)), np.zeros((5, 30)), **change)
