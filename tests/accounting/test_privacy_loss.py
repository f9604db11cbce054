"""What steps spend together: an upper bound, tight, which never falls when steps are added, whatever the schedule."""

import functools
import logging
import math
import time

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.support.accounting import hockey_stick, ledger_of, mixture

from spectral_dp.accounting import (
    Phase,
    coarsening,
    composition,
    epsilon,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_noise_multiplier,
    privacy_loss,
)
from spectral_dp.accounting.composition import Losses
from spectral_dp.relations import Relation

ADD, REPLACE = Relation.ADD_OR_REMOVE_ONE, Relation.REPLACE_ONE


# The analytic Gaussian.


@pytest.mark.parametrize(("eps", "target", "sigma"), [(1.0, 1e-5, 3.7306), (0.1, 1e-6, 36.3), (8.0, 1e-5, 0.6)])
def test_analytic_gaussian_reference(eps, target, sigma):
    """Balle & Wang 2018; the classical sqrt(2 ln(1.25/delta))/epsilon would say 4.84 where they say 3.73."""
    assert gaussian_noise_multiplier(eps, target) == pytest.approx(sigma, rel=0.01)
    assert gaussian_noise_multiplier(eps, target) == pytest.approx(dp_accounting.get_sigma_gaussian(eps, target))
    assert gaussian_epsilon(sigma, target) == pytest.approx(dp_accounting.get_epsilon_gaussian(sigma, target))


@pytest.mark.parametrize(("sigma", "eps"), [(1.0, 0.0), (1.0, 2.0), (0.3, 8.0), (5.0, 0.1)])
def test_analytic_delta_is_the_integral(sigma, eps):
    truth = hockey_stick(mixture(1, 1.0, sigma), mixture(1, 0.0, sigma), eps, 1 + 12 * sigma)
    assert gaussian_delta(sigma, eps) == pytest.approx(truth, rel=1e-5)


@settings(max_examples=100)
@given(eps=st.floats(1e-4, 100), log_delta=st.floats(-200, -0.1))
def test_analytic_roots_lie_on_the_private_side(eps, log_delta):
    """Catches a root finder that stops just short: the answer must satisfy the very inequality it was asked for."""
    target = math.exp(log_delta)
    sigma = gaussian_noise_multiplier(eps, target)
    assert gaussian_delta(sigma, eps) <= target
    assert gaussian_delta(sigma * (1 - 1e-6), eps) > target
    back = gaussian_epsilon(sigma, target)
    assert gaussian_delta(sigma, back) <= target
    assert back == pytest.approx(eps, rel=1e-6)


def test_analytic_edges():
    assert gaussian_epsilon(0.0, 1e-5) == math.inf
    assert gaussian_delta(0.0, 1.0) == 1.0
    assert gaussian_epsilon(1e6, 0.1) == 0.0
    with pytest.raises(ValueError, match="epsilon must be"):
        gaussian_noise_multiplier(-1.0, 1e-5)
    with pytest.raises(ValueError, match="beyond 1e\\+08"):
        gaussian_noise_multiplier(0.0, 1e-12)


# Composition.


@pytest.mark.parametrize("steps", [1, 100, 10**4, 10**6, 10**7])
@pytest.mark.parametrize("mu", [0.3, 3.0])
def test_numerical_composition_is_an_upper_bound_on_the_exact_gaussian(mu, steps):
    """Catches rounding errors of the Fourier transform eating delta: at rate 1 the exact answer is known."""
    phase = Phase(math.sqrt(steps) / mu, 1.0, steps)
    composed, _ = privacy_loss._privacy_losses((phase,), ADD)
    rounding = composition.ROUNDING * steps
    for target in (1e-5, 1e-7, max(1e-11, 2 * rounding)):
        exact = gaussian_epsilon(1 / mu, target)
        assert exact <= composed.epsilon(target - rounding)
    assert composed.epsilon(1e-5 - rounding) <= 1.005 * gaussian_epsilon(1 / mu, 1e-5)


def test_rdp_orders_converge_without_a_word(caplog):
    """dp_accounting logs and drops an order whose series does not converge; ours all do."""
    with caplog.at_level(logging.WARNING):
        for rate in (1e-9, 0.01, 0.3, 0.5, 0.7, 0.99):
            for sigma in (0.05, 0.5, 2.0, 50.0, 1e6):
                assert np.isfinite(privacy_loss._renyi_divergence(sigma, rate)).all()
                assert epsilon(sigma, rate, 10, 1e-5, accountant="rdp") >= 0
    assert not caplog.records


# Fine schedules. The first version of coarsening lost steps: it is kept here, and every check must see it.


def _overwriting(counts, least_level=0):
    """Coarsening as it was: groups that come to the same multiplier and rate overwrite each other."""
    if len(counts) <= 32:
        return 0, dict(counts)
    least, most = (extreme(rate / sigma for sigma, rate in counts) for extreme in (min, max))
    width = math.log(most / least) / 32 or 1.0
    groups = {}
    for (sigma, rate), steps in counts.items():
        group = int(math.log(rate / sigma / least) / width)
        known = groups.get(group, (sigma, rate, 0))
        groups[group] = (min(known[0], sigma), max(known[1], rate), known[2] + steps)
    return 0, {(sigma, rate): steps for sigma, rate, steps in groups.values()}


def _by_relative_grid(counts, least_level=0):
    """Conserves steps, but on a grid that hangs on the kinds that are there: adding one can make the bound fall."""
    if len(counts) <= 8:
        return 0, dict(counts)
    top = max(sigma for sigma, _ in counts)
    merged = {}
    for (sigma, rate), steps in counts.items():
        image = top * 0.5 ** (math.ceil(math.log2(top / sigma) * 8 - 1e-9) / 8), rate
        merged[image] = merged.get(image, 0) + steps
    return 0, merged


TWO_BATCH_SIZES = [(2 - stage / 20, rate, 100) for stage in range(21) for rate in (0.01, 0.02)]
LONG_AND_MIXED = [(1.0, 0.02, 40_000), *((1 + i / 32, 0.02, 1) for i in range(1, 33)), (1.0, 0.01, 1)]


def _theirs(phases, *, interval=1e-3, pessimistic=True, relation=ADD):
    """dp_accounting's privacy loss distribution of the steps, kind by kind.

    The pessimistic one, on an interval of a tenth of a step's deviation, is the truth to 0.2 %.
    """
    composed = None
    for sigma, rate, steps in phases:
        step = pld.from_gaussian_mechanism(
            sigma if relation is ADD else 2 * sigma,  # theirs is in units of C, ours of 2C
            sampling_prob=rate,
            value_discretization_interval=interval,
            pessimistic_estimate=pessimistic,
            use_connect_dots=pessimistic,
            neighboring_relation=dp_accounting.NeighboringRelation[relation.name],
        )
        several = step.self_compose(steps)
        composed = several if composed is None else composed.compose(several)
    return composed


@functools.cache
def _truth_of_two_batch_sizes():
    return _theirs(TWO_BATCH_SIZES).get_epsilon_for_delta(1e-5)


def test_two_batch_sizes_and_a_noise_schedule_lose_no_step():
    """Catches groups that overwrite each other: the first version reported less than the truth here."""
    truth = _truth_of_two_batch_sizes()
    assert 0.998 * truth <= ledger_of(*TWO_BATCH_SIZES).epsilon(1e-5) <= 1.002 * truth


def test_negative_control_overwriting_groups_report_less_than_the_truth(monkeypatch):
    monkeypatch.setattr(privacy_loss, "coarsened", _overwriting)
    assert ledger_of(*TWO_BATCH_SIZES).epsilon(1e-5) < 0.98 * _truth_of_two_batch_sizes()
    assert ledger_of(*LONG_AND_MIXED).epsilon(1e-5) < 0.05 * ledger_of(*LONG_AND_MIXED[:1]).epsilon(1e-5)


def test_forty_thousand_steps_do_not_vanish_behind_thirty_more():
    """Catches the worst of it: training on made epsilon fall to a twentieth."""
    spent = [ledger_of(*LONG_AND_MIXED[:length]).epsilon(1e-5) for length in range(1, len(LONG_AND_MIXED) + 1)]
    assert spent == sorted(spent)


def test_lost_steps_are_an_error(monkeypatch):
    """Catches lost steps at run time: two points of the grid that are taken for one must not pass."""
    monkeypatch.setattr(coarsening, "_kind", lambda cell, level: (1.0, 0.01))
    with pytest.raises(AssertionError, match="steps were lost"):
        ledger_of((1.1, 0.01, 3), (1.2, 0.01, 4)).epsilon(1e-5)


kinds = st.tuples(st.floats(0.5, 8), st.sampled_from([0.003, 0.01, 0.02, 0.5, 1.0]))
phases = st.tuples(kinds, st.integers(1, 300)).map(lambda drawn: (*drawn[0], drawn[1]))


@st.composite
def _schedules(draw):
    """Anything from a few phases to hundreds of kinds of steps, at one rate or at many."""
    few = draw(st.lists(phases, max_size=4))
    if not draw(st.booleans()):
        return few
    start, end = draw(st.floats(0.5, 8)), draw(st.floats(0.5, 8))
    rates = draw(st.lists(st.floats(1e-3, 0.1), min_size=1, max_size=draw(st.sampled_from([1, 2, 40]))))
    count = draw(st.integers(30, 200))
    return few + [(start + (end - start) * i / count, rates[i % len(rates)], 1 + i % 3) for i in range(count)]


def _falls(schedule, added, accountant, relation):
    """By how much, relatively, epsilon falls when steps are added, at two deltas."""
    before, after = ledger_of(*schedule, relation=relation), ledger_of(*schedule, *added, relation=relation)
    assert after.steps == before.steps + sum(steps for *_, steps in added)
    pairs = [[ledger.epsilon(target, accountant=accountant) for ledger in (before, after)] for target in (1e-7, 1e-3)]
    return max((was - now) / was if was > 0 else 0.0 for was, now in pairs)


@settings(max_examples=60, deadline=None)
@given(_schedules(), st.lists(phases, min_size=1, max_size=3), st.sampled_from(["pld", "rdp", "replace"]))
def test_epsilon_never_falls_when_steps_are_added(schedule, added, accountant):
    """Catches a grouping, a grid or an interval that hangs on which steps are there, beyond rounding errors of 1e-6."""
    assume(accountant != "rdp" or len(schedule) < 60)  # RDP takes 20 ms a kind
    relation = REPLACE if accountant == "replace" else ADD
    assert _falls(schedule, added, "pld" if accountant == "replace" else accountant, relation) <= 1e-6


@pytest.mark.parametrize("broken", [_overwriting, _by_relative_grid])
def test_negative_control_a_grouping_that_hangs_on_the_kinds_present_is_seen(broken, monkeypatch):
    """Conserving steps is not enough: a grid that moves with the largest multiplier makes epsilon fall, too."""
    schedule = [(1 + i / 20, (0.01, 0.02)[i % 2], 50) for i in range(40)]
    assert max(_falls(schedule, [(s, 0.02, 1)], "pld", ADD) for s in (1.0, 3.1, 3.3, 3.5)) <= 1e-6
    monkeypatch.setattr(privacy_loss, "coarsened", broken)
    assert max(_falls(schedule, [(s, 0.02, 1)], "pld", ADD) for s in (1.0, 3.1, 3.3, 3.5)) > 1e-3


JUST_ABOVE_ONE_POINT = [(1 + 1e-13 * kind, 0.01, 1000) for kind in range(2, coarsening.MAX_KINDS + 1)]
ONE_OF_THEM = (1 + 1e-13, 0.01, 1000)
LOUD = (0.0101, 1e-9, 1)  # hardly ever takes part, but makes the common grid coarse
ONE_KIND_MORE = [(1e4, 1e-5, 1)]


@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize("last", [ONE_OF_THEM, LOUD])
def test_epsilon_does_not_fall_where_the_97th_kind_raises_the_level(relation, last):
    """Catches a level that costs less than the one below: 96 kinds beside one point of the grid become one."""
    assert _falls([*JUST_ABOVE_ONE_POINT, last], ONE_KIND_MORE, "pld", relation) <= 0


def test_negative_control_without_the_cost_of_moving_epsilon_falls_there(monkeypatch):
    nothing = Losses(1.0, 0, np.ones(1), 0.0)
    monkeypatch.setattr(privacy_loss, "cost_of_moving", lambda interval, times: nothing._replace(interval=interval))
    assert _falls([*JUST_ABOVE_ONE_POINT, ONE_OF_THEM], ONE_KIND_MORE, "pld", REPLACE) > 1e-6
    assert _falls([*JUST_ABOVE_ONE_POINT, LOUD], ONE_KIND_MORE, "pld", ADD) > 1e-4


@settings(max_examples=4, deadline=None)
@given(
    st.floats(0.5, 8),
    st.sampled_from([1e-13, 1e-4, 1e-2]),
    st.sampled_from([1e-4, 0.01, 0.1]),
    st.integers(1, 1000),
    st.sampled_from([None, LOUD, (0.3, 1e-5, 1), (0.7, 1.0, 2)]),
    st.lists(phases, min_size=1, max_size=3),
)
def test_epsilon_never_falls_beside_the_level_where_kinds_are_merged(start, width, rate, steps, loud, added):
    """Random ledgers of just as many kinds as are composed one by one, with steps added to that."""
    schedule = [(start * (1 + width * i), rate, steps) for i in range(coarsening.MAX_KINDS)]
    assert _falls([*([loud] if loud else []), *schedule][: coarsening.MAX_KINDS], added, "pld", ADD) <= 1e-6


@pytest.mark.parametrize("relation", list(Relation))
def test_next_to_no_noise_in_all_stays_so_when_a_sampled_step_is_added(relation):
    """Catches unsampled steps that are looked at one by one: together they left no noise, and epsilon was infinite."""
    unsampled = [(0.0101, 1.0, 10_300)]
    assert ledger_of(*unsampled, relation=relation).epsilon(1e-5) == math.inf
    assert ledger_of(*unsampled, (1.0, 0.01, 1), relation=relation).epsilon(1e-5) == math.inf


def test_the_interval_does_not_depend_on_the_steps_by_a_rounding_error():
    """Catches a variance that is multiplied by the steps and divided again: one step more halved the interval."""
    sigma = 10.264346498351937
    assert _falls([(sigma, 0.05, 13_653)], [(sigma, 0.05, 1)], "pld", ADD) <= 0


def test_a_finer_grid_for_less_variance_would_let_epsilon_fall(monkeypatch):
    """Negative control: intervals from the mean variance, as they were, shrink when quiet steps are added."""
    loud, quiet = [(0.8, 0.02, 300)], [(8.0, 0.003, 40)]
    assert _falls(loud, quiet, "pld", ADD) <= 0

    def by_the_mean(phases, relation, level):
        variance = sum(map(privacy_loss.loss_variance, phases)) / sum(phase.steps for phase in phases)
        interval = privacy_loss._power_of_two(0.3 * math.sqrt(variance))
        return privacy_loss._sum_of_losses(tuple((phase, interval) for phase in phases), relation, interval)

    monkeypatch.setattr(privacy_loss, "_privacy_losses", by_the_mean)
    assert max(_falls(loud, [(8.0, 0.003, n)], "pld", ADD) for n in (40, 300, 1000)) > 1e-6


@settings(max_examples=10, deadline=None)
@given(st.lists(phases, min_size=1, max_size=3), st.sampled_from(list(Relation)))
def test_random_ledgers_lie_between_dp_accountings_bounds(phases, relation):
    """Catches a bound that is none (below their optimistic one), and one that is loose (above their pessimistic)."""
    lower, upper = (_theirs(phases, interval=2e-4, pessimistic=side, relation=relation) for side in (False, True))
    for target in (1e-6, 1e-3):
        spent = ledger_of(*phases, relation=relation).epsilon(target)
        assert lower.get_epsilon_for_delta(target) <= spent <= 1.003 * upper.get_epsilon_for_delta(target) + 1e-4


@pytest.mark.parametrize("rates", [(0.01,), (0.01, 0.02)])
@pytest.mark.parametrize("relation", list(Relation))
def test_a_fine_schedule_is_within_two_percent(rates, relation):
    """Catches grouping to the wrong side, and the 120 % that grouping across sample rates once cost."""
    schedule = [(2 - i / 100, rates[i % len(rates)], 10) for i in range(100)]
    assert len(schedule) > coarsening.MAX_KINDS
    truth = _theirs(schedule, relation=relation).get_epsilon_for_delta(1e-5)
    assert 0.998 * truth <= ledger_of(*schedule, relation=relation).epsilon(1e-5) <= 1.02 * truth


def test_thousands_of_kinds_take_a_second_and_one_more_a_moment():
    """Catches a composition per step (minutes), and one that starts over with every step."""
    ledger = ledger_of(*((2 - i / 4000, (0.01, 0.02)[i % 2]) for i in range(4000)))
    start = time.perf_counter()
    ledger.epsilon(1e-5)
    first = time.perf_counter() - start
    ledger.record(1.0, 0.02)
    ledger.epsilon(1e-5)
    start = time.perf_counter()
    ledger.record(1.0, 0.02)
    ledger.epsilon(1e-5)
    assert first < 10  # about 0.6 s on an idle core
    assert time.perf_counter() - start < 1  # about 30 ms
