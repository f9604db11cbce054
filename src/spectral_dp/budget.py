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
    """A plan: so many steps of one kind within ``(ε, δ)``."""

    def __init__(self, epsilon: float, delta: float, planned: Phase, stop: bool, accountant: Accountant) -> None:
        self.epsilon, self.delta, self.planned, self.stop, self.accountant = epsilon, delta, planned, stop, accountant
        self._warned = False

    def is_spent(self, ledger: Ledger, noise_multiplier: float, sample_rate: float) -> bool:
        """Whether one step more, with this noise and rate, would exceed the plan."""
        kinds = {(noise_multiplier, sample_rate)} | {phase[:2] for phase in ledger.phases}
        if ledger.steps < self.planned.steps and kinds == {self.planned[:2]}:
            return False  # as planned: nothing to compute
        ahead = Ledger.from_state_dict(ledger.state_dict())
        ahead.record(noise_multiplier, sample_rate)
        return ahead.epsilon(self.delta, accountant=self.accountant) > self.epsilon

    def check(self, ledger: Ledger, noise_multiplier: float, sample_rate: float) -> None:
        """Called before a release with this noise and rate."""
        if (self.stop or not self._warned) and self.is_spent(ledger, noise_multiplier, sample_rate):
            message = (
                f"the budget of epsilon {self.epsilon:g} at delta {self.delta:g} is spent after {ledger.steps} steps"
            )
            if self.stop:
                raise BudgetExhausted(f"{message}: end training here, or plan for more epochs")
            self._warned = True
            warnings.warn(f"{message}, and training goes on: get_epsilon tells what it costs", stacklevel=6)
