"""Training steps of plain PyTorch, Opacus and ours: time and peak memory, as ratios within one run.

    python benchmarks/bench_training.py [--models lenet5 model2] [--batches 256] [--rounds 9] [--out results/bench]

Every contestant lives in a process of its own, so that its peak memory is its own; one of them works at a time. Rounds
visit them forwards and backwards in turn (A B C, C B A, ...), which cancels drift, and medians are reported with their
quartiles. Needs a quiet machine: on a busy one, threads wait for each other.

Goals at batch 256 (time over plain, time over the best mode of Opacus, memory over plain): Model2 and Model3 1.25, 0.6,
1.4; LeNet-5 1.5, 0.6, 1.4; Model1 in blocks of 8 0.7, 0.3, 0.8 of the dense one; a transformer block in blocks of 8
1.3, 0.6, 1.4 of the dense one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

#: Model, block size, and the goals: time / plain, time / best Opacus, memory / plain.
WORKLOADS: dict[str, tuple[str, int | None, tuple[float, float, float] | None]] = {
    "model1": ("model1", None, None),
    "model1 blocks": ("model1", 8, (0.7, 0.3, 0.8)),
    "lenet5": ("lenet5", None, (1.5, 0.6, 1.4)),
    "model2": ("model2", None, (1.25, 0.6, 1.4)),
    "model3": ("model3", None, (1.25, 0.6, 1.4)),
    "transformer blocks": ("transformer", 8, (1.3, 0.6, 1.4)),
}


def work(spec: dict[str, Any]) -> None:
    """The process of one contestant: a line in is a number of steps to make, a line out what they took."""
    import torch
    from contestants import CONTESTANTS, Workload

    if spec["threads"]:
        torch.set_num_threads(spec["threads"])
    started_with = _rss_mb()
    step = CONTESTANTS[spec["contestant"]](Workload(spec["model"], spec["batch"], spec["block_size"]))
    step()
    print("ready", flush=True)
    for line in sys.stdin:
        began = perf_counter()
        for _ in range(int(line)):
            step()
        seconds = (perf_counter() - began) / int(line)
        print(json.dumps({"seconds": seconds, "memory_mb": _peak_mb() - started_with}), flush=True)


def _rss_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _peak_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 2**10


@dataclass
class Measured:
    """Steps of one contestant on one workload."""

    workload: str
    batch: int
    contestant: str
    seconds: list[float]
    memory_mb: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class Contestant:
    """A process that makes steps when told to."""

    def __init__(self, name: str, workload: str, batch: int, threads: int) -> None:
        model, block_size, _ = WORKLOADS[workload]
        spec = {"contestant": name, "model": model, "batch": batch, "block_size": block_size, "threads": threads}
        self.name = name
        self.result = Measured(workload, batch, name, [], 0.0)
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--work", json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent,
        )

    def is_ready(self) -> bool:
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() == "ready":
            return True
        assert self._process.stderr is not None
        lines = self._process.stderr.read().strip().splitlines()
        print(f"{self.result.workload}, {self.name}: {lines[-1] if lines else 'died'}", file=sys.stderr)
        return False

    def measure(self, steps: int) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        self.result.seconds.append(answer["seconds"])
        self.result.memory_mb = answer["memory_mb"]

    def stop(self) -> None:
        self._process.communicate()


def measure(workload: str, batch: int, names: list[str], rounds: int, threads: int) -> list[Measured]:
    contestants = []
    for name in names:  # one after the other: what they do to set up must not disturb anyone
        contestant = Contestant(name, workload, batch, threads)
        (contestants.append if contestant.is_ready() else lambda c: c.stop())(contestant)
    plain = contestants[0]
    plain.measure(1)
    steps = max(1, round(0.25 / plain.result.seconds.pop()))  # a quarter of a second, and the same for everyone
    for contestant in contestants:
        contestant.measure(1)
        contestant.result.seconds.clear()
    for i in range(rounds):
        for contestant in contestants if i % 2 == 0 else reversed(contestants):
            contestant.measure(steps)
    for contestant in contestants:
        contestant.stop()
    return [contestant.result for contestant in contestants]


def rows(measured: list[Measured]) -> list[tuple[str, ...]]:
    """Time, memory, and ratios to plain and to the best mode of Opacus."""
    plain = measured[0]
    by_opacus = [m.median for m in measured if m.contestant.startswith("opacus")]
    found = []
    for m in measured:
        low, _, high = statistics.quantiles(m.seconds, n=4) if len(m.seconds) > 1 else [m.median] * 3
        over_opacus = f"{m.median / min(by_opacus):.2f}" if by_opacus else ""
        found.append(
            (
                m.workload,
                str(m.batch),
                m.contestant,
                f"{1e3 * m.median:.1f} [{1e3 * low:.1f}, {1e3 * high:.1f}]",
                f"{m.median / plain.median:.2f}",
                over_opacus,
                f"{m.memory_mb:.0f}",
                f"{m.memory_mb / plain.memory_mb:.2f}",
            )
        )
    return found


HEADINGS = ("workload", "batch", "contestant", "ms a step [quartiles]", "/ plain", "/ best Opacus", "MB", "/ plain")


def write(out: Path, measured: list[list[Measured]], args: argparse.Namespace) -> None:
    import torch

    from spectral_dp.experiments.statement import provenance
    from spectral_dp.files import write_json, write_text

    out.mkdir(parents=True, exist_ok=True)
    versions = provenance() | {"python": platform.python_version(), "threads": torch.get_num_threads()}
    try:
        import opacus

        versions["opacus"] = opacus.__version__
    except ImportError:
        pass
    write_json(out / "training.json", {"versions": versions, "measured": [asdict(m) for ms in measured for m in ms]})
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    lines += ["| " + " | ".join(row) + " |" for ms in measured for row in rows(ms)]
    made = ", ".join(f"{name} {value}" for name, value in versions.items())
    command = f"python benchmarks/bench_training.py --rounds {args.rounds}"
    write_text(out / "training.md", "\n".join([f"`{command}`; {made}", "", *lines, ""]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--batches", nargs="+", type=int, default=[256])
    parser.add_argument("--contestants", nargs="+")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=0, help="threads of torch; its own choice by default")
    parser.add_argument("--out", type=Path, help="write training.json and training.md here")
    args = parser.parse_args()
    if args.work:
        work(json.loads(args.work))
        return
    from contestants import CONTESTANTS

    names = args.contestants or list(CONTESTANTS)
    names = ["plain", *(name for name in names if name != "plain")]
    measured = []
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("benchmark", total=len(args.models) * len(args.batches))
        for workload in args.models:
            for batch in args.batches:
                bar.update(task, description=f"{workload}, batch {batch}")
                measured.append(measure(workload, batch, names, args.rounds, args.threads))
                bar.advance(task)
                if args.out:
                    write(args.out, measured, args)
    table = Table(*HEADINGS, title="training steps, interleaved medians")
    for ms in measured:
        for row in rows(ms):
            table.add_row(*row)
        table.add_section()
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
