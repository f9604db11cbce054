"""Odds of an attacker: bounds that hold for every attack, tight for the Gaussian, and false when claimed smaller."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from spectral_dp.accounting import Ledger, gaussian_delta
from spectral_dp.accounting.membership import (
    Guarantee,
    guarantees_of,
    largest_detection_rate,
    largest_guess_accuracy,
)


def gaussian(noise_multiplier, steps=1):
    """A ledger of unsampled releases; the best test between them is known: their means are mu deviations apart."""
    ledger = Ledger()
    ledger.record(noise_multiplier, 1.0, steps)
    return guarantees_of(ledger), math.sqrt(steps) / noise_multiplier


@pytest.mark.parametrize(("noise_multiplier", "steps"), [(0.7, 1), (1.5, 1), (4.0, 9)])
def test_the_best_attack_on_a_gaussian_is_covered_and_nearly_reaches_the_bound(noise_multiplier, steps):
    guarantees, mu = gaussian(noise_multiplier, steps)
    best = norm.cdf(mu / 2)
    assert best <= largest_guess_accuracy(guarantees) + 1e-9
    assert largest_guess_accuracy(guarantees) == pytest.approx(best, abs=2e-3)
    for false_alarms in (0.001, 0.01, 0.1, 0.5):
        detected = norm.cdf(mu - norm.isf(false_alarms))
        assert detected <= largest_detection_rate(guarantees, false_alarms) + 1e-9
        assert largest_detection_rate(guarantees, false_alarms) < 1.35 * detected + 0.02


def test_an_attack_that_is_carried_out_stays_below_the_bound_and_beats_a_smaller_claim():
    """The negative control: for a release with two thirds of the claimed noise, the attacker beats the claim."""
    rng, trials = np.random.default_rng(0), 200_000
    guarantees, _ = gaussian(1.0)
    claimed, deviation = largest_guess_accuracy(guarantees), 0.5 / math.sqrt(2 * trials)

    def accuracy(noise):
        without, with_record = noise * rng.normal(size=trials), 1.0 + noise * rng.normal(size=trials)
        return 0.5 * ((without < 0.5).mean() + (with_record >= 0.5).mean())

    assert accuracy(1.0) <= claimed + 4 * deviation
    assert accuracy(2 / 3) > claimed + 4 * deviation


def test_one_pair_gives_the_closed_form_and_more_pairs_can_only_help():
    epsilon, delta = 2.0, 1e-5
    one = largest_guess_accuracy([(epsilon, delta)])
    assert one == pytest.approx((math.exp(epsilon) + delta) / (1 + math.exp(epsilon)))
    curve = [Guarantee(e, gaussian_delta(2.0, e)) for e in (0.0, 0.5, 1.0, 2.0)]
    assert largest_guess_accuracy(curve) < largest_guess_accuracy(curve[-1:])


def test_nothing_and_everything():
    assert largest_guess_accuracy([(0.0, 0.0)]) == 0.5
    assert largest_guess_accuracy([]) == 1.0
    assert largest_guess_accuracy([(math.inf, 1e-5), (1e6, 0.0)]) == 1.0
    assert largest_detection_rate([(0.0, 0.0)], 0.01) == pytest.approx(0.01)
    assert largest_detection_rate([(math.inf, 0.0)], 0.01) == 1.0
    assert largest_detection_rate([(1.0, 0.0)], 1.0) == 1.0


@pytest.mark.parametrize("pair", [(-1.0, 0.1), (math.nan, 0.1), (1.0, 1.5), (1.0, -0.1)])
def test_what_is_no_guarantee_is_refused(pair):
    with pytest.raises(ValueError, match="need epsilon >= 0"):
        largest_guess_accuracy([pair])


def test_a_share_is_a_share():
    with pytest.raises(ValueError, match="between 0 and 1, got 2"):
        largest_detection_rate([(1.0, 0.0)], 2)
