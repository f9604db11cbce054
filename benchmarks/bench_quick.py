"""Have private steps become slower? The five workloads of the goals, raced again and compared with what is committed.

    python benchmarks/bench_quick.py [--models lenet5 model2] [--runs 3] [--rounds 3] [--committed results/bench]

Seconds belong to a machine, so *ratios* are compared: time over plain, time over the mode of Opacus that was the
quickest, peak memory over plain. A ratio is the median over separate runs with freshly started processes, shown with
the smallest and the largest run. It must not exceed the committed ratio by more than its band, which is what machines
of the same kind and runs on different days have differed by. Ends with status 1 if one does.

Takes about five minutes on two cores that do nothing else. On a busy machine, --threads 1 --clock cpu tells more.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import entries as kept
import measuring
from bench_training import job
from entries import Entry, best_opacus
from goals import GOALS, QUANTITIES, of_quantity
from page import Sheet
from spread import Spread

BATCH = 256
#: What is raced of each workload: the contestant whose goals name Opacus.
WORKLOADS = {g.workload: g.contestant for g in GOALS if (g.batch, g.quantity) == (BATCH, "time / best Opacus")}
COMMITTED = Path(__file__).parent.parent / "results" / "bench"

#: By how much each ratio may exceed the committed one, as a fraction of it.
BANDS = dict(zip(QUANTITIES, (0.25, 0.25, 0.20), strict=True))


@dataclass(frozen=True)
class Comparison:
    """A ratio as committed and as measured in each run."""

    workload: str
    quantity: str
    committed: float
    runs: tuple[float, ...]

    @property
    def change(self) -> float:
        """By what fraction the median over runs exceeds the committed ratio."""
        return statistics.median(self.runs) / self.committed - 1

    @property
    def is_worse(self) -> bool:
        return self.change > BANDS[self.quantity]

    def cells(self) -> list[str]:
        middle, ends = statistics.median(self.runs), f"[{min(self.runs):.2f}, {max(self.runs):.2f}]"
        verdict = (
            "WORSE" if self.is_worse else "better: commit it" if self.change < -BANDS[self.quantity] else "as before"
        )
        band = f"+{BANDS[self.quantity]:.0%}"
        return [
            self.workload,
            self.quantity,
            f"{self.committed:.2f}",
            f"{middle:.2f} {ends}",
            f"{self.change:+.0%}",
            band,
            verdict,
        ]


def compare(committed: Iterable[Entry], runs: Iterable[Entry]) -> list[Comparison]:
    """Returns every ratio that both have. Raises ``ValueError`` if nothing was measured of a workload."""
    references = {(e.name, e.size): e for e in committed}
    measured: dict[tuple[str, int], list[Entry]] = {}
    for entry in runs:
        measured.setdefault((entry.name, entry.size), []).append(entry)
    found = []
    for key, entries in measured.items():
        if key not in references:
            raise ValueError(
                f"nothing is committed of {key[0]} at batch {key[1]}: measure it by bench_training.py --out"
            )
        for quantity in QUANTITIES:
            before, *now = (_ratio(entry, quantity) for entry in (references[key], *entries))
            if before is None or None in now:
                raise ValueError(f"{key[0]}: no {quantity}, because a contestant failed")
            found.append(Comparison(key[0], quantity, before, tuple(n for n in now if n is not None)))
    return found


def _ratio(entry: Entry, quantity: str) -> float | None:
    standing = entry.standing(WORKLOADS[entry.name])
    found = None if standing is None else of_quantity(standing, quantity)
    return found.median if isinstance(found, Spread) else found


def sheet(comparisons: Iterable[Comparison]) -> Sheet:
    headings = ("workload", "ratio", "committed", "median of runs [least, most]", "change", "band", "verdict")
    sections: dict[str, list[list[str]]] = {}
    for comparison in comparisons:
        sections.setdefault(comparison.workload, []).append(comparison.cells())
    return Sheet(f"Spectral-DP at batch {BATCH}, beside what is committed", headings, list(sections.values()))


def main() -> None:
    parser = measuring.parser(__doc__, rounds=3)
    parser.add_argument("--models", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS), metavar="MODEL")
    parser.add_argument("--runs", type=int, default=3, help="separate runs, each with new processes")
    parser.add_argument(
        "--committed", type=Path, default=COMMITTED, help="the directory of the results to compare with"
    )
    args = parser.parse_args()
    if args.out:
        parser.error("results are measured by bench_training.py: --out has no meaning here")
    committed = [e for e in kept.load(args.committed / "training.json") if e.size == BATCH]
    quickest = {e.name: best.contestant for e in committed if (best := best_opacus(e.measured)) is not None}
    if missing := [model for model in args.models if model not in quickest]:
        parser.error(f"nothing is committed in {args.committed} of {missing}")
    jobs = [job(model, BATCH, [WORKLOADS[model], quickest[model]]) for _ in range(args.runs) for model in args.models]
    runs: list[Entry] = []
    measuring.measure(jobs, args, runs.append)
    comparisons = compare(committed, runs)
    measuring.wide_console().print(sheet(comparisons).for_terminal())
    if worse := [f"{c.workload}, {c.quantity}" for c in comparisons if c.is_worse]:
        sys.exit(f"worse than committed by more than the band: {'; '.join(worse)}")


if __name__ == "__main__":
    main()
