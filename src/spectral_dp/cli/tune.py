"""``spectral-dp tune``: a search for good settings, whose report says whether the choice is accounted for."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from spectral_dp.cli.options import JsonOption, print_result, with_settings
from spectral_dp.cli.progress import INTERRUPTED, progress_bar
from spectral_dp.experiments.rounding import rounded_up
from spectral_dp.experiments.settings import ResolvedSettings, SettingsError

if TYPE_CHECKING:
    from spectral_dp.experiments.tuning.open_search import Records
    from spectral_dp.experiments.tuning.plan import AccountedSearch

Accounting = Literal["selection", "public-data", "none"]
Law = Literal["negative-binomial", "poisson"]


@with_settings
def tune_command(
    given: dict[str, Any],
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=LOW..HIGH[:log] | NAME=A,B,C",
            help="A setting to search. May be repeated. A --config file may list them in a table [search].",
        ),
    ] = None,
    accounting: Annotated[
        Accounting,
        typer.Option(
            help="selection: the winner alone is released, and --epsilon covers the choice. public-data: the records "
            "are public or generated. none: the records are private, and the choice is NOT accounted for."
        ),
    ] = "selection",
    trials: Annotated[
        int, typer.Option(min=1, help="Number of trials; with accounting selection, the expected one.")
    ] = 10,
    law: Annotated[
        Law, typer.Option(help="Law of the number of trials, with accounting selection; poisson may give none.")
    ] = "negative-binomial",
    shape: Annotated[
        float, typer.Option(min=0, help="Shape of negative-binomial: 0 is cheapest and varies most, 1 is geometric.")
    ] = 0.0,
    candidates: Annotated[
        int, typer.Option(min=1, help="Candidates that trials are drawn from, with accounting selection.")
    ] = 64,
    score_noise: Annotated[
        float, typer.Option(help="Noise on the score of a trial in held-out records, with accounting selection.")
    ] = 10.0,
    sampler: Annotated[
        Literal["random", "quasi-random"], typer.Option(help="How candidates are spread over the ranges.")
    ] = "quasi-random",
    search_seed: Annotated[int, typer.Option(min=0, help="Seed of the candidates, which is public.")] = 0,
    hours: Annotated[
        float | None, typer.Option(min=0, help="Stop after so many hours; not with accounting selection.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory of the search (default: runs/tune-TIME).")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Trials at a time.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Searches for good settings by trials on held-out training records, never on the test set.

    With accounting selection, --epsilon is what the whole search may spend. The same command with the same --out goes
    on where it was stopped. docs/tuning.md says what is covered.

    \b
    spectral-dp tune --search learning_rate=0.1..10:log --validation-size 180 --epsilon 2
    spectral-dp tune --config search.toml --accounting none --trials 20 --jobs 2
    """  # noqa: D301  (\b is for click: keep these lines as they are)
    from spectral_dp.experiments.tuning.space import SearchSpace, parse_dimensions, read_dimensions

    listed = given.pop("search", {})
    if not isinstance(listed, dict):
        raise SettingsError("search must be a table of ranges by the name of a setting")
    space = SearchSpace((*read_dimensions(listed), *parse_dimensions(search or [])), sampler, search_seed)
    root = out or Path("runs", f"tune-{time.strftime('%Y%m%d-%H%M%S')}")
    if accounting != "selection":
        drawn = space.candidates({"reproducible": True} | given, trials)
        seconds = None if hours is None else 3600 * hours
        records: Records = "public" if accounting == "public-data" else "private"
        _tune_openly(drawn, [dimension.name for dimension in space.dimensions], records, seconds, root, jobs, as_json)
        return
    if hours is not None:
        raise SettingsError("the number of trials is drawn in advance and all are run: leave --hours out")
    from spectral_dp.accounting import TrialsLaw
    from spectral_dp.experiments.tuning.plan import plan_search

    with Console(stderr=True).status("calibrating the noise of the candidates"):
        drawn_by = TrialsLaw(trials, math.inf if law == "poisson" else shape)
        plan = plan_search(given, space, drawn_by, candidates=candidates, score_noise=score_noise)
    _tune_accounted(plan, root, jobs, as_json)


def _tune_accounted(plan: AccountedSearch, root: Path, jobs: int, as_json: bool) -> None:
    from spectral_dp.experiments.tuning.accounted import run_search  # late: torch takes a second
    from spectral_dp.experiments.tuning.open_search import searched_values

    try:
        with Console(stderr=True).status("running trials; how many there are is not shown, because it is not released"):
            statement = run_search(plan, root, jobs=jobs)
    except KeyboardInterrupt:
        _say_how_to_go_on(root)
    table = Table(title="accounted search: the winner", show_header=False)
    table.add_row("epsilon of the search", f"{rounded_up(statement['epsilon'])} at delta {statement['delta']:g}")
    table.add_row("number of trials", statement["number_of_trials"])
    if statement["winner"] is None:
        table.add_row("winner", "none: no trial gave a result (the logs are in private/)")
    else:
        from spectral_dp.experiments.setting_files import read_file

        winner = ResolvedSettings.from_dict(read_file(root / "released" / "config.json"))
        for name, value in searched_values(winner, plan.searched).items():
            table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
        spread = 100 * statement["noise_of_the_score"]
        table.add_row("noisy held-out accuracy", f"{100 * statement['noisy_score']:.2f} % (noise {spread:.2f})")
    table.add_row("released", str(root / "released"))
    table.add_row("[red]not released[/red]", f"{root / 'private'}: do not publish anything of it")
    for warning in statement["warnings"]:
        table.add_row("[red]warning[/red]", warning)
    print_result({"directory": str(root), **statement}, table, as_json)


def _tune_openly(
    candidates: Sequence[ResolvedSettings],
    searched: Sequence[str],
    records: Records,
    seconds: float | None,
    root: Path,
    jobs: int,
    as_json: bool,
) -> None:
    from spectral_dp.experiments.tuning.open_search import run_open_search

    try:
        with progress_bar("searching", "trials", quiet=as_json) as update:

            def show(progress: Any) -> None:
                done = progress.finished + sum(progress.running.values())
                update(total=progress.total, completed=done, facts=f"{len(progress.running)} running")

            report = run_open_search(candidates, searched, root, records=records, jobs=jobs, seconds=seconds, show=show)
    except KeyboardInterrupt:
        _say_how_to_go_on(root)
    table = Table("trial", "accuracy %", *searched, title="search, NOT accounted for", caption=report["statement"])
    for line in report["ranking"][:10]:
        values = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in line["settings"].values()]
        table.add_row(str(line["trial"]), f"{100 * line['heldout_accuracy']:.2f}", *values)
    print_result({"directory": str(root), **report}, table, as_json)
    if not as_json:
        Console().print(
            f"all trials: {root / 'tune.md'}; train with the best: spectral-dp train --config {root / 'best.json'}"
        )


def _say_how_to_go_on(root: Path) -> NoReturn:
    typer.echo(f"stopped; the same command with --out {root} goes on", err=True)
    raise typer.Exit(INTERRUPTED) from None
