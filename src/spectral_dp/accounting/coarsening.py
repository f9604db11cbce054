"""Coarsening: a schedule with thousands of kinds of steps is accounted for as one with at most ``MAX_KINDS`` kinds.

A kind is a pair of a noise multiplier and a sample rate. Kinds are moved to the points of a fixed geometric grid: the
multiplier down and the rate up. So each step counts as one that spends at least as much. There is a chain of such
grids, and each is a part of the one before it. The level is that of the finest grid on which few enough kinds remain:

=======  =====================  =======================================
level    spacing w (logarithm)  what is moved
=======  =====================  =======================================
0        none                   nothing: kinds are counted as they are
1, 2, 3  1/256, 1/128, 1/64     noise multipliers
4        1/64                   noise multipliers and sample rates
5, 6, …  1/32, 1/16, …          noise multipliers and sample rates
=======  =====================  =======================================

Formal guarantee, for a ledger to which steps are added:

- The number of steps is conserved (this is asserted).
- On a given level, the point to which a kind moves does not depend on the other kinds. On a higher level it spends at
  least as much.
- With more steps there are at least as many kinds on every level, so the level can only rise.
- Hence a longer ledger counts as steps that spend, one by one, at least as much as those of the shorter one. (When
  the level rises, fewer kinds are moved to a common grid, which would cost less. ``privacy_loss.spending`` adds a term
  that makes up for this.)

Cost: on spacing w, the noise multiplier of a step is reduced by a factor of e^-w at most, and by half of that on
average. A schedule from one multiplier to half of it, at one or two sample rates, has w = 1/64. Its ε is about 1 % too
high.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache

MAX_KINDS = 96  # number of kinds of steps that are composed separately, at most

_FINEST = 2.0**-8  # spacing of the finest grid, as a difference of logarithms
_EXACT_RATES = 3  # up to this level, sample rates are not moved, because there are seldom many of them

Kind = tuple[float, float]  # noise multiplier and sample rate
Cell = tuple[float, float]  # the numbers of a kind's point on a grid, or the kind itself where it is not moved


def coarsened(counts: Mapping[Kind, int], least_level: int = 0) -> tuple[int, dict[Kind, int]]:
    """Returns the level that is used, and the number of steps of each kind on it, in order of occurrence.

    Args:
        counts: The number of steps of each kind.
        least_level: The lowest level that may be used.

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
    """Returns, for each kind, the point on the grid of this level to which it moves."""
    if level == 0:
        return list(kinds)
    w = _spacing(level)
    if level <= _EXACT_RATES:
        return [(_number_below(sigma) // w, rate) for sigma, rate in kinds]
    return [(_number_below(sigma) // w, _number_below(1 / rate) // w) for sigma, rate in kinds]


def counted_as(kind: Kind, level: int) -> Kind:
    """Returns the kind as which a kind counts on a level: with at most its noise and at least its sample rate."""
    return _kind(cells_of([kind], level)[0], level)


def _kind(cell: Cell, level: int) -> Kind:
    """Returns the kind at a point of the grid of this level."""
    if level == 0:
        return cell
    w = _spacing(level) * _FINEST
    return math.exp(cell[0] * w), cell[1] if level <= _EXACT_RATES else min(math.exp(-cell[1] * w), 1.0)


def _spacing(level: int) -> int:
    """Returns the spacing of a level, in units of ``_FINEST``.

    The first level that moves sample rates has the spacing of the last one that does not.
    """
    return int(2 ** (level - 1 if level <= _EXACT_RATES else level - 2))


@lru_cache(maxsize=2**15)
def _number_below(value: float) -> int:
    """Returns the number of the last point of the finest grid that is not above ``value``.

    Coarser grids divide this whole number, so the grids nest exactly.
    """
    number = round(math.log(value) / _FINEST)
    while math.exp(number * _FINEST) > value:
        number -= 1
    return number
