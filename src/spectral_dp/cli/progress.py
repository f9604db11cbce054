"""Progress bars on stderr, and many runs behind one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from spectral_dp.experiments.processes import RunsProgress
    from spectral_dp.experiments.settings import ResolvedSettings

#: Exit code of a run that was stopped by Ctrl-C and can be resumed, as shells have it.
INTERRUPTED = 130


def run_all(runs: Mapping[str, ResolvedSettings], root: Path, jobs: int, *, to_go_on: str) -> int:
    """Makes the runs that are not finished; returns an exit code, whatever happened: what is finished is kept."""
    from spectral_dp.experiments import processes  # late: torch takes a second

    try:
        with progress_bar("training", "runs") as update:

            def show(progress: RunsProgress) -> None:
                facts = ", ".join(f"{name} {share:.0%}" for name, share in progress.running.items())
                done = progress.finished + sum(progress.running.values())
                update(total=progress.total, completed=done, facts=facts)

            processes.run_all(runs, root, jobs=jobs, show=show)
    except KeyboardInterrupt:
        typer.echo(f"stopped; {to_go_on} goes on", err=True)
        return INTERRUPTED
    except processes.RunsFailed as error:
        typer.echo(f"error: {error}", err=True)
        return 1
    return 0


@contextmanager
def progress_bar(title: str, unit: str, *, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """Shows a progress bar on stderr, unless it is to be quiet.

    Yields a function that updates its ``total``, its ``completed`` and the ``facts`` behind it.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[facts]}"))
    with Progress(*columns, *times, console=Console(stderr=True), disable=quiet) as bar:
        yield partial(bar.update, bar.add_task(title, total=None, facts="preparing"))
