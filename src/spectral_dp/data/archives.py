"""Compressed files, tar and zip archives, read without trusting them.

Nothing is ever unpacked to the disk: what is wanted is asked for by its exact name and read into memory, up to a limit.
So a hostile path or link in an archive has nothing to act on, and a decompression bomb ends at the limit.
"""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from spectral_dp.data.errors import DataError

ARCHIVE_LIMIT = 512 * 2**20
"""Bytes an archive may hold, decompressed: twice the largest of the catalog."""

_GZIP_MAGIC = b"\x1f\x8b"


def gunzip(content: bytes, limit: int) -> bytes:
    """Decompresses a gzip file of at most ``limit`` bytes."""
    reader = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        plain = reader.decompress(content, limit + 1)
    except zlib.error as error:
        raise DataError(f"corrupt gzip file: {error}") from error
    if len(plain) > limit:
        raise DataError(f"refused: decompresses to more than the {limit} bytes it should hold")
    if not reader.eof:
        raise DataError("truncated gzip file")
    if reader.unused_data:
        raise DataError(f"{len(reader.unused_data)} trailing bytes after the gzip stream")
    return plain


def read_members(archive: Path | bytes, names: Iterable[str], *, limit: int = ARCHIVE_LIMIT) -> dict[str, bytes]:
    """Reads those members of a tar archive (plain or gzip) that are in ``names``; absent ones are left out.

    Raises:
        DataError: Not a tar archive, truncated, larger than ``limit`` when decompressed, or a wanted name stands for
            something else than one regular file.
    """
    wanted = set(names)
    found: dict[str, bytes] = {}
    try:
        with _plain(archive) as plain, tarfile.open(fileobj=_Bounded(plain, limit), mode="r|") as tar:
            for member in tar:
                if member.name not in wanted:
                    continue
                if not member.isreg():
                    raise DataError(f"refused: {member.name} in the archive is not a regular file")
                if member.name in found:
                    raise DataError(f"refused: {member.name} is in the archive twice")
                content = tar.extractfile(member)
                found[member.name] = content.read() if content else b""
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"not a tar archive, or truncated or corrupt: {error}") from error
    return found


def read_zip_members(archive: Path | bytes, names: Iterable[str], *, limit: int = ARCHIVE_LIMIT) -> dict[str, bytes]:
    """Reads those members of a zip archive that are in ``names``; absent ones are left out.

    Raises:
        DataError: Not a zip archive, truncated, larger than ``limit`` when decompressed, or it holds a name twice.
    """
    found: dict[str, bytes] = {}
    left = limit
    try:
        with zipfile.ZipFile(io.BytesIO(archive) if isinstance(archive, bytes) else archive) as opened:
            present = opened.namelist()
            for name in dict.fromkeys(names):
                if present.count(name) > 1:
                    raise DataError(f"refused: {name} is in the archive twice")
                if name not in present:
                    continue
                with opened.open(name) as member:
                    found[name] = member.read(left + 1)  # what the header says of its size is not trusted
                left -= len(found[name])
                if left < 0:
                    raise DataError(f"refused: the archive decompresses to more than {limit} bytes")
    except (zipfile.BadZipFile, EOFError, zlib.error, NotImplementedError, RuntimeError) as error:
        raise DataError(f"not a zip archive, or truncated or corrupt: {error}") from error
    return found


@contextmanager
def _plain(archive: Path | bytes) -> Iterator[IO[bytes]]:
    """The archive as a stream, decompressed if it needs to be."""
    with io.BytesIO(archive) if isinstance(archive, bytes) else archive.open("rb") as raw:
        compressed = raw.read(2) == _GZIP_MAGIC
        raw.seek(0)
        if not compressed:
            yield raw
            return
        with gzip.open(raw) as decompressed:
            yield cast(IO[bytes], decompressed)


class _Bounded(io.RawIOBase):
    """A stream that refuses to yield more than so many bytes."""

    def __init__(self, stream: IO[bytes], limit: int) -> None:
        self._stream, self._limit, self._left = stream, limit, limit

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise DataError(f"refused: the archive decompresses to more than {self._limit} bytes")
        return data
