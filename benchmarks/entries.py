"""What was measured, by workload and size, each with the versions that made it; kept in a JSON file that can grow.

Ratios are only ever taken within an entry: it is one race, whose contestants met the same machine at the same time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from race import Measured
from spread import Spread, paired_ratio


@dataclass
class Entry:
    """One race.

    Attributes:
        name: The workload, or the curve that the race is a point of.
        size: The batch size, or what grows along the curve.
        made_by: Versions, machine, date and command.
        measured: Each contestant, plain first.
    """

    name: str
    size: int
    made_by: dict[str, Any]
    measured: list[Measured]

    def standings(self) -> list[Standing]:
        plain = next((m for m in self.measured if m.contestant == "plain"), None)
        best = best_opacus(self.measured)
        return [Standing.of(m, plain, best) for m in self.measured]

    def standing(self, contestant: str) -> Standing | None:
        return next((s for s in self.standings() if s.contestant == contestant), None)


@dataclass(frozen=True)
class Standing:
    """A contestant in its race: its times and memory, and ratios to others; None where there is nothing to say."""

    contestant: str
    time: Spread | None
    over_plain: Spread | None
    over_opacus: Spread | None
    memory_mb: float | None
    memory_over_plain: float | None
    failure: str | None

    @classmethod
    def of(cls, own: Measured, plain: Measured | None, best: Measured | None) -> Standing:
        memory = own.memory_mb if own.times else None
        reference = plain.memory_mb if plain is not None and plain.times else None
        return cls(
            contestant=own.contestant,
            time=Spread.of(own.times),
            over_plain=None if plain is None else paired_ratio(own.seconds, plain.seconds),
            over_opacus=None if best is None else paired_ratio(own.seconds, best.seconds),
            memory_mb=memory,
            memory_over_plain=None if memory is None or not reference else memory / reference,
            failure=own.failure,
        )


def best_opacus(measured: Iterable[Measured]) -> Measured | None:
    """The quickest of Opacus' modes, on whichever form of the model that is."""
    finished = [(spread.median, m) for m in measured if (spread := Spread.of(m.times)) and "opacus" in m.contestant]
    return min(finished, key=lambda pair: pair[0])[1] if finished else None


def merge(old: Iterable[Entry], new: Iterable[Entry]) -> list[Entry]:
    """The old entries with those measured anew in their place; entries are replaced whole."""
    return list(({(e.name, e.size): e for e in old} | {(e.name, e.size): e for e in new}).values())


def load(path: Path) -> list[Entry]:
    """The entries of a file that :func:`as_json` made; none if there is no such file."""
    if not path.exists():
        return []
    found = json.loads(path.read_text())["entries"]
    return [Entry(e["name"], e["size"], e["made_by"], [Measured(**m) for m in e["measured"]]) for e in found]


def as_json(entries: Iterable[Entry], **others: Any) -> dict[str, Any]:
    """The entries as plain values, with the standings that follow from them for whoever only reads."""
    return {**others, "entries": [asdict(e) | {"standings": [asdict(s) for s in e.standings()]} for e in entries]}
