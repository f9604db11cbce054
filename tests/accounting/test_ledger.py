"""The ledger: what was recorded is what is reported, whatever the schedule, and a longer ledger never reports less."""

import json
import math
import time

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from spectral_dp.accounting import Ledger, coarsening, delta, epsilon, privacy_loss
from spectral_dp.accounting.composition import Losses
from spectral_dp.accounting.privacy_loss import MAX_STEPS
from spectral_dp.relations import Relation

ADD, REPLACE = Relation.ADD_OR_REMOVE_ONE, Relation.REPLACE_ONE


def _ledger(*phases, relation=ADD):
    ledger = Ledger(relation)
    for phase in phases:
        ledger.record(*phase)
    return ledger


def test_ledger_of_one_phase_is_epsilon():
    one_by_one = _ledger(*[(1.1, 0.02)] * 300)
    assert one_by_one.phases == ((1.1, 0.02, 300),)
    assert one_by_one.phases == _ledger((1.1, 0.02, 300)).phases
    assert one_by_one.steps == 300
    assert one_by_one.epsilon(1e-5) == epsilon(1.1, 0.02, 300, 1e-5)
    assert one_by_one.delta(1.0) == delta(1.1, 0.02, 300, 1.0)
    assert one_by_one.epsilon(1e-5, accountant="rdp") == epsilon(1.1, 0.02, 300, 1e-5, accountant="rdp")


def test_ledger_keeps_phases_apart_and_ignores_their_order():
    there, back = _ledger((1.0, 0.01, 100), (2.0, 0.01, 100)), _ledger((2.0, 0.01, 100), (1.0, 0.01, 100))
    assert there != back
    assert there.epsilon(1e-5) == pytest.approx(back.epsilon(1e-5), rel=1e-9)
    assert _ledger((1.0, 0.01, 60), (2.0, 0.01, 100), (1.0, 0.01, 40)).epsilon(1e-5) == there.epsilon(1e-5)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_dropping_any_phase_shows(accountant):
    """Negative control: a ledger that forgets a phase, the unsampled one included, reports less."""
    phases = [(1.0, 0.01, 200), (1.5, 0.05, 50), (4.0, 1.0, 1)]
    whole = _ledger(*phases).epsilon(1e-5, accountant=accountant)
    for missing in range(len(phases)):
        rest = phases[:missing] + phases[missing + 1 :]
        assert _ledger(*rest).epsilon(1e-5, accountant=accountant) < 0.99 * whole


def test_one_step_without_noise_spoils_everything():
    ledger = _ledger((1.0, 0.01, 100), (0.0, 0.01, 1), (1.0, 0.01, 100))
    assert ledger.epsilon(1e-5) == math.inf
    assert ledger.delta(1.0) == 1.0
    assert ledger.epsilon(1e-5, accountant="rdp") == math.inf


def test_empty_ledger_spent_nothing():
    assert Ledger().epsilon(1e-5) == 0
    assert Ledger().delta(0.0) == 0
    assert Ledger().steps == 0


def test_replace_one_ledger_accounts_for_replace_one():
    phases = [(0.5, 0.2, 20), (1.0, 0.1, 20)]
    replaced, added = _ledger(*phases, relation=REPLACE), _ledger(*phases)
    assert replaced != added
    assert replaced.epsilon(1e-5) < 0.9 * added.epsilon(1e-5)
    assert Ledger.from_state_dict(replaced.state_dict()).relation is REPLACE


def test_recording_is_cheap_enough_for_every_step():
    ledger = Ledger()
    start = time.perf_counter()
    for _ in range(10_000):
        ledger.record(1.1, 0.01)
    assert time.perf_counter() - start < 2  # about 50 ms
    assert ledger.steps == 10_000


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(1e-6, 1), st.integers(1, 10**6)), max_size=5),
    st.sampled_from(list(Relation)),
)
def test_state_survives_json(phases, relation):
    """Catches a field lost, or a float rounded, on the way through a checkpoint."""
    ledger = _ledger(*phases, relation=relation)
    restored = Ledger.from_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert restored == ledger
    assert restored.phases == ledger.phases


def test_a_ledger_never_grows_beyond_what_it_can_restore():
    ledger = _ledger((1.1, 0.02, MAX_STEPS))
    with pytest.raises(ValueError, match="steps must be"):
        ledger.record(1.1, 0.02)
    assert Ledger.from_state_dict(ledger.state_dict()) == ledger


def test_restored_ledger_goes_on_where_it_stopped():
    ledger = _ledger((1.1, 0.02, 100))
    restored = Ledger.from_state_dict(ledger.state_dict())
    restored.record(1.1, 0.02, 50)
    assert ledger.steps == 100
    assert restored.phases == ((1.1, 0.02, 150),)


def test_pld_agrees_with_dp_accounting_on_a_heterogeneous_run():
    """Catches a phase composed with another's parameters: dp_accounting gets the events as run."""
    ledger, theirs = Ledger(), dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-4)
    for sigma, rate, steps in [(1.0, 0.01, 300), (2.0, 0.05, 100), (1.5, 1.0, 2), (1.0, 0.01, 50)]:
        ledger.record(sigma, rate, steps)
        event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
        theirs.compose(dp_accounting.SelfComposedDpEvent(event, steps))
    assert ledger.epsilon(1e-5) == pytest.approx(theirs.get_epsilon(1e-5), rel=2e-3)
    assert ledger.delta(4.0) == pytest.approx(theirs.get_delta(4.0), rel=2e-2)


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


def test_two_batch_sizes_and_a_noise_schedule_lose_no_step():
    """Catches groups that overwrite each other: the first version reported less than the truth here."""
    truth = _theirs(TWO_BATCH_SIZES).get_epsilon_for_delta(1e-5)
    assert 0.998 * truth <= _ledger(*TWO_BATCH_SIZES).epsilon(1e-5) <= 1.002 * truth


def test_negative_control_overwriting_groups_report_less_than_the_truth(monkeypatch):
    monkeypatch.setattr(privacy_loss, "coarsened", _overwriting)
    assert _ledger(*TWO_BATCH_SIZES).epsilon(1e-5) < 0.98 * _theirs(TWO_BATCH_SIZES).get_epsilon_for_delta(1e-5)
    assert _ledger(*LONG_AND_MIXED).epsilon(1e-5) < 0.05 * _ledger(*LONG_AND_MIXED[:1]).epsilon(1e-5)


def test_forty_thousand_steps_do_not_vanish_behind_thirty_more():
    """Catches the worst of it: training on made epsilon fall to a twentieth."""
    spent = [_ledger(*LONG_AND_MIXED[:length]).epsilon(1e-5) for length in range(1, len(LONG_AND_MIXED) + 1)]
    assert spent == sorted(spent)


def test_lost_steps_are_an_error(monkeypatch):
    """Catches lost steps at run time: two points of the grid that are taken for one must not pass."""
    monkeypatch.setattr(coarsening, "_kind", lambda cell, level: (1.0, 0.01))
    with pytest.raises(AssertionError, match="steps were lost"):
        _ledger((1.1, 0.01, 3), (1.2, 0.01, 4)).epsilon(1e-5)


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
    before, after = _ledger(*schedule, relation=relation), _ledger(*schedule, *added, relation=relation)
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


@settings(max_examples=10, deadline=None)
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
    assert _ledger(*unsampled, relation=relation).epsilon(1e-5) == math.inf
    assert _ledger(*unsampled, (1.0, 0.01, 1), relation=relation).epsilon(1e-5) == math.inf


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
        spent = _ledger(*phases, relation=relation).epsilon(target)
        assert lower.get_epsilon_for_delta(target) <= spent <= 1.003 * upper.get_epsilon_for_delta(target) + 1e-4


@pytest.mark.parametrize("rates", [(0.01,), (0.01, 0.02)])
@pytest.mark.parametrize("relation", list(Relation))
def test_a_fine_schedule_is_within_two_percent(rates, relation):
    """Catches grouping to the wrong side, and the 120 % that grouping across sample rates once cost."""
    schedule = [(2 - i / 100, rates[i % len(rates)], 10) for i in range(100)]
    assert len(schedule) > coarsening.MAX_KINDS
    truth = _theirs(schedule, relation=relation).get_epsilon_for_delta(1e-5)
    assert 0.998 * truth <= _ledger(*schedule, relation=relation).epsilon(1e-5) <= 1.02 * truth


def test_thousands_of_kinds_take_a_second_and_one_more_a_moment():
    """Catches a composition per step (minutes), and one that starts over with every step."""
    ledger = _ledger(*((2 - i / 4000, (0.01, 0.02)[i % 2]) for i in range(4000)))
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
