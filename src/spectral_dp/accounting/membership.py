"""What a guarantee means for one record: how often an attacker can be right who guesses whether it was used.

The attacker knows all other records and every setting, sees all that was released, and has unlimited time. Nothing is
assumed of the attack.

Formal guarantee.

- Bounded: the accuracy of every such test, and its rate of detection at a given rate of false alarms.
- Neighbours: those of the guarantee. Under add-or-remove-one the question is whether the record was used, under
  replace-one which of two records was used.
- Assumption: the release is (epsilon, delta)-differentially private for each of the given pairs. Then every test has
  ``detected <= exp(epsilon) * false_alarms + delta``, and the same with the two hypotheses exchanged (Wasserman and
  Zhou 2010; Kairouz, Oh and Viswanath 2015). Several pairs, such as the curve of a mechanism, give the smallest bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from spectral_dp.accounting.ledger import Ledger
from spectral_dp.accounting.privacy_loss import Accountant, spending

_EPSILONS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)


class Guarantee(NamedTuple):
    """A pair for which a release is differentially private."""

    epsilon: float
    delta: float


def guarantees_of(ledger: Ledger, accountant: Accountant = "pld") -> list[Guarantee]:
    """Returns points on the curve of all releases that the ledger lists, from epsilon 0 on."""
    spent = spending(ledger.phases, accountant, ledger.relation)
    return [Guarantee(epsilon, spent.delta(epsilon)) for epsilon in _EPSILONS]


def largest_guess_accuracy(guarantees: Iterable[tuple[float, float]]) -> float:
    """Returns the most that an attacker is right who guesses, where both answers are equally likely beforehand.

    At epsilon 0 this is the total variation bound ``(1 + delta) / 2``.

    >>> round(largest_guess_accuracy([(2.0, 1e-5)]), 4), largest_guess_accuracy([(0.0, 0.0)])
    (0.8808, 0.5)
    """
    return min(((1 + (delta - 1) / (1 + math.exp(epsilon))) for epsilon, delta in _checked(guarantees)), default=1.0)


def largest_detection_rate(guarantees: Iterable[tuple[float, float]], false_alarms: float) -> float:
    """Returns the largest share of members that an attacker can recognise who accuses so many others wrongly.

    Args:
        guarantees: Pairs of epsilon and delta that all hold.
        false_alarms: The share of non-members that the attacker takes for members, in [0, 1].

    >>> round(largest_detection_rate([(1.0, 1e-5)], false_alarms=0.01), 4)
    0.0272
    """
    if not 0 <= false_alarms <= 1:
        raise ValueError(f"false_alarms must be a share between 0 and 1, got {false_alarms}")
    bounds = [1.0]
    for epsilon, delta in _checked(guarantees):
        bounds.append(math.exp(epsilon) * false_alarms + delta)
        bounds.append(1 - math.exp(-epsilon) * (1 - delta - false_alarms))
    return min(bounds)


def _checked(guarantees: Iterable[tuple[float, float]]) -> Iterable[tuple[float, float]]:
    """Checks each pair; an epsilon so large that its exponential overflows says nothing, and neither does infinity."""
    for epsilon, delta in guarantees:
        if math.isnan(epsilon) or epsilon < 0 or not 0 <= delta <= 1:
            raise ValueError(f"need epsilon >= 0 and 0 <= delta <= 1, got ({epsilon}, {delta})")
        if epsilon < 700:
            yield epsilon, delta
