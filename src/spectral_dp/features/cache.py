"""Features on the disk: a directory with one array of half precision, what it is of, and a journal of what is finished.

description.json   extractor, settings, view, checksum of the inputs, shapes: two caches are equal if these are
features.npy       the array (N, ...), float16, mapped into memory when it is read, never loaded whole
journal.txt        a line for each finished chunk of rows: its number and its checksum
.lock              held by the process that computes

A cache is whole when the journal lists every chunk. A chunk is entered after its rows are on the disk, so whatever
stops the computation, what is entered is there. The array takes its whole room at the beginning: a full disk is found
out at once. Features are as private as the records that they were computed from, and so is the directory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spectral_dp.features.errors import FeatureError
from spectral_dp.features.extractor import Shape
from spectral_dp.files import digest_of, locked, remove_abandoned, whole_file, write_json

_HEADER = 4096  # bytes before the rows: they begin at a page of memory
_CHUNK_BYTES = 16 * 2**20  # of a chunk, at most
_CHUNK_ROWS = 1024  # likewise: what a kill costs, when progress is shown, and what processes share out


class FeatureCache:
    """The features of some records, in their order, read from the disk as they are asked for.

    ``cache[rows]`` returns float16 features of these rows, ``len(cache)`` is the number of records.

    Args:
        path: Directory of the cache.
        expected: What the cache must be of, by the names of ``description.json``. None takes what is there.

    Raises:
        FeatureError: If there is no cache, or it is not whole, or it is of something else than expected.
    """

    def __init__(self, path: str | os.PathLike[str], expected: Mapping[str, Any] | None = None) -> None:
        self.path = Path(path)
        self.description = read_description(self.path)
        if expected is not None:
            require_same(self.path, self.description, expected)
        self.shape: Shape = tuple(self.description["shape"])
        self.checksums = read_journal(self.path, self.description)
        if missing := chunk_count(self.description) - len(self.checksums):
            raise FeatureError(
                f"{self.path} is not finished: {missing} of {chunk_count(self.description)} chunks are missing; "
                "compute the features again with the same settings, which goes on where it was stopped"
            )
        require_size(self.path, self.description)
        mapped = np.memmap(self.path / "features.npy", np.float16, mode="c", offset=_HEADER, shape=self.shape)
        self.tensor = torch.from_numpy(mapped)  # copied on write, so that nothing can change the file

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Tensor:
        return self.tensor[rows]

    @property
    def identity(self) -> str:
        """A checksum of what the cache is of, and of its contents."""
        return digest_of({"description": self.description, "checksums": sorted(self.checksums.items())})

    def verify(self) -> None:
        """Compares all rows with the checksums of the journal.

        Raises:
            FeatureError: If rows were changed since they were computed.
        """
        if damaged := damaged_chunks(self.path, self.description, self.checksums):
            raise FeatureError(
                f"{self.path} is damaged in {len(damaged)} of {len(self.checksums)} chunks: compute the features "
                "again with the same settings and --verify, which repairs it"
            )

    def __repr__(self) -> str:
        return f"FeatureCache({str(self.path)!r}, shape={self.shape})"


def describe(
    extractor: str, settings: Mapping[str, Any], view: str, inputs: str, input_shape: Shape, shape: Shape
) -> dict[str, Any]:
    """Returns the description of a cache; ``inputs`` is a checksum of what the features are of."""
    rows = min(_CHUNK_ROWS, max(1, _CHUNK_BYTES // (2 * math.prod(shape[1:]))))
    return {
        "format": 1,
        "extractor": extractor,
        "settings": json.loads(json.dumps(dict(settings))),  # as it will be read back
        "view": view,
        "inputs": inputs,
        "input_shape": list(input_shape),
        "shape": list(shape),
        "rows_of_a_chunk": rows,
    }


def directory_name(title: str, description: Mapping[str, Any]) -> str:
    """Returns the name of the directory of a cache: other inputs or settings have another one."""
    view = "" if description["view"] == "plain" else f"-{description['view']}"
    return f"{title}-{description['extractor']}{view}-{digest_of(description)[:12]}"


def checksum_of(rows: Any) -> str:
    """Returns a checksum of the records that features are computed from: a tensor, or other features with their own."""
    if not isinstance(rows, Tensor):
        return rows.identity
    digest = hashlib.sha256(f"{tuple(rows.shape)} {rows.dtype}\n".encode())
    for part in rows.split(4096):
        digest.update(part.contiguous().numpy().data)
    return digest.hexdigest()


def is_whole(path: Path, description: Mapping[str, Any]) -> bool:
    """Returns whether a directory holds the whole cache of this description, by its journal and its size."""
    if not (path / "description.json").exists() or read_description(path) != description:
        return False
    return len(read_journal(path, description)) == chunk_count(description) and _has_size(path, description)


def chunk_count(description: Mapping[str, Any]) -> int:
    """Returns the number of chunks of a cache."""
    return math.ceil(description["shape"][0] / description["rows_of_a_chunk"])


def chunk_rows(description: Mapping[str, Any], chunk: int) -> slice:
    """Returns the rows of a chunk."""
    size = description["rows_of_a_chunk"]
    return slice(chunk * size, min((chunk + 1) * size, description["shape"][0]))


@contextmanager
def claimed(path: Path, description: Mapping[str, Any]) -> Iterator[dict[int, int]]:
    """Prepares a cache for being computed by this process alone, and yields the checksums of its finished chunks.

    If another process computes the same cache, this one waits for it. Chunks whose rows are not what the journal says
    (after a power cut, for instance) are forgotten, so they are computed again.

    Raises:
        FeatureError: If the directory holds something else, or cannot be written, or the disk is full.
    """
    with system_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        with locked(path / ".lock", wait=True):
            for name in ("description.json", "features.npy", "journal.txt"):
                remove_abandoned(path / name)  # of a process that was killed while it began here
            if (path / "description.json").exists():
                require_same(path, read_description(path), description)
            elif strangers := {entry.name for entry in path.iterdir()} - {".lock"}:
                raise FeatureError(
                    f"{path} is no cache of features (it holds {sorted(strangers)[0]}): choose another directory"
                )
            write_json(path / "description.json", dict(description))  # first: it says whose all the rest is
            finished: dict[int, int] = {}
            if _has_size(path, description):
                finished = read_journal(path, description)
                for chunk in damaged_chunks(path, description, finished):
                    del finished[chunk]
            else:
                _allocate(path, description)
            _write_journal(path, finished)
            yield finished


def write_chunk(path: Path, description: Mapping[str, Any], chunk: int, features: Tensor) -> int:
    """Writes the rows of a chunk to the disk and returns their checksum; call :func:`enter_chunk` afterwards.

    Written as a file, not through memory: there a full disk would end the process instead of raising an error.
    """
    rows = features.half().contiguous()
    if not bool(rows.isfinite().all()):
        raise FeatureError("some features are NaN, or infinite in half precision: check the inputs and the extractor")
    content = rows.numpy().tobytes()
    offset = _HEADER + chunk_rows(description, chunk).start * 2 * math.prod(description["shape"][1:])
    with system_errors(path):
        descriptor = os.open(path / "features.npy", os.O_WRONLY)
        try:
            written = 0
            while written < len(content):
                written += os.pwrite(descriptor, content[written:], offset + written)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return zlib.crc32(content)


def enter_chunk(path: Path, chunk: int, checksum: int) -> None:
    """Enters a chunk that is on the disk in the journal."""
    with system_errors(path), (path / "journal.txt").open("a") as journal:
        journal.write(f"{chunk} {checksum:08x}\n")
        journal.flush()
        os.fsync(journal.fileno())


def read_description(path: Path) -> dict[str, Any]:
    """Returns the description of the cache in a directory."""
    try:
        description = json.loads((path / "description.json").read_text())
        sizes = [description["rows_of_a_chunk"], *description["shape"]]
        if len(sizes) < 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
            raise ValueError("it has no shape")
    except FileNotFoundError as error:
        raise FeatureError(
            f"{path} holds no features: compute them first, for instance with `spectral-dp features`"
        ) from error
    except (ValueError, KeyError, TypeError, IndexError, UnicodeDecodeError) as error:
        raise FeatureError(f"{path / 'description.json'} is damaged ({error}): remove {path}, compute again") from error
    return description


def read_journal(path: Path, description: Mapping[str, Any]) -> dict[int, int]:
    """Returns the checksum of each finished chunk; a line that was cut off by a kill does not count."""
    try:
        lines = (path / "journal.txt").read_text().split("\n")[:-1]
        entries = [line.split() for line in lines]
        finished = {int(chunk): int(checksum, 16) for chunk, checksum in entries}
    except FileNotFoundError:
        return {}
    except (ValueError, UnicodeDecodeError) as error:
        raise FeatureError(f"{path / 'journal.txt'} is damaged: remove {path} and compute again") from error
    if any(not 0 <= chunk < chunk_count(description) for chunk in finished):
        raise FeatureError(f"{path / 'journal.txt'} is of another cache: remove {path} and compute again")
    return finished


def damaged_chunks(path: Path, description: Mapping[str, Any], finished: Mapping[int, int]) -> list[int]:
    """Returns those of the finished chunks whose rows have another checksum now."""
    row, damaged = 2 * math.prod(description["shape"][1:]), []
    with system_errors(path), (path / "features.npy").open("rb") as file:
        for chunk, checksum in sorted(finished.items()):
            rows = chunk_rows(description, chunk)
            file.seek(_HEADER + rows.start * row)
            if zlib.crc32(file.read((rows.stop - rows.start) * row)) != checksum:
                damaged.append(chunk)
    return damaged


def require_same(path: Path, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raises ``FeatureError``, with the differences, if a cache is of something else than expected."""
    names = {
        "inputs": "another data set, or other images of it",
        "settings": "other settings of the extractor",
        "extractor": "another extractor",
        "view": "another view",
    }
    differing = [name for name in expected if found.get(name) != expected[name]]
    if differing:
        what = ", ".join(names.get(name, f"another {name.replace('_', ' ')}") for name in differing)
        shown = "; ".join(f"{name}: {found.get(name)!r:.80} there, {expected[name]!r:.80} wanted" for name in differing)
        raise FeatureError(f"{path} holds features of {what} ({shown}): choose another directory, or remove it")


def require_size(path: Path, description: Mapping[str, Any]) -> None:
    """Raises ``FeatureError`` if the array is not of the size that its description says."""
    if not _has_size(path, description):
        raise FeatureError(
            f"{path / 'features.npy'} is missing or truncated: {_file_size(description)} bytes expected. Compute the "
            "features again with the same settings"
        )


@contextmanager
def system_errors(path: Path) -> Iterator[None]:
    """Turns what the system says (no permission, a full disk, a file in the way) into an error with the cure."""
    try:
        yield
    except OSError as error:
        raise FeatureError(
            f"cannot write features to {path}: {error.strerror or error}; make room, or choose another directory "
            "with --cache or SPECTRAL_DP_CACHE. What is finished is kept"
        ) from error


def _allocate(path: Path, description: Mapping[str, Any]) -> None:
    """Makes the array, with all the room that it will take, and an empty journal."""
    file_path = path / "features.npy"
    (path / "journal.txt").unlink(missing_ok=True)  # first: it speaks of rows that will be gone
    try:
        with whole_file(file_path) as file:
            file.write(_npy_header(tuple(description["shape"])))
            file.flush()
            os.posix_fallocate(file.fileno(), 0, _file_size(description))
    except OSError as error:
        size = _file_size(description) / 1e6
        raise OSError(error.errno, f"no room for {size:.0f} MB ({error.strerror})") from error


def _npy_header(shape: Shape) -> bytes:
    """Returns the header of an ``.npy`` file, filled up so that the rows begin at a page."""
    text = repr({"descr": "<f2", "fortran_order": False, "shape": shape})
    return b"\x93NUMPY\x01\x00" + (_HEADER - 10).to_bytes(2, "little") + text.ljust(_HEADER - 11).encode() + b"\n"


def _write_journal(path: Path, finished: Mapping[int, int]) -> None:
    with whole_file(path / "journal.txt") as file:
        file.write("".join(f"{chunk} {checksum:08x}\n" for chunk, checksum in sorted(finished.items())).encode())


def _file_size(description: Mapping[str, Any]) -> int:
    return _HEADER + 2 * math.prod(description["shape"])


def _has_size(path: Path, description: Mapping[str, Any]) -> bool:
    try:
        return (path / "features.npy").stat().st_size == _file_size(description)
    except FileNotFoundError:
        return False
