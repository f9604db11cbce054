"""The goals of the benchmark: ratios in one run on two cores, with flat clipping.

They are of Spectral-DP at batch 256, and of DP-SGD at batch 32 for models of sequences, which have no filter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from entries import Entry, Standing
from page import Sheet
from spread import Spread

STEEPEST = 1.05  # log-log slope of ours in the batch size
QUANTITIES = ("time / plain", "time / best Opacus", "memory / plain")


def verdict(measured: float | None, most: float) -> str:
    """In words: reached, or by how much missed."""
    if measured is None:
        return "not measured"
    return "reached" if measured <= most else f"missed by {100 * (measured / most - 1):.1f} %"


@dataclass(frozen=True)
class Goal:
    """The most that one of the :data:`QUANTITIES` may be, for a contestant at a batch size."""

    workload: str
    quantity: str
    most: float
    contestant: str
    batch: int

    def measured(self, entries: Iterable[Entry]) -> Spread | float | None:
        """What it came to; a peak of memory has no spread."""
        entry = next((e for e in entries if (e.name, e.size) == (self.workload, self.batch)), None)
        standing = None if entry is None else entry.standing(self.contestant)
        return None if standing is None else of_quantity(standing, self.quantity)


#: In the order of the quantities; None where there is no goal.
_MOST: dict[str, tuple[float | None, float | None, float | None]] = {
    "model1 blocks": (0.7, 0.3, 0.8),
    "lenet5": (1.5, 0.6, 1.4),
    "model2": (1.25, 0.6, 1.4),
    "model3": (1.25, 0.6, 1.4),
    "transformer blocks": (1.3, 0.6, 1.4),
}
_MOST_OF_SEQUENCES: dict[str, tuple[float | None, float | None, float | None]] = {
    "bert": (1.3, 0.6, 1.4),
    "torch encoder": (1.3, 0.6, 1.4),
    "bert, lora": (1.15, None, 1.4),
    "bert, biases": (None, None, 1.4),
    "bert, head": (None, None, 1.4),
    "lstm": (2.0, 0.5, 1.4),
}
GOALS = [
    Goal(workload, quantity, limit, contestant, batch)
    for goals, contestant, batch in ((_MOST, "spectral", 256), (_MOST_OF_SEQUENCES, "dpsgd", 32))
    for workload, most in goals.items()
    for quantity, limit in zip(QUANTITIES, most, strict=True)
    if limit is not None
]


def goals_of(entry: Entry) -> list[Goal]:
    """The goals that a race decides."""
    return [goal for goal in GOALS if (goal.workload, goal.batch) == (entry.name, entry.size)]


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
        facts = asdict(goal) | {"measured": middle}
        said = verdict(middle, goal.most)
        if said == "reached" and isinstance(found, Spread) and found.high > goal.most:
            said = "reached in the median, not in a quarter of the rounds"
        judged.append(facts | {"with_spread": text, "verdict": said})
    return judged


def goals_sheet(entries: list[Entry]) -> Sheet:
    sections: dict[str, list[list[str]]] = {}
    for j in judge(entries):
        who = [j["workload"], str(j["batch"]), j["contestant"]]
        cells = [*who, j["quantity"], f"≤ {j['most']:g}", j["with_spread"], j["verdict"]]
        sections.setdefault(j["workload"], []).append(cells)
    headings = ("workload", "batch", "contestant", "ratio", "goal", "measured", "verdict")
    return Sheet("Goals", headings, list(sections.values()))
