"""The budget of a run: what has been spent, and what was planned."""

from __future__ import annotations

import warnings
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
from spectral_dp.relations import Relation

_MARGIN, _MARGIN_UNSAMPLED = 3e-4, 3e-3  # of epsilon, that an allowance leaves unused (see Allowance)
_CLASSES = 7  # the level of the grid that tells classes of steps apart: of spacing 1/8
_LEAST_NOISE = 1e-3  # steps with less are decided one by one
_ERRORS_OF_KINDS = 8 * ROUNDING * MAX_KINDS  # what composing so many kinds may take from delta, tails included


class BudgetExhausted(RuntimeError):
    """Raised by a step beyond the planned budget when the engine was told to stop there."""


class EngineAccountant:
    """The ledger under the name Opacus users look for: ``engine.accountant.get_epsilon(delta)``."""

    def __init__(self, name: Accountant, ledger: Ledger) -> None:
        check_accountant(name, ledger.relation)  # here, and not after training
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
    """A plan: so many steps of one kind within ``(ε, δ)``.

    Formal guarantee. A step is allowed only if what ``Ledger.epsilon`` would report after it is within the budget, and
    refused only if it would not be. Yet epsilon is seldom computed: once for an :class:`Allowance` of steps to come,
    which are then only counted. Where noise or rate change at every step, that is some dozens of times in a run, and
    for each of the last 0.03 % of its steps.
    """

    def __init__(self, epsilon: float, delta: float, planned: Phase, stop: bool, accountant: Accountant) -> None:
        self.epsilon, self.delta, self.planned, self.stop, self.accountant = epsilon, delta, planned, stop, accountant
        self._warned = False
        self._allowance: Allowance | None = None
        self._variance_per_epsilon = 0.0  # as last seen

    def is_spent(self, ledger: Ledger, noise_multiplier: float, sample_rate: float) -> bool:
        """Whether one step more, with this noise and rate, would exceed the plan."""
        phases, step = ledger.phases, checked_phase(noise_multiplier, sample_rate, 1)
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
        """Called before a release with this noise and rate."""
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
        """Returns an allowance for this step and more like it and those before it, or None if it is hard to tell."""
        delta = self.delta - _ERRORS_OF_KINDS
        if step.noise_multiplier < _LEAST_NOISE or delta <= 0 or _counts_as_unsampled(step):
            return None
        own = counted_as(step[:2], _CLASSES)
        seen = {**(before.seen if before else {})}
        seen[own] = seen.get(own, 0) + 1
        margin = _MARGIN_UNSAMPLED if any(rate == 1 for _, rate in seen) else _MARGIN
        # Epsilon grows at most in proportion to the variance of the loss, so that nearly always this much is within.
        room = self._variance_per_epsilon * self.epsilon * (1 - 2 * margin) - sum(map(loss_variance, phases))
        times = room / sum(loss_variance(Phase(*kind, count)) for kind, count in seen.items())
        for share in (times, times / 2, times / 8):
            classes = {kind: count for kind in seen if (count := min(int(share * seen[kind]), MAX_STEPS)) > 0}
            if classes.get(own, 0) < 2:
                break
            ahead = (*phases, *(Phase(*kind, count) for kind, count in classes.items()))
            sampled = {phase[:2]: 1 for phase in (*ahead, step) if phase.sample_rate < 1}
            level, _ = coarsened(sampled)
            with suppress(ValueError):  # a delta lost in the rounding errors of so many steps
                spent = self._noted(ahead, spending(ahead, self.accountant, relation, level).epsilon(delta))
                if self.accountant == "pld" and sampled and spent <= self.epsilon:
                    spent = max(spent, with_more_kinds(spent, delta, ahead, relation, level) / (1 + margin))
                if spent * (1 + margin) <= self.epsilon:
                    return Allowance(phases, classes, level, frozenset(cells_of(sampled, level)), {})
        return None


class Allowance(NamedTuple):
    """Steps to come that were found to be within the budget in advance.

    They are counted by class: what their kind counts as on a coarse grid, which spends at least as much. Accounting for
    the steps themselves then reports no more, but for one thing: they are of more kinds than the classes, and kinds
    cost a little in rounding to a grid. As long as they take no coarser a level (``coarsening.py``) than was computed
    with, that is at most the relative margin that was left, or what ``with_more_kinds`` allows for, if that is more.
    """

    phases: tuple[Phase, ...]  # of the ledger that it continues
    left: dict[Kind, int]  # steps to come of each class
    level: int
    cells: frozenset[Cell]  # of the ledger, on that level
    seen: dict[Kind, int]  # steps that came, of each class

    def after(self, phases: tuple[Phase, ...]) -> Allowance | None:
        """Returns what is left for a ledger of these phases; None if it does not continue ours, or goes further."""
        new = _beyond(self.phases, phases)
        if new is None or any(phase.noise_multiplier < _LEAST_NOISE or _counts_as_unsampled(phase) for phase in new):
            return None
        left, seen = dict(self.left), dict(self.seen)
        for phase in new:
            sigma, rate = own = counted_as(phase[:2], _CLASSES)
            seen[own] = seen.get(own, 0) + phase.steps
            needed = phase.steps
            for kind in sorted(left, key=lambda kind: kind != own):  # its own class first, or one that spends more
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


def _counts_as_unsampled(phase: Phase) -> bool:
    """Whether a sampled step is of a class without sampling, which is composed exactly, while the step is not."""
    return phase.sample_rate < 1 and counted_as(phase[:2], _CLASSES)[1] == 1


def _beyond(before: tuple[Phase, ...], after: tuple[Phase, ...]) -> tuple[Phase, ...] | None:
    """Returns what was recorded since; None if ``after`` does not continue ``before``."""
    if not before:
        return after
    last = len(before) - 1
    if len(after) <= last or after[:last] != before[:last] or after[last][:2] != before[last][:2]:
        return None
    steps = after[last].steps - before[last].steps
    if steps < 0:
        return None
    return (*([before[last]._replace(steps=steps)] if steps else []), *after[last + 1 :])
