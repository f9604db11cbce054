"""Coarsening: a schedule of thousands of kinds of steps is accounted for as a few dozen, from the private side.

A kind is a noise multiplier and a sample rate. Kinds are moved to the points of a fixed geometric grid, the multiplier
down and the rate up, so each step counts as one that spends at least as much. There is a chain of such grids, each a
part of the one before it, from the kinds as they are (level 0) to very coarse ones. The level is the finest on which
few enough kinds remain.

Formal guarantee. Steps are conserved (asserted). On a given level, what a kind counts as does not depend on the other
kinds, and on a higher level it spends at least as much. With more steps there are at least as many kinds on every
level, so the level can only rise. Hence a longer ledger counts as steps that spend, one by one, at least as much as
those of the shorter one. (That fewer kinds are moved to a common grid when the level rises is made up for: see
``privacy_loss.spending``.)

How much it costs: on spacing w the noise of a step counts as less by a factor of at most e^-w, and half of that on
average. A schedule from one multiplier to half of it, at one or two sample rates, has w = 1/64: ε is about 1 % high.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache

MAX_KINDS = 96  # kinds of steps composed separately

_FINEST = 2.0**-8  # spacing of the finest grid, in logarithms
_EXACT_RATES = 3  # up to this level, of spacing 1/64, sample rates stay as they are: there are seldom many

Kind = tuple[float, float]  # noise multiplier and sample rate
Cell = tuple[float, float]  # the numbers of a kind's point on a grid; or the kind itself, where it is not moved


def coarsened(counts: Mapping[Kind, int], least_level: int = 0) -> tuple[int, dict[Kind, int]]:
    """Returns the level, at least ``least_level``, and the number of steps of each kind on it, in order of occurrence.

    >>> coarsened({(1.01, 0.01): 3, (1.02, 0.02): 4, (1.015, 0.01): 5}, least_level=3)
    (3, {(1.0, 0.01): 8, (1.0157477085866857, 0.02): 4})
    """
    level = least_level
    while len(cells := dict.fromkeys(placed := cells_of(counts, level))) > MAX_KINDS:
        level += 1
    merged = dict.fromkeys(cells, 0)
    for cell, steps in zip(placed, counts.values(), strict=True):
        merged[cell] += steps
    kinds = {_kind(cell, level): steps for cell, steps in merged.items()}
    assert sum(kinds.values()) == sum(counts.values()), "steps were lost in coarsening"
    return level, kinds


def cells_of(kinds: Iterable[Kind], level: int) -> list[Cell]:
    """Returns to which point of the grid of a level each kind moves."""
    if level == 0:
        return list(kinds)
    w = _spacing(level)
    if level <= _EXACT_RATES:
        return [(_number_below(sigma) // w, rate) for sigma, rate in kinds]
    return [(_number_below(sigma) // w, _number_below(1 / rate) // w) for sigma, rate in kinds]


def counted_as(kind: Kind, level: int) -> Kind:
    """Returns what a kind counts as on a level: at most its noise, at least its rate."""
    return _kind(cells_of([kind], level)[0], level)


def _kind(cell: Cell, level: int) -> Kind:
    """Returns the kind at a point."""
    if level == 0:
        return cell
    w = _spacing(level) * _FINEST
    return math.exp(cell[0] * w), cell[1] if level <= _EXACT_RATES else min(math.exp(-cell[1] * w), 1.0)


def _spacing(level: int) -> int:
    """In units of the finest. The first level with coarse rates has the spacing of the last without."""
    return int(2 ** (level - 1 if level <= _EXACT_RATES else level - 2))


@lru_cache(maxsize=2**15)
def _number_below(value: float) -> int:
    """Returns the number of the last point of the finest grid that is not above the value.

    Coarser grids divide it as a whole number, so that they nest exactly.
    """
    number = round(math.log(value) / _FINEST)
    while math.exp(number * _FINEST) > value:
        number -= 1
    return number
