"""``spectral-dp report``: one HTML page about one or more runs."""

from pathlib import Path
from typing import Annotated

import typer

from spectral_dp.cli.options import plain_errors


def report_command(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run directories, finished or not, or directories of several."),
    ],
    out: Annotated[Path, typer.Option(help="The page to write; an old one is replaced.")] = Path("report.html"),
    public: Annotated[
        bool, typer.Option("--public", help="Leave out figures of the raw private data, even if they were recorded.")
    ] = False,
    show: Annotated[bool, typer.Option("--open/--no-open", help="Show the page in a browser.")] = False,
) -> None:
    """Makes one self-contained HTML page from runs; those that differ in their seed only are one line.

    \b
    spectral-dp report runs/digits
    spectral-dp report runs/demo --out comparison.html --public
    """  # noqa: D301  (\b is for click: keep these lines as they are)
    with plain_errors():
        from spectral_dp.experiments.report import write_report  # late: torch and matplotlib take a second
        from spectral_dp.experiments.run_directory import RunDirectory

        found = [RunDirectory(run) for given in runs for run in _expanded(given)]
        write_report(found, out, public=public)
        typer.echo(f"{out} ({out.stat().st_size / 1000:,.0f} kB)")
    if show:
        typer.launch(out.resolve().as_uri())


def _expanded(given: Path) -> list[Path]:
    """A run, or the runs in a directory such as that of a comparison."""
    if (given / "config.json").exists() or not given.is_dir():
        return [given]
    return sorted(config.parent for config in given.glob("*/config.json")) or [given]
