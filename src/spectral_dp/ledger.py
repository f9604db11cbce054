"""The ledger: which noisy releases were made, in order, and what they have spent together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from spectral_dp.privacy_loss import Accountant, Phase, checked, checked_phase, spending
from spectral_dp.relations import Relation


class Ledger:
    """The steps actually run, in order: append-only, one neighbouring relation, cheap to write at every step.

    Formal guarantee. If every release was recorded with at most its true noise multiplier and at least its true
    sample rate, all of them together are ``(ledger.epsilon(δ), δ)``-DP, as ``accounting.py`` says. The phases must not
    be *chosen* from earlier releases: a ledger bounds the composition it lists, it is not a privacy filter.

    >>> ledger = Ledger()
    >>> ledger.record(1.0, 0.01, steps=500)
    >>> ledger.record(2.0, 0.01)
    >>> ledger.steps, len(ledger.phases)
    (501, 2)
    """

    def __init__(self, relation: Relation = Relation.ADD_OR_REMOVE_ONE) -> None:
        self.relation = Relation(relation)
        self._phases: list[Phase] = []

    def record(self, noise_multiplier: float, sample_rate: float, steps: int = 1) -> None:
        """Appends ``steps`` releases. A multiplier of 0 is recorded too, and makes epsilon infinite."""
        phase = checked_phase(noise_multiplier, sample_rate, steps)
        if self._phases and self._phases[-1][:2] == phase[:2]:
            self._phases[-1] = checked_phase(*phase[:2], self._phases[-1].steps + phase.steps)
        else:
            self._phases.append(phase)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """What was recorded, consecutive equal steps merged."""
        return tuple(self._phases)

    @property
    def steps(self) -> int:
        """Total number of steps."""
        return sum(phase.steps for phase in self._phases)

    def epsilon(self, delta: float, *, accountant: Accountant = "pld") -> float:
        """Returns the epsilon spent so far at ``delta``."""
        return spending(self._phases, accountant, self.relation).epsilon(checked("delta", delta))

    def delta(self, epsilon: float, *, accountant: Accountant = "pld") -> float:
        """Returns the delta spent so far at ``epsilon``."""
        return spending(self._phases, accountant, self.relation).delta(checked("epsilon", epsilon))

    def state_dict(self) -> dict[str, Any]:
        """Returns plain types, for JSON or a checkpoint."""
        return {"relation": str(self.relation), "phases": [list(phase) for phase in self._phases]}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Restores a ledger, refusing anything that :meth:`state_dict` could not have written."""
        try:
            if set(state) != {"relation", "phases"}:
                raise ValueError(f"expected the keys 'phases' and 'relation', found {sorted(map(str, state))}")
            ledger = cls(Relation(state["relation"]))
            for noise_multiplier, sample_rate, steps in state["phases"]:
                ledger.record(noise_multiplier, sample_rate, steps)
        except (TypeError, ValueError) as error:
            raise ValueError(f"not the state of a ledger: {error}") from error
        return ledger

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ledger):
            return NotImplemented
        return self.relation == other.relation and self._phases == other._phases

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"Ledger(relation={str(self.relation)!r}, phases={self._phases})"
