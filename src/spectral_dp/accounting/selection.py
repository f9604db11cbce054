"""The privacy of releasing the best of several runs (Papernot & Steinke 2022, "Hyperparameter Tuning with Rényi
Differential Privacy").

A *trial* draws settings from a public law, trains with them, and scores the result. The number of trials K is random.
Only the trial with the best score is released: its settings, its weights and its score.

Formal guarantee of a :class:`Selection`:

- What is bounded: the release of the best trial is ``(selection.epsilon(δ), δ)``-DP. If there is no trial at all,
  which a Poisson number allows, the release is that nothing was found.
- For which neighbours: data sets that differ by adding or removing one record.
- Under which assumptions:

  - All trials are drawn independently from the same law, which depends on no record. Settings are therefore drawn
    *with* replacement from a public list, whether the list was made at random or quasi-random.
  - **The score is part of what a trial releases, so it carries noise of its own.** An exact accuracy on private
    records is not covered, even if nobody sees it: the choice would show it. (``tests/support/selections.py`` has this
    as a mistake that the tests find.)
  - K is drawn once, from ``law``, and independently of everything else. Nobody outside learns K, or anything of the
    other trials.
  - ``alternatives`` lists, for all settings that may be drawn and for all places that a record may have (training or
    held-out records), the releases that such a record takes part in.

Why the worst alternative counts: given its settings, a trial is one of the alternatives, and the settings are part of
its output. So the divergence of a trial at order α is at most the largest one of its alternatives, at every order by
itself. The number of trials is then accounted for by ``dp_accounting``, which has the theorems of the paper (Theorem 2
for truncated negative binomial numbers, Theorem 6 for Poisson numbers).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
from dp_accounting import dp_event, rdp
from numpy.typing import NDArray

from spectral_dp.accounting.privacy_loss import ORDERS, Phase, bisect, checked, checked_phase, renyi_curve

_MOST_TRIALS = 500.0  # largest mean of a law: exp(-mean) must be a normal number
_BITS = 53


@dataclass(frozen=True)
class TrialsLaw:
    """The law of the number of trials K.

    ``shape`` infinity is the Poisson law, for which K can be 0. Every other shape η >= 0 is the truncated negative
    binomial law of the paper (its Definition 1), for which K >= 1: η = 1 is the geometric law, η = 0 the logarithmic
    law. Smaller shapes cost less privacy and vary more.

    >>> print(TrialsLaw(10, 1.0))
    geometric with mean 10

    Attributes:
        mean: Expected number of trials, more than 1.
        shape: The shape η.
    """

    mean: float
    shape: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and 1 < self.mean <= _MOST_TRIALS):
            raise ValueError(f"the expected number of trials must be above 1 and at most {_MOST_TRIALS:g}: {self.mean}")
        if math.isnan(self.shape) or self.shape < 0:
            raise ValueError(f"the shape of the law of trials must be at least 0 (infinity for Poisson): {self.shape}")

    def __str__(self) -> str:
        named = {math.inf: "Poisson", 0.0: "logarithmic", 1.0: "geometric"}
        name = named.get(self.shape, f"truncated negative binomial of shape {self.shape:g}")
        return f"{name} with mean {self.mean:g}"

    @cached_property
    def _gamma(self) -> float:
        """The γ of the truncated negative binomial law. Rounded so that the mean is never above ``mean``."""
        return bisect(lambda gamma: _mean_of(gamma, self.shape) <= self.mean, 1 - 1e-12, 0.0)

    def _probabilities(self) -> Iterator[tuple[int, float]]:
        """Yields every number of trials with its probability, by the recursion of the law."""
        if math.isinf(self.shape):
            k, p = 0, math.exp(-self.mean)
            while True:
                yield k, p
                k, p = k + 1, p * self.mean / (k + 1)
        gamma, eta = self._gamma, self.shape
        k, p = 1, (1 - gamma) * (eta / math.expm1(-eta * math.log(gamma)) if eta else -1 / math.log(gamma))
        while True:
            yield k, p
            k, p = k + 1, p * (1 - gamma) * (k + eta) / (k + 1)

    def draw(self, random_bits: Callable[[int], int] = secrets.randbits) -> int:
        """Returns a number of trials, by inversion of a uniform number of 53 bits.

        The law is exact to within about 1e-14 in total variation, which adds as much to δ.

        Args:
            random_bits: Returns a uniform number of so many bits; by default that of the operating system.
        """
        left = random_bits(_BITS) * 2.0**-_BITS
        for k, p in self._probabilities():
            if left < p or (k > self.mean and p < 2.0**-_BITS):
                return k
            left -= p
        raise AssertionError("probabilities never end")


@dataclass(frozen=True)
class Selection:
    """The choice of the best of K trials; the guarantee is that of this module.

    Attributes:
        law: The law of K.
        alternatives: Each entry lists releases of one trial that one record takes part in.
    """

    law: TrialsLaw
    alternatives: tuple[tuple[Phase, ...], ...]

    def __post_init__(self) -> None:
        if not self.alternatives or not all(self.alternatives):
            raise ValueError("a selection needs at least one alternative, and each alternative at least one release")
        for phases in self.alternatives:
            for phase in phases:
                checked_phase(*phase)

    def epsilon(self, delta: float) -> float:
        """Returns an upper bound on the epsilon of the released trial at ``delta``. It may be infinite."""
        selected = dp_event.RepeatAndSelectDpEvent(_WorstOf(self.alternatives), self.law.mean, self.law.shape)
        return _epsilon(selected, delta)

    def trial_epsilon(self, delta: float) -> float:
        """Returns what one trial spends if it is the only one, fixed in advance. It is *not* the cost of the choice."""
        return _epsilon(_WorstOf(self.alternatives), delta)

    def covers(self, phases: Sequence[Phase]) -> bool:
        """Returns whether releases that were made spend no more than an alternative, at any order."""
        return bool((renyi_curve(phases) <= _worst_curve(self.alternatives) * (1 + 1e-12)).all())

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, from which everybody can compute epsilon again."""
        return {
            "mean_trials": self.law.mean,
            "shape": "poisson" if math.isinf(self.law.shape) else self.law.shape,
            "alternatives": [[list(phase) for phase in phases] for phases in self.alternatives],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Returns the selection that :meth:`to_dict` described."""
        shape = math.inf if values["shape"] == "poisson" else float(values["shape"])
        alternatives = tuple(tuple(checked_phase(*phase) for phase in phases) for phases in values["alternatives"])
        return cls(TrialsLaw(float(values["mean_trials"]), shape), alternatives)


def calibrate_selection(
    target_epsilon: float, delta: float, selection_of: Callable[[float], Selection]
) -> tuple[float, Selection]:
    """Returns the largest epsilon of a trial, to within 0.5 %, for which the whole selection is within the target.

    Args:
        target_epsilon: Largest epsilon that the release of the best trial may spend.
        delta: Delta at which epsilon is measured.
        selection_of: Makes the selection whose trials spend a given epsilon each.

    Returns:
        The epsilon of a trial, and the selection.

    Raises:
        ValueError: If the target cannot be reached by adding noise to the training steps.
    """
    checked("target_epsilon", target_epsilon)
    checked("delta", delta)
    inside, outside, found = 0.0, target_epsilon, None
    trial = target_epsilon / 2
    while outside - inside > 0.005 * outside:
        selection = selection_of(trial)
        spent = selection.epsilon(delta)
        if spent <= target_epsilon:
            inside, found = trial, selection
        else:
            outside = trial
        if found is None and trial < target_epsilon / 100:
            raise ValueError(
                f"epsilon {target_epsilon:g} cannot be reached: with trials of epsilon {trial:.3g} each, the selection "
                f"spends {spent:.4g}. Expect fewer trials, or add noise to the score"
            )
        # What is spent is nearly proportional. A little further, so that the next guess is on the other side.
        guess = trial * target_epsilon / spent * (1.002 if spent <= target_epsilon else 0.998)
        trial = guess if inside < guess < outside else (inside + outside) / 2
    assert found is not None
    return inside, found


@dataclass(frozen=True)
class _WorstOf(dp_event.DpEvent):  # type: ignore[misc]  # dp_accounting has no types
    """One of several lists of releases, whichever is worst at an order."""

    alternatives: tuple[tuple[Phase, ...], ...]


class _Accountant(rdp.RdpAccountant):  # type: ignore[misc]
    """The RDP accountant of ``dp_accounting``, which also knows :class:`_WorstOf`."""

    def __init__(self) -> None:
        super().__init__(ORDERS)
        self._rdp: NDArray[np.float64]

    def _maybe_compose(self, event: dp_event.DpEvent, count: int, do_compose: bool) -> Any:
        if not isinstance(event, _WorstOf):
            return super()._maybe_compose(event, count, do_compose)
        if do_compose:
            self._rdp += count * _worst_curve(event.alternatives)
        return None


def _worst_curve(alternatives: Sequence[Sequence[Phase]]) -> NDArray[np.float64]:
    return np.max([renyi_curve(phases) for phases in alternatives], axis=0)


def _epsilon(event: dp_event.DpEvent, delta: float) -> float:
    accountant = _Accountant()
    accountant.compose(event)
    return float(accountant.get_epsilon(checked("delta", delta)))


def _mean_of(gamma: float, eta: float) -> float:
    """Returns the mean of the truncated negative binomial law (Papernot & Steinke 2022, after Definition 1)."""
    log = math.log(gamma)
    return (1 - gamma) / gamma * (eta / -math.expm1(eta * log) if eta else -1 / log)
