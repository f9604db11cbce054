"""Chooses the records of a rehearsal: different ones for each of its tests, if there are enough."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._pytree import tree_leaves

from spectral_dp.training.rehearsal.twins import find_twins

# The number of records in which the longest is searched, if records differ in length; and in which twins are searched,
# first and if too few were found: if there are a thousand lengths, equal ones are rare among a hundred records.
_CANDIDATES, _TWIN_CANDIDATES = 48, (96, 384)

_TESTS, _TWIN_TESTS = 7, 4


class Choice:
    """Chooses records of a dataset.

    Args:
        size: The number of records.
        read: A function that returns the records with given indices.
        collate: A function that makes a batch of records.
        are_alike: Whether all records have the same shape.
        large: The size of a large batch.
        small: The size of a small batch.
    """

    def __init__(
        self,
        size: int,
        read: Callable[[Sequence[int]], list[Any]],
        collate: Callable[[list[Any]], Any],
        *,
        are_alike: bool,
        large: int,
        small: int,
    ) -> None:
        self._size, self._read, self._collate = size, read, collate
        self._are_alike, self._large, self._small = are_alike, large, small
        self._twins: tuple[list[tuple[Any, Any]], Any] | None = None

    def records(self, test: int) -> list[Any]:
        """Returns the records of a test: a short one, the longest one, and others."""
        needed = 2 * self._large + self._small
        if self._are_alike:
            return self._read([(_TESTS * i + test) * self._size // (_TESTS * needed) for i in range(needed)])
        candidates = self._read([i * self._size // _CANDIDATES for i in range(_CANDIDATES)])
        candidates.sort(key=_length)
        longest, rest = candidates[-1], candidates[:-1]
        rest = rest[test:] + rest[:test]
        return [rest[0], longest, *rest[1:needed]]

    def with_twins(self, test: int) -> list[Any] | None:
        """Returns ``a``, the longest record, ``b``, mates, and the twins of these mates; None if there are too few.

        ``a`` and ``b`` are twins, too.
        """
        pairs, longest = self._pairs(test)
        places = self._large
        if self._large > 2:  # one place is for the longest record, which stays there
            pairs = [pair for pair in pairs if not any(record is longest for record in pair)]
            places -= 1
        (a, b), *mates = pairs[:places] or [(None, None)]
        return [a, longest, b, *(one for one, _ in mates), *(other for _, other in mates)] if mates else None

    def twins_and_mates(self, test: int) -> tuple[Any, Any, list[Any], list[Any]] | None:
        """Returns two twins, mates for a small batch, and longer mates for a large one; None if there are too few."""
        pairs, _ = self._pairs(test)
        mates = sorted((record for pair in pairs[1:] for record in pair), key=_length)
        few, many = mates[: self._small - 1], mates[self._small - 1 :][1 - self._large :]
        return (*pairs[0], few, many) if many else None

    def _pairs(self, test: int) -> tuple[list[tuple[Any, Any]], Any]:
        """Returns pairs of twins, and the longest record that was read."""
        if self._twins is None:  # never a record and itself, which would pass every test
            for number in _TWIN_CANDIDATES:
                candidates = self._read(sorted({i * self._size // number for i in range(number)}))
                self._twins = find_twins(candidates, self._collate, self._large), max(candidates, key=_length)
                if len(self._twins[0]) >= self._large or number >= self._size:
                    break
            assert self._twins is not None
        pairs, longest = self._twins
        turn = test * len(pairs) // _TWIN_TESTS
        return pairs[turn:] + pairs[:turn], longest


def _length(record: Any) -> int:
    """Returns how many numbers and characters a record contains."""
    return sum(math.prod(leaf.shape) if hasattr(leaf, "shape") else len(str(leaf)) for leaf in tree_leaves(record))
