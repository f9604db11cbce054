"""Discretised losses: chords above the curve, masses that add up, coarser grids that only add."""

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld

from spectral_dp.accounting import composition, gaussian_delta, gaussian_epsilon
from spectral_dp.accounting.composition import Losses, coarser, cost_of_moving, discretised, repeated, summed
from spectral_dp.accounting.pairs import dominating_pairs
from spectral_dp.relations import Relation

ADD = Relation.ADD_OR_REMOVE_ONE


def _step(sigma, rate, interval, relation=ADD):
    return [discretised(*pair, interval) for pair in dominating_pairs(sigma, rate, relation)]


@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize(("sigma", "rate"), [(1.0, 0.01), (0.5, 1e-4), (5.0, 0.9), (0.7, 1.0)])
def test_chords_lie_on_the_dots_and_above_the_curve(sigma, rate, relation):
    """Catches a chord of the wrong slope, a lost mass at either end, and rounding errors on the long left side."""
    for pair, losses in zip(
        dominating_pairs(sigma, rate, relation), _step(sigma, rate, 2**-8, relation=relation), strict=True
    ):
        assert losses.masses.sum() + losses.infinite == pytest.approx(1, abs=1e-12)
        dots = np.arange(0, 5) * 2.0**-8
        assert [losses.delta(dot) for dot in dots] == pytest.approx(pair.divergence(dots), rel=1e-9, abs=1e-14)
        between = dots + 2.0**-9
        assert (np.array([losses.delta(dot) for dot in between]) >= pair.divergence(between) - 1e-15).all()


def test_coarser_grids_nest_and_only_add():
    """Catches a split of masses that shortens a chord: discretising coarsely and coarsening must be the same."""
    (fine, _), (coarse, _) = _step(1.0, 0.1, 2**-9), _step(1.0, 0.1, 2**-6)
    moved = coarser(fine, 2**-6)
    for epsilon in (0.0, 0.01, 0.1, 0.5, 2.0):
        assert moved.delta(epsilon) == pytest.approx(coarse.delta(epsilon), rel=1e-9)
        assert fine.delta(epsilon) <= moved.delta(epsilon) * (1 + 1e-12)


def test_negative_control_rounding_losses_to_the_next_point_does_not_only_add():
    """What the split of masses is for: moved to the nearest point, they give a divergence below the truth."""
    fine, _ = _step(1.0, 0.1, 2**-9)
    nearest = np.round((fine.low + np.arange(len(fine.masses))) / 8).astype(int)
    masses = np.bincount(nearest - nearest[0], fine.masses)
    rounded = Losses(2**-6, int(nearest[0]), masses, fine.infinite)
    assert any(rounded.delta(epsilon) < fine.delta(epsilon) * (1 - 1e-6) for epsilon in np.arange(0, 40) * 2.0**-6)


@pytest.mark.parametrize("interval", [2.0**-10, 2.0**-4, 1.0, 8.0])
def test_moving_costs_no_more_than_is_set_aside_for_it(interval):
    """Catches a cost that is too small for some loss: a single point, anywhere in its cell, is the worst there is."""
    cost, control = cost_of_moving(interval, 1), _randomised_response(interval / 2)
    exceeded = []
    for place in range(16):
        point = Losses(interval / 16, 3 * 16 + place, np.ones(1), 0.0)
        moved = coarser(point, interval)
        for epsilon in np.linspace(0, 5 * interval, 101):
            assert moved.delta(epsilon) <= summed(_on_finer(cost, 16), point).delta(epsilon) + 1e-13
            exceeded.append(moved.delta(epsilon) - summed(_on_finer(control, 8), point).delta(epsilon))
    assert max(exceeded) > 0.01 * min(interval, 1), "the control, half of what is set aside, must not be enough"


def _randomised_response(epsilon):
    up = 1 / (1 + math.exp(-epsilon))
    return Losses(epsilon, -1, np.array([1 - up, 0.0, up]), 0.0)


def _on_finer(losses, ratio):
    masses = np.zeros(ratio * (len(losses.masses) - 1) + 1)
    masses[::ratio] = losses.masses
    return Losses(losses.interval / ratio, ratio * losses.low, masses, losses.infinite)


def test_the_cost_of_moving_adds_up_over_kinds():
    one, other = (coarser(repeated(_step(sigma, 0.1, 2**-9)[0], 20), 2**-4) for sigma in (1.0, 3.0))
    unmoved = summed(*(repeated(_step(sigma, 0.1, 2**-9)[0], 20) for sigma in (1.0, 3.0)))
    set_aside = summed(coarser(unmoved, 2**-4), cost_of_moving(2**-4, 2))
    for epsilon in (0.0, 0.1, 0.5, 1.0, 2.0):
        assert unmoved.delta(epsilon) <= summed(one, other).delta(epsilon) <= set_aside.delta(epsilon)


def test_sums_and_powers_are_the_gaussian_of_all_steps():
    """Catches a wrapped or shifted window: 30 and 20 steps of different noise are one exact Gaussian."""
    one, other = (repeated(_step(sigma, 1.0, 2**-8)[0], steps) for sigma, steps in ((5.0, 30), (8.0, 20)))
    total = (30 / 25 + 20 / 64) ** -0.5
    composed = summed(one, other)
    for target in (1e-10, 1e-5, 0.1):
        assert gaussian_epsilon(total, target) <= composed.epsilon(target) <= 1.002 * gaussian_epsilon(total, target)
    for epsilon in (0.0, 1.0, 5.0):
        exact = gaussian_delta(total, epsilon)
        assert exact <= composed.delta(epsilon) <= 1.01 * exact


def test_many_sums_stay_above_the_exact_gaussian():
    """Catches rounding errors of repeated transforms below the truth, beyond what is set aside for them."""
    composed = one = _step(20.0, 1.0, 2**-9)[0]
    for count in range(2, 200):
        composed = summed(composed, one)
        if count % 50 == 0:
            for target in (1e-11, 1e-5):
                set_aside = composition.ROUNDING * (count + 4 * count)
                assert gaussian_epsilon(20 / math.sqrt(count), target) <= composed.epsilon(target - set_aside)


def test_epsilon_and_delta_are_those_of_dp_accounting():
    """Catches a wrong interpolation between the points: the same masses, read by their code and by ours."""
    theirs = pld.from_gaussian_mechanism(1.0, sampling_prob=0.1, value_discretization_interval=2**-8).self_compose(50)
    pmf = theirs._pmf_remove
    ours = Losses(2**-8, pmf._lower_loss, pmf._probs, pmf._infinity_mass)
    for target in (1e-12, 1e-5, 0.01, 0.5):
        assert ours.epsilon(target) == pytest.approx(pmf.get_epsilon_for_delta(target), rel=1e-9, abs=1e-12)
    for epsilon in (0.0, 0.3, 2.0, 9.0, 1e3):
        assert ours.delta(epsilon) == pytest.approx(pmf.get_delta_for_epsilon(epsilon), rel=1e-9, abs=1e-15)


def test_edges():
    """All mass at infinity, or at one point; below zero; far above everything that e can be raised to."""
    assert Losses(1.0, 0, np.zeros(1), 1.0).epsilon(0.5) == math.inf
    assert Losses(1.0, -5, np.array([1.0]), 0.0).epsilon(1e-9) == 0
    assert Losses(1.0, -5, np.array([1.0]), 0.0).delta(0.0) == 0
    certain = Losses(1000.0, 7, np.array([1.0]), 0.0)
    assert 6000 < certain.epsilon(1e-5) <= 7000
    assert certain.delta(100.0) == 1
    assert certain.delta(7000.0) == certain.delta(1e9) == 0
    assert Losses(0.5, 100, np.array([1.0]), 0.0).epsilon(0.3) == pytest.approx(50 + math.log1p(-0.3))


@pytest.mark.parametrize("interval", [2.0**-4, 30.0, 36.0, 37.0, 64.0])
def test_epsilon_between_distant_points_is_not_lost_in_rounding_errors(interval):
    """Catches a slope that is the difference of two nearly equal sums: epsilon came out by up to 2 too low."""
    for mass in np.linspace(0.05, 0.95, 19):
        losses = Losses(interval, 0, np.array([0.5 * (1 - mass), 0.5 * (1 - mass), mass]), 0.0)
        for share in (0.05, 0.3, 0.5, 0.9):
            exact = 2 * interval + math.log1p(-share)  # only the last point lies beyond
            if exact > interval:
                found = losses.epsilon(share * mass)
                assert found == pytest.approx(exact, rel=1e-12)
                assert losses.delta(found) == pytest.approx(share * mass, rel=1e-9)
