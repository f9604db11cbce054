"""Enters every release of a run in the ledger before it happens, and keeps the run within its budget."""

from __future__ import annotations

from spectral_dp.accounting import Ledger
from spectral_dp.accounting.budget import Budget
from spectral_dp.training.release_plan import ReleasePlan


class Bookkeeping:
    """Enters the releases of one run in a ledger.

    Args:
        ledger: The ledger to write to. It may already hold the releases of earlier runs.
        sample_rate: The probability with which each record takes part in a step.
        budget: The privacy budget of the run, or None if there is no limit. It can be set later.
    """

    def __init__(self, ledger: Ledger, sample_rate: float, budget: Budget | None = None) -> None:
        self.ledger, self.sample_rate, self.budget = ledger, sample_rate, budget

    def record(self, release: ReleasePlan) -> None:
        """Enters a release in the ledger. Call it before the release happens.

        Raises:
            ValueError: If the noise is for other neighbours than the ledger accounts for.
            BudgetExhausted: If the budget does not allow this release. Then nothing is entered.
        """
        if release.relation != self.ledger.relation:
            raise ValueError(
                f"the noise of this release is for neighbours under {release.relation}, but the ledger accounts for "
                f"{self.ledger.relation}: choose it once, as PrivacyEngine(relation=...)"
            )
        if self.budget is not None:
            self.budget.check(self.ledger, release.noise_multiplier, self.sample_rate)
        self.ledger.record(release.noise_multiplier, self.sample_rate)

    def must_stop(self, noise_multiplier: float) -> bool:
        """Returns whether the budget would refuse one more step with this noise multiplier."""
        budget = self.budget
        return budget is not None and budget.stop and budget.is_spent(self.ledger, noise_multiplier, self.sample_rate)
