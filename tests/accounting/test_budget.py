"""The budget: no step beyond it, none refused within it, and hardly any time spent on finding out."""

import itertools
import math
import random
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectral_dp import PrivacyEngine
from spectral_dp.accounting import Ledger, Phase, budget, calibrate_noise, privacy_loss
from spectral_dp.accounting.budget import Budget, BudgetExhausted, EngineAccountant
from spectral_dp.relations import Relation

ADD, REPLACE = Relation.ADD_OR_REMOVE_ONE, Relation.REPLACE_ONE
DELTA = 1e-5


@pytest.fixture
def computed(monkeypatch):
    """What epsilon was computed for, as the budget goes along."""
    calls = []

    def spending(*arguments):
        calls.append(arguments)
        return privacy_loss.spending(*arguments)

    monkeypatch.setattr(budget, "spending", spending)
    return calls


def _falling(step):
    return max(2 - step / 400, 0.7), 0.02


def _rising(step):
    return min(0.8 + step / 400, 3.0), 0.02


def _two_rates(step):
    return max(2 - step / 400, 0.7), (0.01, 0.02)[step % 2]


def _random(step):
    draw = random.Random(step)
    return draw.uniform(1, 4), draw.uniform(0.005, 0.03)


def _suddenly_loud(step):
    return (3.0 if step < 50 else 0.9), 0.02


def _sometimes_unsampled(step):
    return (60.0, 1.0) if step % 3 == 0 else (max(2 - step / 400, 0.9), 0.02)


def _run(schedule, epsilon, *, stop=True, accountant="pld", relation=ADD, most=10**4):
    """Trains to the end of the budget, or so many steps; returns the ledger."""
    ledger, plan = Ledger(relation), Budget(epsilon, DELTA, Phase(1.0, 0.02, 10**4), stop, accountant)
    for step in range(most):
        if plan.is_spent(ledger, *schedule(step)):  # as the loader asks
            with pytest.raises(BudgetExhausted):
                plan.check(ledger, *schedule(step))  # as the optimizer asks
            break
        plan.check(ledger, *schedule(step))
        ledger.record(*schedule(step))
    return ledger


@pytest.mark.parametrize("schedule", [_falling, _rising, _two_rates, _random, _sometimes_unsampled])
def test_the_last_step_within_the_budget_is_the_last_one_made(schedule, computed):
    """Catches a step too many (the shortcut taken for the truth), and one too few (a margin left unused)."""
    epsilon = 2.0 if schedule is _rising else 0.8  # which begins with its loudest steps
    ledger = _run(schedule, epsilon)
    steps = ledger.steps
    assert ledger.epsilon(DELTA) <= epsilon
    ledger.record(*schedule(steps))
    assert ledger.epsilon(DELTA) > epsilon
    assert steps > 100
    assert len(computed) < 200


@pytest.mark.parametrize(("accountant", "relation"), [("rdp", ADD), ("pld", REPLACE)])
def test_so_it_is_for_the_other_accountant_and_the_other_relation(accountant, relation):
    ledger = _run(_falling, 0.4, accountant=accountant, relation=relation)  # few steps: RDP takes 20 ms for each kind
    assert ledger.epsilon(DELTA, accountant=accountant) <= 0.4
    ledger.record(*_falling(ledger.steps))
    assert ledger.epsilon(DELTA, accountant=accountant) > 0.4


@pytest.mark.parametrize("broken", ["never used up", "any kind of step"])
def test_negative_control_an_allowance_that_covers_too_much_overspends(broken, monkeypatch):
    """The check above sees an allowance that does not count its steps, or does not look what they are."""
    after = budget.Allowance.after

    def careless(self, phases):
        if broken == "never used up":
            return self._replace(phases=phases)
        steps = sum(phase.steps for phase in budget._beyond(self.phases, phases) or ())
        return after(self, (*self.phases, Phase(3.0, 0.02, steps))) and self._replace(phases=phases)

    monkeypatch.setattr(budget.Allowance, "after", careless)
    assert _run(_suddenly_loud, 1.0, most=1500).epsilon(DELTA) > 1.0


def test_a_sudden_change_is_accounted_for():
    ledger = _run(_suddenly_loud, 1.0, most=1500)
    assert ledger.epsilon(DELTA) <= 1.0
    assert ledger.steps > 50


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.8, 6), st.sampled_from([0.005, 0.02, 0.05, 1.0])), min_size=1, max_size=40),
    st.floats(0.3, 3),
)
def test_whatever_the_schedule_allowed_means_within(kinds, epsilon):
    """Every answer is that of accounting for all steps anew, at every step."""
    ledger, plan = Ledger(), Budget(epsilon, DELTA, Phase(1.0, 0.02, 10**4), True, "pld")
    for kind in itertools.islice(itertools.cycle(kinds), 50):
        ahead = Ledger.from_state_dict(ledger.state_dict())
        ahead.record(*kind)
        spent = ahead.epsilon(DELTA) > epsilon
        assert plan.is_spent(ledger, *kind) == spent
        if spent:
            break
        ledger = ahead  # another object: what counts is what it says


def test_a_schedule_that_goes_on_within_the_budget_costs_next_to_nothing(computed):
    """Catches accounting at every step, which took a second each, where a warning is all that is at stake."""
    ledger = _run(_falling, 50.0, stop=False, most=1000)
    assert ledger.steps == 1000
    assert len(computed) < 60


def test_as_planned_nothing_is_computed(computed):
    ledger = _run(lambda _: (1.0, 0.02), 1.0, most=500)
    assert ledger.steps == 500
    assert not computed


def test_after_the_warning_nothing_is_computed_either(computed):
    ledger, plan = Ledger(), Budget(0.5, DELTA, Phase(1.0, 0.02, 10), False, "pld")
    ledger.record(0.7, 0.5, 100)
    with pytest.warns(UserWarning, match="budget of epsilon 0.5 at delta 1e-05 is spent after 100 steps"):
        plan.check(ledger, 0.8, 0.5)
    before = len(computed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan.check(ledger, 0.9, 0.5)
    assert len(computed) == before


def test_an_allowance_is_for_the_ledger_it_was_computed_for(computed):
    """Catches a budget that goes on counting after a checkpoint with more steps was loaded."""
    plan, ledger = Budget(1.0, DELTA, Phase(1.0, 0.02, 10**4), True, "pld"), Ledger()
    for _ in range(20):
        assert not plan.is_spent(ledger, 1.5, 0.02)
        ledger.record(1.5, 0.02)
    loaded = Ledger()
    loaded.record(1.2, 0.02, 3000)
    assert plan.is_spent(loaded, 1.5, 0.02)
    shorter = Ledger()
    shorter.record(1.5, 0.02, 5)
    assert not plan.is_spent(shorter, 1.5, 0.02)


@pytest.mark.parametrize("sigma", [0.0, 1e-5, 0.005])
def test_a_step_without_noise_is_refused(sigma):
    """Catches a division by zero on the way to the shortcut, also where there are many kinds of steps."""
    ledger, plan = Ledger(), Budget(5.0, DELTA, Phase(1.0, 0.02, 10**4), True, "pld")
    for step in range(120):
        assert not plan.is_spent(ledger, *_falling(step))
        ledger.record(*_falling(step))
    with pytest.raises(BudgetExhausted, match="after 120 steps"):
        plan.check(ledger, sigma, 0.02)
    ledger.record(sigma, 0.02)
    assert plan.is_spent(ledger, 1.0, 0.02)
    assert ledger.epsilon(DELTA) == math.inf


def test_rdp_with_replace_one_is_refused_before_training():
    """Catches an accountant that cannot answer, found out after the last epoch."""
    with pytest.raises(ValueError, match='use accountant="pld" for replace_one'):
        PrivacyEngine(accountant="rdp", relation=REPLACE)
    with pytest.raises(ValueError, match='use accountant="pld" for replace_one'):
        EngineAccountant("rdp", Ledger(REPLACE))
    with pytest.raises(ValueError, match="unknown accountant 'gdp': choose 'pld' or 'rdp'"):
        EngineAccountant("gdp", Ledger())
    assert EngineAccountant("pld", Ledger(REPLACE)).get_epsilon(DELTA) == 0


def _after_a_rare_loud_step(epsilon, delta):
    """One step of next to no noise, rarer than delta; then a hundred kinds of quiet ones. Returns the ledger."""
    ledger = Ledger(ADD)
    ledger.record(0.0101, 1e-9)
    plan = Budget(epsilon, delta, Phase(1.0, 0.5, 1), True, "pld")
    for step in range(96):
        sigma = 10 * (1 - 1e-4) ** step
        if plan.is_spent(ledger, sigma, 0.01):
            break
        ledger.record(sigma, 0.01)
    return ledger


def test_kinds_to_come_are_allowed_for_where_a_rare_step_makes_the_grid_coarse():
    """Catches an allowance whose margin is for fine grids only: it spent 1.9 times the budget."""
    assert _after_a_rare_loud_step(0.3, 1e-6).epsilon(1e-6) <= 0.3


def test_negative_control_without_allowing_for_more_kinds_it_overspends(monkeypatch):
    monkeypatch.setattr(budget, "with_more_kinds", lambda epsilon, *_: epsilon)
    assert _after_a_rare_loud_step(0.3, 1e-6).epsilon(1e-6) > 0.3


@pytest.mark.parametrize("share", [1.0004, 1.001, 1.01])
def test_a_tiny_delta_leaves_room_for_the_rounding_errors_of_many_kinds(share):
    """Catches an allowance found for one class of steps, of which the ledger then sets aside errors kind by kind."""
    delta, kinds = 4e-13, [(1 + 1e-9 * (i + 1), 0.1) for i in range(90)]
    epsilon = share * privacy_loss.spending([Phase(1.0, 0.1, 90)], "pld", ADD).epsilon(delta)
    ledger, plan = Ledger(), Budget(epsilon, delta, Phase(1.0, 0.5, 1), True, "pld")
    for kind in kinds:
        if plan.is_spent(ledger, *kind):
            break
        ledger.record(*kind)
    assert ledger.steps > 50
    assert ledger.epsilon(delta) <= epsilon


def test_steps_sampled_nearly_always_use_no_allowance_of_unsampled_ones():
    """Unsampled steps are composed exactly; those at rate 1 - 1e-9 on a grid, which costs a little more."""
    phases = (Phase(60.0, 1.0, 10),)
    allowance = budget.Allowance((), {(30.0, 1.0): 100}, 0, frozenset(), {})
    assert allowance.after(phases) is not None
    assert allowance.after((Phase(60.0, 1 - 1e-9, 10),)) is None
    assert allowance.after((Phase(60.0, 0.5, 10),)) is None


def test_a_ledger_of_fewer_steps_takes_nothing_back():
    """Catches steps below zero, which would add to what is left: a run that is set back could then be run twice."""
    phase = Phase(1.0, 0.1, 5)
    left = {budget.counted_as(phase[:2], budget._CLASSES): 7}
    allowance = budget.Allowance((phase,), left, 0, frozenset(), {})
    assert sum(allowance.after((phase._replace(steps=6),)).left.values()) == 6
    for fewer in ((phase._replace(steps=3),), (), (phase._replace(noise_multiplier=2.0),)):
        assert allowance.after(fewer) is None


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(("accountant", "relation"), [("pld", ADD), ("rdp", ADD), ("pld", REPLACE)])
@pytest.mark.parametrize(("rate", "steps"), [(0.05, 40), (1.0, 4)])
def test_steps_leave_room_for_reserved_releases(accountant, relation, rate, steps, is_first):
    """Catches steps beyond the plan that take the room of a release that is made after them."""
    other, ledger = Phase(5.0, 1.0, 1), Ledger(relation)
    sigma = calibrate_noise(2.0, DELTA, rate, steps, accountant=accountant, relation=relation, beside=[other])
    plan = Budget(2.0, DELTA, Phase(sigma, rate, steps), True, accountant, [other])
    if is_first:
        ledger.record(*other)
    made = 0
    while not plan.is_spent(ledger, sigma, rate):
        ledger.record(sigma, rate)
        made += 1
    if not is_first:
        ledger.record(*other)
    assert made >= steps
    assert ledger.epsilon(DELTA, accountant=accountant) <= 2.0
