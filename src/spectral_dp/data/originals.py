"""Published files found on the disk: located, bounded, compared with their checksums."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from spectral_dp.data.archives import gunzip, read_members
from spectral_dp.data.catalog import DatasetInfo, Edition, Original
from spectral_dp.data.errors import DataError

_GZIP_OVERHEAD = 64 * 2**10  # gzip adds next to nothing to what it cannot compress


def verify(original: Original, content: bytes) -> None:
    """Compares a file with what was published.

    Raises:
        DataError: Another length or another checksum.
    """
    _check_size(original, len(content))
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != original.md5:
        raise DataError(
            f"md5 {found}, but the published file has {original.md5}: corrupt, or another data set's file of this name"
        )


def verify_edition(edition: Edition, contents: Mapping[str, bytes]) -> None:
    """Compares all files of an edition, by their names, with what was published.

    Raises:
        DataError: A file is missing, or is not the published one. The message begins with its name.
    """
    for original in edition.files:
        if original.name not in contents:
            raise DataError(f"{original.name} is missing")
        try:
            verify(original, contents[original.name])
        except DataError as error:
            raise DataError(f"{original.name}: {error}") from error


def read_edition(directory: Path, edition: Edition) -> dict[str, bytes]:
    """Reads and verifies the files of an edition, each plain or compressed with gzip, from one directory."""
    return {original.name: _read(directory, original) for original in edition.files}


def read_path(info: DatasetInfo, path: str | os.PathLike[str]) -> tuple[Edition, dict[str, bytes]]:
    """Reads and verifies a data set from an official archive, or from a directory with one or with its files.

    Raises:
        DataError: Nothing of the kind there, files missing, damaged or not the published ones.
    """
    place = Path(path)
    if place.is_file():
        return _read_archive(info, place)
    if not place.is_dir():
        raise DataError(f"{place}: no such file or directory")
    for edition in info.editions:
        for directory in (place, place / edition.folder):
            if any(_candidates(directory, original) for original in edition.files):
                return edition, read_edition(directory, edition)
        if edition.archive and (place / edition.archive).is_file():
            return _read_archive(info, place / edition.archive)
    raise DataError(f"{place} holds no {info.name}: looked there for {_what_is_read(info)}")


def _read_archive(info: DatasetInfo, archive: Path) -> tuple[Edition, dict[str, bytes]]:
    wanted = [f"{edition.folder}/{file.name}" for edition in info.editions for file in edition.files]
    try:
        found = read_members(archive, wanted)
    except (DataError, OSError) as error:
        raise DataError(f"{archive}: {error}; {info.name} is read from {_what_is_read(info)}") from error
    for edition in info.editions:
        members = {f"{edition.folder}/{file.name}": file.name for file in edition.files}
        if contents := {name: found[member] for member, name in members.items() if member in found}:
            try:
                verify_edition(edition, contents)
            except DataError as error:
                raise DataError(f"{archive}: {error}") from error
            return edition, contents
    raise DataError(f"{archive} holds no {info.name}: {info.name} is read from {_what_is_read(info)}")


def _read(directory: Path, original: Original) -> bytes:
    candidates = _candidates(directory, original)
    if not candidates:
        raise DataError(f"{directory / original.name} is missing")
    path = candidates[0]
    try:
        size = path.stat().st_size
        if path.suffix == ".gz":
            if size > original.limit + _GZIP_OVERHEAD:
                raise DataError(f"refused: {size} bytes, compressed, for a file of at most {original.limit}")
            content = gunzip(path.read_bytes(), original.limit)
        else:
            _check_size(original, size)  # before it is read: it may be anything
            content = path.read_bytes()
        verify(original, content)
    except (DataError, OSError) as error:
        raise DataError(f"{path}: {error}") from error
    return content


def _candidates(directory: Path, original: Original) -> list[Path]:
    return [path for name in (original.name, f"{original.name}.gz") if (path := directory / name).is_file()]


def _check_size(original: Original, size: int) -> None:
    if original.size is not None and size < original.size:
        raise DataError(f"truncated: {size} of {original.size} bytes")
    if size > original.limit:
        raise DataError(f"refused: {size} bytes, {size - original.limit} more than it may have")


def _what_is_read(info: DatasetInfo) -> str:
    forms = []
    for edition in info.editions:
        first = edition.files[0].name
        forms.append(
            f"{edition.archive} or {edition.folder}/{first} and the rest"
            if edition.archive
            else f"{first}[.gz] and the rest, there or in {edition.folder}"
        )
    return "; ".join(forms)
