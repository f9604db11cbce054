"""How time and memory of a training step grow with batch size, width and block size: exponents, tables, a picture.

    python benchmarks/bench_growth.py [--curves "batch size, lenet5"] [--rounds 5] [--out results/bench]

Every point is a race of its own (see race.py). The exponent of a curve is the slope of the line through its points on
log-log axes, by least squares. The goal: at most 1.05 for ours in the batch size, in time and in memory.

With --out, the points that were measured replace those that were there, and the others stay.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import entries as kept
import measuring
from entries import Entry
from goals import STEEPEST, verdict
from growth_figure import draw
from measuring import Job
from page import Sheet, markdown, sources, steps_sheet
from spread import log_log_slope
from workloads import Workload

from spectral_dp.files import save_figure, write_json, write_text

BATCH = 256
_SMALLEST = 4.0  # MB


@dataclass(frozen=True)
class Curve:
    """What grows, the workload for each size, and who is measured."""

    grows: str
    sizes: tuple[int, ...]
    work: Callable[[int], Workload]
    contestants: tuple[str, ...]

    @property
    def is_judged(self) -> bool:
        return self.grows == "batch size"


_BATCHES = (64, 128, 256, 512, 1024)
_EACH = ("plain", "spectral", "dpsgd", "opacus ghost")
_DENSE = ("plain", "dpsgd", "opacus ghost", "opacus hooks")
CURVES = {
    "batch size, lenet5": Curve("batch size", _BATCHES, lambda b: Workload("lenet5", b), _EACH),
    "batch size, model2": Curve("batch size", _BATCHES, lambda b: Workload("model2", b), _EACH),
    "batch size, model1 blocks": Curve("batch size", _BATCHES, lambda b: Workload("model1", b, 8), _EACH),
    "width, mlp": Curve(
        "width", (256, 512, 1024, 2048, 4096), lambda w: Workload("mlp", BATCH, width=w), _DENSE
    ),
    "width, conv stack": Curve(
        "width", (16, 32, 64, 128), lambda w: Workload("conv stack", BATCH, width=w), _EACH
    ),
    # A block of 1 is the dense layer, on which a ratio has nothing to drop.
    "block size, layer": Curve(
        "block size",
        tuple(2**k for k in range(9)),
        lambda d: Workload("layer", BATCH, d if d > 1 else None, width=2048),
        ("plain", "spectral", "dpsgd"),
    ),
}  # fmt: skip


def slopes(entries: list[Entry]) -> list[dict[str, Any]]:
    """The exponents of every contestant on every curve, and what they say about the goal."""
    found = []
    for name, curve in CURVES.items():
        points = [entry for entry in entries if entry.name == name]
        for contestant in curve.contestants:
            standings = [(e.size, s) for e in points if (s := e.standing(contestant))]
            # Peaks of less than a few megabytes are within what a process varies by.
            there = [(n, s.time.median, s.memory_mb) for n, s in standings if s.time and (s.memory_mb or 0) > _SMALLEST]
            if not there:
                continue
            sizes, times, memory_mb = zip(*there, strict=True)
            time, memory = log_log_slope(sizes, times), log_log_slope(sizes, memory_mb)
            facts: dict[str, Any] = {"curve": name, "contestant": contestant, "sizes": list(sizes)}
            facts |= {"time_slope": time, "memory_slope": memory}
            if curve.is_judged and contestant in ("spectral", "dpsgd"):
                facts |= {"time_verdict": verdict(time, STEEPEST), "memory_verdict": verdict(memory, STEEPEST)}
            found.append(facts)
    return found


def slopes_sheet(entries: list[Entry]) -> Sheet:
    sections: dict[str, list[list[str]]] = {}
    for facts in slopes(entries):
        exponents = ["" if (s := facts[key]) is None else f"{s:.2f}" for key in ("time_slope", "memory_slope")]
        verdicts = [facts.get("time_verdict", ""), facts.get("memory_verdict", "")]
        sizes = f"{facts['sizes'][0]} to {facts['sizes'][-1]}"
        cells = [facts["curve"], facts["contestant"], sizes, exponents[0], verdicts[0], exponents[1], verdicts[1]]
        sections.setdefault(facts["curve"], []).append(cells)
    goal = f"≤ {STEEPEST}"
    headings = ("curve", "contestant", "sizes", "time slope", goal, "memory slope", goal)
    return Sheet("Slopes on log-log axes", headings, list(sections.values()))


def sheets(entries: list[Entry]) -> list[Sheet]:
    return [slopes_sheet(entries), steps_sheet(entries, "Points of the curves", "curve", "size")]


def write(out: Path, new: Entry) -> None:
    """Merges a point into what is there."""
    out.mkdir(parents=True, exist_ok=True)
    entries = in_order(kept.merge(kept.load(out / "growth.json"), [new]))
    write_json(out / "growth.json", kept.as_json(entries, slopes=slopes(entries)))
    picture = "![Time and memory of a step as batch, width and blocks grow](growth.png)"
    tables = [sheet.as_markdown() for sheet in sheets(entries)]
    write_text(out / "growth.md", markdown("Growth", [sources(entries), picture, *tables]))
    save_figure(draw(entries, {name: curve.grows for name, curve in CURVES.items()}), out / "growth.png")


def in_order(entries: list[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: (list(CURVES).index(entry.name), entry.size))


def arguments() -> argparse.Namespace:
    parser = measuring.parser(__doc__, rounds=5)
    parser.add_argument("--curves", nargs="+", default=list(CURVES), choices=list(CURVES), metavar="CURVE")
    parser.add_argument("--sizes", nargs="+", type=int, help="instead of those that a curve has")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    new: list[Entry] = []

    def keep(entry: Entry) -> None:
        new.append(entry)
        if args.out:
            write(args.out, entry)

    chosen = {name: CURVES[name] for name in args.curves}
    jobs = [
        Job(name, size, curve.work(size), list(curve.contestants))
        for name, curve in chosen.items()
        for size in args.sizes or curve.sizes
    ]
    measuring.measure(jobs, args, keep)
    for sheet in reversed(sheets(in_order(new))):  # the slopes last, where a terminal shows them
        measuring.wide_console().print(sheet.for_terminal())


if __name__ == "__main__":
    main()
