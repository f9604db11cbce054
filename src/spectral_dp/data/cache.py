"""Where fetched data sets are kept: a directory each, which appears whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from spectral_dp.data.catalog import DatasetInfo
from spectral_dp.data.errors import DataError
from spectral_dp.data.originals import read_edition
from spectral_dp.files import partial_directory, whole_file


def cache_directory() -> Path:
    """``$SPECTRAL_DP_CACHE``, else ``$XDG_CACHE_HOME/spectral-dp``, else ``~/.cache/spectral-dp``."""
    if chosen := os.environ.get("SPECTRAL_DP_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "spectral-dp"


def place_of(info: DatasetInfo, cache: str | os.PathLike[str] | None = None) -> Path:
    """The directory of a data set in the cache, there or not."""
    return (cache_directory() if cache is None else Path(cache)) / info.name


def read_cached(info: DatasetInfo, cache: str | os.PathLike[str] | None = None) -> dict[str, bytes]:
    """Reads and verifies a data set from the cache.

    Raises:
        DataError: Not there, or damaged.
    """
    place = place_of(info, cache)
    option = "" if cache is None else f" --cache {cache}"
    with cache_errors(place):
        fetched = place.is_dir()
    if not fetched:
        raise DataError(
            f"{info.name} is not in {place.parent}: run `spectral-dp data get {info.name}{option}`, "
            "or give the path of the official files"
        )
    try:
        return read_edition(place, info.editions[0])
    except DataError as error:
        raise DataError(
            f"the cache is corrupt: {error}; run `spectral-dp data get {info.name}{option} --force`"
        ) from error


State = Literal["absent", "cached", "corrupt"]


def state_of(info: DatasetInfo, place: Path) -> State:
    """Whether a data set is in its place in the cache, by the sizes of its files: a quick look, no proof."""
    files = [(place / original.name, original.size) for original in info.editions[0].files]
    with cache_errors(place):
        if not place.exists():
            return "absent"
        return "cached" if all(path.is_file() and path.stat().st_size == size for path, size in files) else "corrupt"


@contextmanager
def cache_errors(place: Path) -> Iterator[None]:
    """Turns what the system says (no permission, a full disk, a file in the way) into a DataError with the cure."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot use the cache {place.parent}: {error}; "
            "make room, or choose another directory with --cache or SPECTRAL_DP_CACHE"
        ) from error


@contextmanager
def workspace(place: Path) -> Iterator[Path]:
    """A hidden directory beside ``place`` that is gone afterwards; of a killed process, when the next one needs it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with partial_directory(place) as directory:
        yield directory


def check_replaceable(info: DatasetInfo, place: Path) -> None:
    """Refuses to replace anything but a data set: a cache directory given by mistake may hold other things."""
    if not place.exists():
        return
    strangers = {path.name for path in place.iterdir()} if place.is_dir() else {place.name}
    strangers -= {file.name for file in info.editions[0].files}
    if strangers:
        raise DataError(
            f"{place} holds something else than {info.name} ({', '.join(sorted(strangers)[:3])}): "
            "move it away or choose another cache directory"
        )


def install(contents: Mapping[str, bytes], place: Path, directory: Path) -> None:
    """Writes files into a workspace and moves them to ``place`` in one renaming; what was there before is replaced."""
    fresh, old = directory / "fresh", directory / "old"
    fresh.mkdir()
    for name, content in contents.items():
        with whole_file(fresh / name) as file:
            file.write(content)
    if place.exists():
        place.rename(old)
    try:
        fresh.rename(place)
    except BaseException:
        if old.exists():
            old.rename(place)
        raise
