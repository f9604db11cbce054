"""The goals of the benchmark: ratios in one run on two cores, with flat clipping."""

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


_Most = tuple[float | None, float | None, float | None]  # in the order of the quantities; None where there is no goal

#: What is judged, by contestant and batch size. Networks that convolve are trained with channels last by
#: ``spectral-dp train``; they are compared with plain PyTorch and Opacus as one writes them, and in the same order too.
_MOST: dict[tuple[str, int], dict[str, _Most]] = {
    ("spectral", 256): {
        "model1 blocks": (0.7, 0.3, 0.8),
        "lenet5": (1.5, 0.6, 1.0),
        "transformer blocks": (1.3, 0.6, 1.1),
    },
    ("spectral, channels last", 256): {"model2": (1.0, 0.5, 1.0), "model3": (1.0, 0.5, 1.0)},
    ("dpsgd, channels last", 256): {"model2": (1.15, None, 1.1), "model3": (1.15, None, 1.1)},
    ("dpsgd", 256): {"model1": (1.3, None, 1.1)},
    ("spectral", 64): {"lenet5": (1.2, None, None), "model2": (1.2, None, None)},
    ("dpsgd", 32): {
        "bert": (1.3, 0.6, 1.1),
        "torch encoder": (1.3, 0.6, 1.1),
        "bert, lora": (1.15, None, 1.1),
        "bert, biases": (None, None, 1.1),
        "bert, head": (None, None, 1.1),
        "lstm": (2.0, 0.5, 1.1),
    },
}
GOALS = [
    Goal(workload, quantity, limit, contestant, batch)
    for (contestant, batch), goals in _MOST.items()
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
