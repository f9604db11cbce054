"""Medians with their quartiles, ratios of what was measured side by side, and how fast a curve grows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """A median between its quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """Of measured values; None where there are none."""
        found = sorted(values)
        if len(found) < 2:
            return cls(found[0], found[0], found[0]) if found else None
        return cls(*statistics.quantiles(found, n=4, method="inclusive"))

    def text(self, scale: float = 1.0, digits: int = 2) -> str:
        low, median, high = (f"{scale * v:.{digits}f}" for v in (self.low, self.median, self.high))
        return median if low == high else f"{median} [{low}, {high}]"


def paired_ratio(values: Sequence[float | None], references: Sequence[float | None]) -> Spread | None:
    """Of the ratios within each round that both took part in: what slowed down a round slowed down both."""
    both = zip(values, references, strict=False)  # a race that was broken off leaves one list shorter
    return Spread.of(v / r for v, r in both if v is not None and r is not None)


def log_log_slope(sizes: Sequence[float], values: Sequence[float]) -> float | None:
    """The exponent ``a`` of ``values = c sizes^a``, by least squares on logarithms; None for fewer than two points."""
    if len(set(sizes)) < 2:
        return None
    return statistics.linear_regression([math.log(s) for s in sizes], [math.log(v) for v in values]).slope
