"""``spectral-dp compare``: several methods on the same data, seeds and budget."""

from __future__ import annotations

import time
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from spectral_dp.cli.options import JsonOption, with_settings
from spectral_dp.cli.progress import run_all
from spectral_dp.cli.tables import print_wrapped
from spectral_dp.experiments.setting_files import plain_value
from spectral_dp.experiments.settings import ResolvedSettings, Settings, SettingsError

DEFAULT_ARMS = ("nonprivate", "dpsgd", "spectral")


@with_settings
def compare_command(
    given: dict[str, Any],
    arm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METHOD | 'LABEL: NAME=VALUE, ...'",
            help="A configuration: a method, or a label with settings. May be repeated (default: nonprivate, dpsgd, "
            "spectral). A --config file may list them as [arms.LABEL].",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, counted from --seed.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Directory of the runs (default: runs/compare-TIME).")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time; more than one spoils the times in the table.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Trains several configurations on the same data, seeds and budget, and prints one table.

    Noise and batches are drawn from the seeds, so that the table can be reproduced (--no-reproducible draws them from
    the operating system). The same command goes on where it was stopped.

    \b
    spectral-dp compare --epsilon 2 --seeds 3
    spectral-dp compare --arm opacus --arm "rho 0.5: linear_ratio=0.5"
    """  # noqa: D301  (\b is for click: keep these lines as they are)
    from spectral_dp.experiments.comparison import Comparison, write_comparison  # late: torch takes a second
    from spectral_dp.experiments.grid import check_data

    listed = given.pop("arms", {})
    common = {"reproducible": True} | given
    arms = _arms(common, listed, arm or ([] if listed else list(DEFAULT_ARMS)))
    first = Settings.from_dict(common).seed
    comparison = Comparison(arms, range(first, first + seeds), jobs)
    root = out or Path("runs", f"compare-{time.strftime('%Y%m%d-%H%M%S')}")
    check_data(comparison.missing(root))
    if code := run_all(comparison.runs(), root, jobs, to_go_on=f"the same command with --out {root}"):
        raise typer.Exit(code)
    table = write_comparison(comparison, root)
    if as_json:
        typer.echo((root / "comparison.json").read_text())
        return
    print_wrapped(table.headings, table.lines, title=_title(arms), caption=comparison.caption())
    Console().print(f"runs, plots and comparison.json in {root}; spectral-dp report {root} draws a page of them")


def _arms(common: dict[str, Any], listed: dict[str, Any], asked: list[str]) -> dict[str, ResolvedSettings]:
    chosen: dict[str, dict[str, Any]] = {label: dict(settings) for label, settings in listed.items()}
    for text in asked:
        label, colon, settings = (part.strip() for part in text.partition(":"))
        if label in chosen:
            raise SettingsError(f"two configurations are called {label!r}: give each a label of its own")
        chosen[label] = _inline(text, settings) if colon else {"method": label}
    if any("seed" in settings for settings in chosen.values()):
        raise SettingsError("configurations share their seeds, so that they can be compared: use --seed and --seeds")
    return {
        label: Settings.from_dict(common | settings, source=f"configuration {label!r}").relevant().resolved()
        for label, settings in chosen.items()
    }


def _inline(text: str, settings: str) -> dict[str, Any]:
    """Reads ``method=dpsgd, epochs=3``: a TOML table, or simpler, where words need no quotes."""
    found: dict[str, Any] = {}
    try:
        return tomllib.loads(f"settings = {{{settings}}}")["settings"]
    except tomllib.TOMLDecodeError:
        pass  # words without quotes
    for pair in filter(None, (part.strip() for part in settings.split(","))):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not (name and equals and value):
            raise SettingsError(f"--arm {text!r}: write settings as NAME=VALUE, separated by commas")
        found[name] = plain_value(value)
    return found


def _title(arms: dict[str, ResolvedSettings]) -> str:
    first = next(iter(arms.values()))
    budgets = sorted({s.epsilon for s in arms.values() if s.epsilon is not None})
    budget = f", epsilon {', '.join(f'{e:g}' for e in budgets)} at delta {first.delta:g}" if budgets else ""
    return f"{first.dataset}, {first.model}, {first.epochs} epochs{budget}"
