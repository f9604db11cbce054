"""Every release is entered before it leaves; what the budget does not allow is neither entered nor released."""

import pytest
import torch
from tests.support.privacy_checks import ScriptedNoise
from torch import nn

from spectral_dp import BudgetExhausted
from spectral_dp.accounting import Ledger, Phase
from spectral_dp.accounting.budget import Budget
from spectral_dp.gradients import ModelGradients
from spectral_dp.mechanism.clipping import FlatClipping
from spectral_dp.relations import Relation
from spectral_dp.training.bookkeeping import Bookkeeping
from spectral_dp.training.optimizer import PrivateOptimizer

RATE, SIGMA, DELTA = 0.1, 1.0, 1e-5


def trained(books, noise=None):
    """An optimizer that enters its releases in these books, and one step of it."""
    model = nn.Linear(3, 2)
    optimizer = PrivateOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        ModelGradients(model),
        clipping=FlatClipping(1.0),
        noise_multiplier=SIGMA,
        expected_batch_size=2.0,
        noise=noise or ScriptedNoise(),
        before_release=books.record,
    )

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum(1).mean().backward()
        optimizer.step()

    return model, optimizer, step


def within(steps, *, stop):
    """Books with a budget for so many steps."""
    ledger = Ledger(Relation.ADD_OR_REMOVE_ONE)
    for _ in range(steps):
        ledger.record(SIGMA, RATE)
    budget = Budget(ledger.epsilon(DELTA), DELTA, Phase(SIGMA, RATE, steps), stop, "pld")
    return Bookkeeping(Ledger(Relation.ADD_OR_REMOVE_ONE), RATE, budget)


def test_what_the_plan_says_is_entered_before_any_noise_is_drawn():
    ledger = Ledger(Relation.ADD_OR_REMOVE_ONE)

    class Watching(ScriptedNoise):
        def normal(self, *args, **options):
            assert ledger.steps == 1, "the ledger comes first"
            return super().normal(*args, **options)

    noise = Watching()
    trained(Bookkeeping(ledger, RATE), noise)[2]()
    assert noise.drawn
    assert list(ledger.phases) == [Phase(SIGMA, RATE, 1)]


def test_a_step_beyond_the_budget_is_neither_entered_nor_released():
    books = within(3, stop=True)
    model, optimizer, step = trained(books)
    for _ in range(3):
        assert not books.must_stop(optimizer.noise_multiplier)
        step()
    assert books.must_stop(optimizer.noise_multiplier)
    drawn, before = optimizer.noise.drawn, model.weight.detach().clone()
    with pytest.raises(BudgetExhausted, match="spent after 3 steps"):
        step()
    assert (books.ledger.steps, optimizer.steps, optimizer.noise.drawn) == (3, 3, drawn)
    assert torch.equal(model.weight, before)


def test_a_budget_that_only_warns_stops_nobody():
    books = within(2, stop=False)
    _, optimizer, step = trained(books)
    step()
    step()
    assert not books.must_stop(optimizer.noise_multiplier)
    with pytest.warns(UserWarning, match="training goes on") as caught:
        step()
    assert caught[0].filename == __file__, "the warning names the line that steps"
    assert books.ledger.steps == 3


def test_without_a_budget_nothing_stops():
    books = Bookkeeping(Ledger(Relation.ADD_OR_REMOVE_ONE), RATE)
    assert not books.must_stop(1e-9)


def test_noise_for_other_neighbours_than_the_ledger_accounts_for_is_refused():
    """Half the noise that replacing a record needs would leave under a ledger that says replace-one."""
    books = Bookkeeping(Ledger(Relation.REPLACE_ONE), RATE)
    model, optimizer, step = trained(books)
    before = model.weight.detach().clone()
    with pytest.raises(ValueError, match=r"add_or_remove_one.*the ledger accounts for replace_one"):
        step()
    assert books.ledger.steps == 0
    assert torch.equal(model.weight, before)
    optimizer.relation = Relation.REPLACE_ONE
    step()
    assert books.ledger.steps == 1
