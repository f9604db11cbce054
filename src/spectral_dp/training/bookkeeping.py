"""Bookkeeping: every release of a run is entered in the ledger before it leaves, within a budget if there is one."""

from __future__ import annotations

from spectral_dp.accounting import Ledger
from spectral_dp.accounting.budget import Budget
from spectral_dp.training.release_plan import ReleasePlan


class Bookkeeping:
    """Enters the releases of one run in a ledger.

    Args:
        ledger: The ledger; other runs may have written to it before.
        sample_rate: The probability with which a record takes part in a step.
        budget: What the run must keep within, if anything; may be set later.
    """

    def __init__(self, ledger: Ledger, sample_rate: float, budget: Budget | None = None) -> None:
        self.ledger, self.sample_rate, self.budget = ledger, sample_rate, budget

    def record(self, release: ReleasePlan) -> None:
        """Enters a release that is about to leave; raises ``BudgetExhausted`` if it must not."""
        if self.budget is not None:
            self.budget.check(self.ledger, release.noise_multiplier, self.sample_rate)
        self.ledger.record(release.noise_multiplier, self.sample_rate)

    def must_stop(self, noise_multiplier: float) -> bool:
        """Returns whether one step more, with this noise, would be refused."""
        budget = self.budget
        return budget is not None and budget.stop and budget.is_spent(self.ledger, noise_multiplier, self.sample_rate)
