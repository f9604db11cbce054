"""The goals of the benchmark: ratios in one run on two cores, at batch 256, of Spectral-DP with flat clipping."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from entries import Entry, Standing
from page import Sheet
from spread import Spread

BATCH = 256
CONTESTANT = "spectral"
STEEPEST = 1.05  # log-log slope of ours in the batch size
QUANTITIES = ("time / plain", "time / best Opacus", "memory / plain")


def verdict(measured: float | None, most: float) -> str:
    """In words: reached, or by how much missed."""
    if measured is None:
        return "not measured"
    return "reached" if measured <= most else f"missed by {100 * (measured / most - 1):.1f} %"


@dataclass(frozen=True)
class Goal:
    """The most that one of the :data:`QUANTITIES` may be."""

    workload: str
    quantity: str
    most: float

    def measured(self, entries: Iterable[Entry]) -> Spread | float | None:
        """What it came to; a peak of memory has no spread."""
        entry = next((e for e in entries if (e.name, e.size) == (self.workload, BATCH)), None)
        standing = None if entry is None else entry.standing(CONTESTANT)
        return None if standing is None else of_quantity(standing, self.quantity)


_MOST = {
    "model1 blocks": (0.7, 0.3, 0.8),
    "lenet5": (1.5, 0.6, 1.4),
    "model2": (1.25, 0.6, 1.4),
    "model3": (1.25, 0.6, 1.4),
    "transformer blocks": (1.3, 0.6, 1.4),
}
GOALS = [Goal(w, q, m) for w, most in _MOST.items() for q, m in zip(QUANTITIES, most, strict=True)]


def of_quantity(standing: Standing, quantity: str) -> Spread | float | None:
    if quantity == "memory / plain":
        return standing.memory_over_plain
    return standing.over_plain if quantity == "time / plain" else standing.over_opacus


def judge(entries: list[Entry]) -> list[dict[str, Any]]:
    """Every goal with what was measured, as plain values."""
    judged = []
    for goal in GOALS:
        found = goal.measured(entries)
        middle = found.median if isinstance(found, Spread) else found
        text = found.text() if isinstance(found, Spread) else "" if found is None else f"{found:.2f}"
        facts = {"workload": goal.workload, "quantity": goal.quantity, "most": goal.most, "measured": middle}
        said = verdict(middle, goal.most)
        if said == "reached" and isinstance(found, Spread) and found.high > goal.most:
            said = "reached in the median, not in a quarter of the rounds"
        judged.append(facts | {"with_spread": text, "verdict": said})
    return judged


def goals_sheet(entries: list[Entry]) -> Sheet:
    sections: dict[str, list[list[str]]] = {}
    for j in judge(entries):
        cells = [j["workload"], j["quantity"], f"≤ {j['most']:g}", j["with_spread"], j["verdict"]]
        sections.setdefault(j["workload"], []).append(cells)
    title = f"Goals: {CONTESTANT}, flat clipping, batch {BATCH}"
    return Sheet(title, ("workload", "ratio", "goal", "measured", "verdict"), list(sections.values()))
