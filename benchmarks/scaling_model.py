"""A cost model of a step of several processes, fitted to measured parts, and what it predicts for many workers.

    python benchmarks/scaling_model.py [--results results/bench/distributed.json] [--page docs/scaling.md]

Reads what ``bench_distributed.py`` wrote, and replaces the tables of the page, which are between two marks. The page
explains the model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from made_by import as_text
from page import Sheet
from scipy.optimize import nnls

from spectral_dp.files import write_text

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- begin: made by benchmarks/scaling_model.py -->", "<!-- end -->"

WORKERS, RECORDS = (1, 8, 64, 1024), (60_000, 1_000_000_000)
LARGE, KEPT = 100_000_000, 0.25  # parameters of a large model; the fraction that a filter keeps of it
LINKS, RATIOS = (1, 10, 100), (0.0, 0.5, 0.75, 0.9)  # Gbit/s; what filters drop
LATENCY = 50e-6  # seconds that a message takes between two machines of one data centre, whatever its size
BUSY = 0.5  # load of other programs above which timings are to be made again
FLOAT = 4  # bytes of a number


@dataclass(frozen=True)
class Line:
    """``fixed + rate * size`` seconds."""

    fixed: float
    rate: float

    @classmethod
    def through(cls, points: Sequence[Sequence[float]]) -> Line:
        """The line with the least *relative* errors through ``[size, seconds]``, neither part below zero."""
        sizes, seconds = np.array(points, dtype=float).T
        (fixed, rate), _ = nnls(np.stack([1 / seconds, sizes / seconds], axis=1), np.ones(len(sizes)))
        return cls(float(fixed), float(rate))

    def __call__(self, size: float) -> float:
        return self.fixed + self.rate * size


@dataclass(frozen=True)
class Link:
    """A connection between two workers: seconds for a message, and seconds for each byte."""

    latency: float
    per_byte: float

    @classmethod
    def of_speed(cls, gigabits: float) -> Link:
        return cls(LATENCY, 8e-9 / gigabits)


@dataclass(frozen=True)
class Costs:
    """What a step consists of, as functions of sizes.

    Attributes:
        compute: Clipped sums of one worker by samples, for a model of ``parameters`` parameters.
        noise: By numbers that are drawn.
        sampling: By records of a shard.
        link: The connection between workers.
        parameters: Of the model that was measured.
    """

    compute: Line
    noise: Line
    sampling: Line
    link: Link
    parameters: int

    @classmethod
    def fitted(cls, found: dict[str, Any]) -> Costs:
        """Fits the parts that were measured. Two workers send all bytes once in each of two rounds of half of them."""
        parts = {name: Line.through(points) for name, points in found["parts"].items()}
        wire = parts["all_reduce"]
        link = Link(wire.fixed / 2, wire.rate)
        return cls(parts["compute"], parts["noise"], parts["sampling"], link, found["parameters"])

    def step(
        self, workers: int, records: float, batch: float, parameters: float, kept: float = 1.0
    ) -> dict[str, float]:
        """Returns the seconds of each part of a step, for ``batch`` samples of each worker."""
        size = parameters / self.parameters
        return {
            "compute": self.compute.fixed + self.compute.rate * size * batch,
            "noise": self.noise(kept * parameters),
            "sampling": self.sampling(records / workers),
            "traffic": ring_seconds([self.link] * workers, FLOAT * kept * parameters, is_latency_counted=False),
            "latency": 2 * ring_seconds([self.link] * workers, 0),  # of the meeting, and of the sum
        }


def ring_seconds(links: Sequence[Link], size: float, *, is_latency_counted: bool = True) -> float:
    """Simulates a ring all-reduce of ``size`` bytes, message by message; returns when the last worker is done.

    In each of ``2 (R - 1)`` rounds every worker sends one of ``R`` pieces to the next one, as soon as it has received
    the piece of the round before. So one slow link delays all.

    Args:
        links: The link from each worker to the next one, from the last to the first.
        size: Bytes that each worker has.
        is_latency_counted: Whether messages take time beyond that of their bytes.
    """
    if len(links) < 2:
        return 0.0
    takes = np.array([link.latency * is_latency_counted + link.per_byte * size / len(links) for link in links])
    has, is_free = np.zeros(len(links)), np.zeros(len(links))  # when a worker has the piece to send, and the link
    for _ in range(2 * (len(links) - 1)):
        is_free = np.maximum(has, is_free) + takes
        has = np.roll(is_free, 1)
    return float(has.max())


def fit_sheet(costs: Costs, found: dict[str, Any]) -> Sheet:
    """The fitted lines, and what they say of the step that was measured as a whole."""
    rows = [
        ["compute", _ms(costs.compute.fixed), f"{1e6 * costs.compute.rate:.3g} µs a sample"],
        ["noise", _ms(costs.noise.fixed), f"{1e9 * costs.noise.rate:.3g} ns a number"],
        ["sampling", _ms(costs.sampling.fixed), f"{1e9 * costs.sampling.rate:.3g} ns a record"],
        ["all-reduce of two", _ms(2 * costs.link.latency), f"{1e9 * costs.link.per_byte:.3g} ns a byte"],
    ]
    batch = found["batch_size"]
    measured = {(r["name"], r["processes"]): r["seconds"][1] for r in found["results"]}
    for workers in (1, 2):
        records = 16 * batch * workers  # as in bench_distributed.py
        predicted = sum(costs.step(workers, records, batch, costs.parameters).values())
        seconds = measured["spectral-dp", workers]
        rows.append([f"a step of {workers}, predicted", _ms(predicted), f"measured {_ms(seconds)}"])
    return Sheet("What was fitted", ("", "ms", "and for each"), [rows])


def prediction_sheet(costs: Costs, parameters: float, kept: float, batch: int) -> Sheet:
    """The parts of a step for each number of workers and of records, and the largest of them."""
    names = ["compute", "noise", "sampling", "traffic", "latency"]
    sections = []
    for records in RECORDS:
        rows = []
        for workers in WORKERS:
            parts = costs.step(workers, records, batch, parameters, kept)
            total = sum(parts.values())
            alone = sum(costs.step(1, records / workers, batch, parameters, kept).values())  # a share of the records
            cells = [f"{records:.0e}".replace("e+0", "e"), str(workers), *(_ms(parts[name]) for name in names)]
            rows.append([*cells, _ms(total), f"{alone / total:.2f}", max(parts, key=lambda name: parts[name])])
        sections.append(rows)
    headings = ("records", "workers", *names, "step", "efficiency", "bottleneck")
    title = f"{parameters:.3g} parameters, {100 * kept:.0f} % kept, {batch} samples for each worker, 10 Gbit/s: ms"
    return Sheet(title, headings, sections)


def traffic_sheet(workers: Sequence[int] = (8, 64)) -> Sheet:
    """The simulated all-reduce of a large model by link speed and filter; and with one link of half the speed."""
    rows = []
    for speed in LINKS:
        for count in workers:
            links = [Link.of_speed(speed)] * count
            cells = [_ms(ring_seconds(links, FLOAT * (1 - ratio) * LARGE)) for ratio in RATIOS]
            slow = [replace(links[0], per_byte=2 * links[0].per_byte), *links[1:]]
            rows.append([str(speed), str(count), *cells, _ms(ring_seconds(slow, FLOAT * (1 - RATIOS[2]) * LARGE))])
    headings = (
        "Gbit/s",
        "workers",
        *(f"ratio {ratio:g}" for ratio in RATIOS),
        f"ratio {RATIOS[2]:g}, one link at half",
    )
    return Sheet(f"Simulated traffic of a step, {LARGE:.0e} parameters: ms", headings, [rows])


def tables(found: dict[str, Any] | None) -> str:
    """All that the page shows of the model, in Markdown; without results, the traffic alone, which needs none."""
    if found is None:
        words = "The parts have not been measured on a free machine yet, so there are no predictions in seconds here."
        return "\n\n".join([words, _in_page(traffic_sheet())])
    costs = Costs.fitted(found)
    facts = found["made_by"]
    apart = replace(costs, link=Link.of_speed(10))
    parts = [f"Measured by {as_text(facts)}."]
    if facts.get("load", 0) > BUSY:
        parts.append(
            f"**Other programs ran at the same time (load {facts['load']:g} on two cores). The seconds are therefore "
            "provisional, and so is what is predicted from them; the traffic below is not.** Make the tables again on "
            "a free machine."
        )
    sheets = [
        fit_sheet(costs, found),
        prediction_sheet(apart, costs.parameters, 1.0, found["batch_size"]),
        prediction_sheet(apart, LARGE, 1.0, found["batch_size"]),
        prediction_sheet(apart, LARGE, KEPT, found["batch_size"]),
        traffic_sheet(),
    ]
    return "\n\n".join([*parts, *map(_in_page, sheets)])


def _in_page(sheet: Sheet) -> str:
    return sheet.as_markdown().replace("## ", "### ", 1)


def with_tables(page: str, made: str) -> str:
    """Returns the page with these tables between its marks."""
    head, mark, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (mark and end):
        raise ValueError(f"the page must have the lines {BEGIN} and {END}, between which the tables go")
    return f"{head}{BEGIN}\n\n{made}\n\n{END}{tail}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "bench" / "distributed.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "scaling.md")
    args = parser.parse_args()
    found = json.loads(args.results.read_text()) if args.results.is_file() else None
    if found is None:
        print(f"{args.results} is missing: python benchmarks/bench_distributed.py --out results/bench", file=sys.stderr)
    write_text(args.page, with_tables(args.page.read_text(), tables(found)))


if __name__ == "__main__":
    main()
