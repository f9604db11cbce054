"""The privacy budget of a run, and the decision whether one more step stays within it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from spectral_dp.accounting import Accountant, Ledger, Phase
from spectral_dp.accounting.coarsening import MAX_KINDS, Cell, Kind, cells_of, coarsened, counted_as
from spectral_dp.accounting.composition import ROUNDING
from spectral_dp.accounting.privacy_loss import (
    MAX_STEPS,
    check_accountant,
    checked_phase,
    loss_variance,
    spending,
    with_more_kinds,
)
from spectral_dp.errors import SpectralDPError
from spectral_dp.relations import Relation

_MARGIN, _MARGIN_UNSAMPLED = 3e-4, 3e-3  # fraction of epsilon that an allowance leaves unused (see Allowance)
_CLASSES = 7  # level of the grid (coarsening.py) that separates the classes of steps; its spacing is 1/8
_LEAST_NOISE = 1e-3  # steps with a smaller noise multiplier are decided one by one
_ERRORS_OF_KINDS = 8 * ROUNDING * MAX_KINDS  # part of delta that composing so many kinds may use up, with tails


class BudgetExhausted(SpectralDPError, RuntimeError):
    """Raised by a step that would exceed the planned budget, if the engine was told to stop there."""


class EngineAccountant:
    """Access to the ledger under the name that Opacus users know: ``engine.accountant.get_epsilon(delta)``."""

    def __init__(self, name: Accountant, ledger: Ledger) -> None:
        check_accountant(name, ledger.relation)  # before training rather than after it
        self.name = name
        self.ledger = ledger

    def get_epsilon(self, delta: float) -> float:
        """Returns an upper bound on the ``ε`` that was spent so far at ``delta``."""
        return self.ledger.epsilon(delta, accountant=self.name)

    @property
    def history(self) -> list[Phase]:
        """The noise multiplier, the sample rate and the number of steps of each phase that was run."""
        return list(self.ledger.phases)

    def __len__(self) -> int:
        return self.ledger.steps


class Budget:
    """A budget of ``(ε, δ)`` and the steps that were planned for it.

    Formal guarantee:

    - A step is allowed only if the epsilon that ``Ledger.epsilon`` reports after it is within the budget.
    - A step is refused only if that epsilon is not within the budget.
    - Both hold with the releases for which room is reserved: those that the ledger does not list yet are added to it.

    Epsilon is nevertheless seldom computed. It is computed once for an :class:`Allowance` of future steps, which are
    then only counted. If the noise or the sample rate changes at every step, it is computed some dozens of times in a
    run, and for each of the last 0.03 % of its steps.

    Args:
        epsilon: Largest epsilon that the run may spend.
        delta: Delta at which epsilon is measured.
        planned: Phase for which the noise was calibrated. As long as all steps are of this phase, nothing is computed.
        stop: Whether a step beyond the budget is an error. Otherwise the first such step gives a warning.
        accountant: Accounting method, ``"pld"`` or ``"rdp"``.
        reserved: Other releases for which steps must leave room. Room for one is free again once the ledger lists a
            step with its noise multiplier and its sample rate.
    """

    def __init__(
        self,
        epsilon: float,
        delta: float,
        planned: Phase,
        stop: bool,
        accountant: Accountant,
        reserved: Sequence[Phase] = (),
    ) -> None:
        self.epsilon, self.delta, self.planned, self.stop, self.accountant = epsilon, delta, planned, stop, accountant
        self.reserved = tuple(checked_phase(*phase) for phase in reserved)
        self._warned = False
        self._allowance: Allowance | None = None
        self._variance_per_epsilon = 0.0  # of the latest phases for which epsilon was computed

    def is_spent(self, ledger: Ledger, noise_multiplier: float, sample_rate: float) -> bool:
        """Returns whether one more step, with this noise and sample rate, would exceed the budget."""
        phases, step = ledger.phases, checked_phase(noise_multiplier, sample_rate, 1)
        phases = (*_not_listed(self.reserved, phases), *phases)
        as_planned = {phase[:2] for phase in (*phases[:2], step)} == {self.planned[:2]}  # equal steps are one phase
        if as_planned and ledger.steps < self.planned.steps:
            return False
        before = self._allowance
        self._allowance = before and before.after(phases)
        if self._allowance and self._allowance.after((*phases, step)):
            return False
        self._allowance = self._allow(phases, step, ledger.relation, before)
        return self._allowance is None and self._spent((*phases, step), ledger.relation) > self.epsilon

    def check(self, ledger: Ledger, noise_multiplier: float, sample_rate: float) -> None:
        """Raises an error or warns if a release with this noise and sample rate would exceed the budget.

        It must be called before the release.

        Raises:
            BudgetExhausted: If the budget would be exceeded and ``stop`` is true.
        """
        if (self.stop or not self._warned) and self.is_spent(ledger, noise_multiplier, sample_rate):
            message = (
                f"the budget of epsilon {self.epsilon:g} at delta {self.delta:g} is spent after {ledger.steps} steps"
            )
            if self.stop:
                raise BudgetExhausted(f"{message}: end training here, or plan for more epochs")
            self._warned = True
            warnings.warn(f"{message}, and training goes on: get_epsilon tells what it costs", stacklevel=6)

    def _spent(self, phases: tuple[Phase, ...], relation: Relation) -> float:
        return self._noted(phases, spending(phases, self.accountant, relation).epsilon(self.delta))

    def _noted(self, phases: tuple[Phase, ...], spent: float) -> float:
        if spent <= self.epsilon:
            self._variance_per_epsilon = sum(map(loss_variance, phases)) / max(spent, self.epsilon / 8)
        return spent

    def _allow(
        self, phases: tuple[Phase, ...], step: Phase, relation: Relation, before: Allowance | None
    ) -> Allowance | None:
        """Returns an allowance for this step and for more steps like it and like those before it.

        Returns None if there is no such allowance, so that this step must be decided by itself.
        """
        delta = self.delta - _ERRORS_OF_KINDS
        if step.noise_multiplier < _LEAST_NOISE or delta <= 0 or _counts_as_unsampled(step):
            return None
        own = counted_as(step[:2], _CLASSES)
        seen = {**(before.seen if before else {})}
        seen[own] = seen.get(own, 0) + 1
        margin = _MARGIN_UNSAMPLED if any(rate == 1 for _, rate in seen) else _MARGIN
        # Epsilon grows at most in proportion to the variance of the loss, so this much is nearly always within.
        room = self._variance_per_epsilon * self.epsilon * (1 - 2 * margin) - sum(map(loss_variance, phases))
        times = room / sum(loss_variance(Phase(*kind, count)) for kind, count in seen.items())
        for share in (times, times / 2, times / 8):
            classes = {kind: count for kind in seen if (count := min(int(share * seen[kind]), MAX_STEPS)) > 0}
            if classes.get(own, 0) < 2:
                break
            ahead = (*phases, *(Phase(*kind, count) for kind, count in classes.items()))
            sampled = {phase[:2]: 1 for phase in (*ahead, step) if phase.sample_rate < 1}
            level, _ = coarsened(sampled)
            with suppress(ValueError):  # delta is smaller than the rounding errors of so many steps
                spent = self._noted(ahead, spending(ahead, self.accountant, relation, level).epsilon(delta))
                if self.accountant == "pld" and sampled and spent <= self.epsilon:
                    spent = max(spent, with_more_kinds(spent, delta, ahead, relation, level) / (1 + margin))
                if spent * (1 + margin) <= self.epsilon:
                    return Allowance(phases, classes, level, frozenset(cells_of(sampled, level)), {})
        return None


class Allowance(NamedTuple):
    """Future steps that were found to be within the budget in advance.

    The steps are counted by class. The class of a step is the kind as which it counts on a coarse grid, and it spends
    at least as much as the step. Accounting for the steps themselves then reports no more, with one exception: there
    are more kinds of steps than classes, and rounding each kind to a grid costs a little. As long as the steps need no
    coarser level (``coarsening.py``) than the one that was computed with, this cost is at most the relative margin that
    was left, or what ``with_more_kinds`` allows for, whichever is larger.
    """

    phases: tuple[Phase, ...]  # the phases of the ledger that this allowance continues
    left: dict[Kind, int]  # the number of future steps of each class
    level: int  # the level of coarsening with which epsilon was computed
    cells: frozenset[Cell]  # the points of the ledger's kinds on that level
    seen: dict[Kind, int]  # the number of steps of each class since the allowance was computed

    def after(self, phases: tuple[Phase, ...]) -> Allowance | None:
        """Returns the allowance that is left for a ledger of these phases.

        Returns None if the ledger does not continue ours, or if it lists steps that the allowance does not cover.
        """
        new = _beyond(self.phases, phases)
        if new is None or any(phase.noise_multiplier < _LEAST_NOISE or _counts_as_unsampled(phase) for phase in new):
            return None
        left, seen = dict(self.left), dict(self.seen)
        for phase in new:
            sigma, rate = own = counted_as(phase[:2], _CLASSES)
            seen[own] = seen.get(own, 0) + phase.steps
            needed = phase.steps
            for kind in sorted(left, key=lambda kind: kind != own):  # its own class first, then those that spend more
                if kind[0] <= sigma and kind[1] >= rate and (kind[1] == 1) == (rate == 1):
                    taken = min(needed, left[kind])
                    left[kind] -= taken
                    needed -= taken
            if needed:
                return None
        cells = self.cells.union(cells_of([phase[:2] for phase in new if phase.sample_rate < 1], self.level))
        if len(cells) > MAX_KINDS:
            return None
        return Allowance(phases, left, self.level, cells, seen)


def _not_listed(reserved: tuple[Phase, ...], phases: tuple[Phase, ...]) -> list[Phase]:
    """Returns those of the reserved releases that these phases do not list."""
    listed = Counter[Kind]()
    for phase in phases if reserved else ():
        listed[phase[:2]] += phase.steps
    missing = []
    for phase in reserved:
        found = min(listed[phase[:2]], phase.steps)
        listed[phase[:2]] -= found
        if found < phase.steps:
            missing.append(phase._replace(steps=phase.steps - found))
    return missing


def _counts_as_unsampled(phase: Phase) -> bool:
    """Returns whether a sampled step has an unsampled class, which is composed exactly while the step is not."""
    return phase.sample_rate < 1 and counted_as(phase[:2], _CLASSES)[1] == 1


def _beyond(before: tuple[Phase, ...], after: tuple[Phase, ...]) -> tuple[Phase, ...] | None:
    """Returns the phases of ``after`` that follow those of ``before``, or None if ``after`` does not continue them."""
    if not before:
        return after
    last = len(before) - 1
    if len(after) <= last or after[:last] != before[:last] or after[last][:2] != before[last][:2]:
        return None
    steps = after[last].steps - before[last].steps
    if steps < 0:
        return None
    return (*([before[last]._replace(steps=steps)] if steps else []), *after[last + 1 :])
