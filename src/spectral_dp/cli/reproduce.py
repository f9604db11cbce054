"""``spectral-dp reproduce``: the paper's tables and figures, ours beside the paper's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spectral_dp.cli.options import named_values, plain_errors
from spectral_dp.cli.progress import INTERRUPTED, run_all
from spectral_dp.cli.tables import print_wrapped

if TYPE_CHECKING:
    from spectral_dp.experiments.recipe import Recipe
    from spectral_dp.experiments.settings import ResolvedSettings

ALL = "all"


def reproduce_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME...", help="Recipes (see --list), 'all', or the path of a recipe of your own."),
    ] = None,
    scale: Annotated[
        str, typer.Option(help="smoke: a minute each; cpu: hours on two cores; full: the paper's settings.")
    ] = "smoke",
    out: Annotated[Path, typer.Option(help="Directory of the reports, each in NAME-SCALE there.")] = Path("results"),
    runs: Annotated[
        Path, typer.Option(help="Directory of the training runs; recipes share those that are the same.")
    ] = Path("runs/reproduce"),
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 2,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds (default: the recipe's).")] = None,
    image_folder: Annotated[
        list[str] | None,
        typer.Option(metavar="DATASET=DIR", help="Read a data set from a directory with a folder for each class."),
    ] = None,
    weights: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FILE", help="Weights of a pretrained network. May be repeated.")
    ] = None,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Run nothing: write the report of what is finished.")
    ] = False,
    list_recipes: Annotated[bool, typer.Option("--list", help="List the recipes and exit.")] = False,
) -> None:
    """Reproduces tables and figures of the paper: trains every cell, and reports ours beside the paper's.

    Noise and batches are drawn from seeds, so that others get the same figures. The same command goes on where it was
    stopped. Finished runs are never run again, and neither are those of which the reports' directory holds a record
    (in runs/ there): to run these as well, give another --out.

    \b
    spectral-dp reproduce --list
    spectral-dp reproduce best-results
    spectral-dp reproduce all --scale cpu
    spectral-dp reproduce transfer-paper --scale full --weights wrn-28-10=wrn.safetensors
    """  # noqa: D301  (\b is for click: keep these lines as they are)
    with plain_errors():
        from spectral_dp.experiments import recipe as recipes
        from spectral_dp.experiments.grid import check_data
        from spectral_dp.experiments.reproduction import (
            RECORDS,
            write_report,
        )  # late: torch and matplotlib take a second

        if list_recipes:
            _list([recipes.read_recipe(name, scale) for name in recipes.names()])
            return
        if not names:
            raise recipes.RecipeError(f"which recipe? Choose from {', '.join(recipes.names())}, or {ALL}")
        asked = [each for name in names for each in (recipes.names() if name == ALL else [name])]
        form = "NAME=PATH, such as cifar100=images"
        files = named_values("--image-folder", image_folder, form), named_values("--weights", weights, form)
        chosen = {name: recipes.read_recipe(name, scale, seeds).with_files(*files) for name in dict.fromkeys(asked)}
        if len({recipe.name for recipe in chosen.values()}) < len(chosen):
            raise recipes.RecipeError(f"{', '.join(chosen)}: two of these have the same name, and so the same report")
        to_run = {} if report_only else {name: _to_run(recipe, runs, out / RECORDS) for name, recipe in chosen.items()}
        for missing in to_run.values():
            check_data(missing)
        failed = False
        for name, recipe in chosen.items():
            code = run_all(to_run[name], runs, jobs, to_go_on="the same command") if to_run.get(name) else 0
            place = out / f"{recipe.name}-{recipe.scale}"
            command = f"spectral-dp reproduce {name} --scale {scale}" + (f" --seeds {seeds}" if seeds else "")
            command += "".join(f" --image-folder {pair}" for pair in image_folder or ())
            command += "".join(f" --weights {pair}" for pair in weights or ())
            write_report(recipe, runs, place, command)
            typer.echo(f"{recipe.name}: {place / 'README.md'}")
            if code == INTERRUPTED:
                raise typer.Exit(INTERRUPTED)
            failed |= code != 0
    if failed:
        raise typer.Exit(1)


def _to_run(recipe: Recipe, runs: Path, records: Path) -> dict[str, ResolvedSettings]:
    """Returns the runs of a recipe that were not made yet, here or by whoever left a record; says how many have one."""
    missing = recipe.grid().missing(runs, records)
    if recorded := len(recipe.grid().missing(runs)) - len(missing):
        typer.echo(
            f"{recipe.name}: {recorded} of {len(recipe.grid().runs())} runs are taken from the records in {records}; "
            "to run them as well, give another --out"
        )
    return missing


def _list(recipes: list[Recipe]) -> None:
    lines = [(recipe.name, recipe.title, recipe.source, str(len(recipe.grid().runs()))) for recipe in recipes]
    caption = f"runs: at {recipes[0].scale} scale, with all seeds"
    print_wrapped(("name", "title", "in the paper", "runs"), lines, caption=caption)
