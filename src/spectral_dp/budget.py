"""The budget of a run: what has been spent, and what was planned."""

from __future__ import annotations

import warnings

from spectral_dp.accounting import Accountant, Ledger, Phase


class BudgetExhausted(RuntimeError):
    """Raised by a step beyond the planned budget when the engine was told to stop there."""


class EngineAccountant:
    """The ledger under the name Opacus users look for: ``engine.accountant.get_epsilon(delta)``."""

    def __init__(self, name: Accountant, ledger: Ledger) -> None:
        if name not in ("pld", "rdp"):
            raise ValueError(f"unknown accountant {name!r}: choose 'pld' or 'rdp'")
        self.name = name
        self.ledger = ledger

    def get_epsilon(self, delta: float) -> float:
        """Returns the ``ε`` spent so far at ``delta``."""
        return self.ledger.epsilon(delta, accountant=self.name)

    @property
    def history(self) -> list[Phase]:
        """What was run: noise multiplier, sample rate and number of steps of each phase."""
        return list(self.ledger.phases)

    def __len__(self) -> int:
        return self.ledger.steps


class Budget:
    """A plan: so many steps within ``(ε, δ)``."""

    def __init__(self, epsilon: float, delta: float, steps: int, stop: bool, accountant: Accountant) -> None:
        self.epsilon, self.delta, self.steps, self.stop, self.accountant = epsilon, delta, steps, stop, accountant
        self._warned = False

    def is_spent(self, ledger: Ledger) -> bool:
        """Whether one step more, like the last, would exceed the plan."""
        if ledger.steps < self.steps and len(ledger.phases) <= 1:
            return False  # as planned: nothing to compute
        if not ledger.phases:
            return False
        ahead = Ledger.from_state_dict(ledger.state_dict())
        ahead.record(*ledger.phases[-1][:2])
        return ahead.epsilon(self.delta, accountant=self.accountant) > self.epsilon

    def check(self, ledger: Ledger) -> None:
        """Called before a release."""
        if (self.stop or not self._warned) and self.is_spent(ledger):
            message = (
                f"the budget of epsilon {self.epsilon:g} at delta {self.delta:g} is spent after {ledger.steps} steps"
            )
            if self.stop:
                raise BudgetExhausted(f"{message}: end training here, or plan for more epochs")
            self._warned = True
            warnings.warn(f"{message}, and training goes on: get_epsilon tells what it costs", stacklevel=5)
