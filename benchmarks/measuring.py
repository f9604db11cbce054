"""From a list of races to a list of entries, with a bar of progress; and the options that all such benchmarks have."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from entries import Entry
from made_by import made_by
from race import CLOCKS, Terms, race
from rich.console import Console
from rich.progress import Progress
from workloads import Workload


@dataclass(frozen=True)
class Job:
    """A race to be run, and the name and size that its entry gets."""

    name: str
    size: int
    work: Workload
    contestants: list[str]


def parser(description: str | None, rounds: int) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=rounds)
    made.add_argument("--patience", type=float, default=30.0, help="seconds of a first step from which rounds are cut")
    made.add_argument("--threads", type=int, default=0, help="threads of torch; its own choice by default")
    made.add_argument("--clock", choices=CLOCKS, default="wall", help="time that passes, or that of the processor")
    made.add_argument("--most-mb", type=float, help="memory for each contestant; default: what is free")
    made.add_argument("--out", type=Path, help="a directory for the results, as JSON, Markdown and PNG")
    return made


def measure(jobs: list[Job], args: argparse.Namespace, keep: Callable[[Entry], None]) -> None:
    """Runs the races one by one; ``keep`` gets each entry as soon as it is there."""
    terms = Terms(args.rounds, args.threads, args.patience, args.most_mb, args.clock)
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(jobs))
        for job in jobs:

            def note(text: str, job: Job = job) -> None:
                bar.update(task, description=f"{job.name}, {job.size}: {text}")

            facts = made_by(args.threads)  # anew for each: somebody may commit while this runs for hours
            keep(Entry(job.name, job.size, facts, race(job.work, job.contestants, terms, note)))
            bar.advance(task)


def wide_console() -> Console:
    """Tables are wide: where nothing says how wide the output is, it is wide enough."""
    return Console() if Console().is_terminal else Console(width=160)
