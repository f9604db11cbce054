"""Writing files whole or not at all: a failed or interrupted write leaves the old file as it was.

What is not whole yet lies beside its target as ``.name.<8 hex digits>.partial``, locked by its writer. The system frees
the lock however the writer ends, so one that can be locked by somebody else belongs to nobody: the next writer of the
same target removes it. Where the file system has no locks, it stays.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Opens a binary file to write; it takes the place of ``path`` when the block ends without an error.

    It is written beside ``path``, forced to the disk and then renamed, so at any moment ``path`` holds the old file or
    the new one, whole.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write {target}: there is no directory {target.parent}")
    with _partial(target, _new_file) as (partial, descriptor):
        with open(descriptor, "wb", closefd=False) as file:
            yield file
        os.fsync(descriptor)
        partial.replace(target)  # while it is locked, or another writer might remove it
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the renaming, too, outlives a power cut
    finally:
        os.close(directory)


@contextmanager
def partial_directory(target: Path) -> Iterator[Path]:
    """Makes a hidden directory beside ``target``, to prepare it in; it is gone afterwards, with all that is in it."""
    with _partial(target, _new_directory) as (partial, _):
        yield partial


def remove_abandoned(target: Path) -> None:
    """Removes what killed writers of ``target`` have left beside it, and nothing that is still being written."""
    left_by_us = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.partial")
    with suppress(OSError):  # a directory that may be written to, but not listed
        for path in [path for path in target.parent.iterdir() if left_by_us.fullmatch(path.name)]:
            with suppress(OSError):  # somebody else was quicker, or it is not ours to remove
                _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    access = os.O_RDONLY if path.is_dir() else os.O_RDWR  # some file systems lock only what could be written
    descriptor = os.open(path, access | os.O_NOFOLLOW)
    try:
        if _lock(descriptor):
            _remove(path)
    finally:
        os.close(descriptor)


@contextmanager
def _partial(target: Path, create: Callable[[Path], int]) -> Iterator[tuple[Path, int]]:
    """Yields something new beside the target, and the descriptor that keeps it locked; removes it at the end."""
    remove_abandoned(target)
    while True:
        path = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
        descriptor = create(path)
        if _lock(descriptor) is not False and path.exists():
            break
        os.close(descriptor)  # before it was locked, another writer took it for abandoned: once more
    try:
        yield path, descriptor
    finally:
        _remove(path)
        os.close(descriptor)


def _new_file(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)


def _new_directory(path: Path) -> int:
    path.mkdir(0o700)
    return os.open(path, os.O_RDONLY)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _lock(descriptor: int) -> bool | None:
    """Returns whether the lock is ours now; None where there are no locks, so that nothing can be known."""
    try:
        import fcntl  # not on Windows

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (OSError, ImportError):
        return None
    return True


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text file whole or not at all."""
    with whole_file(path) as file:
        file.write(text.encode())


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Writes indented JSON whole or not at all; NaN and infinity, which JSON does not have, are refused."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def save_figure(figure: Any, path: str | os.PathLike[str], *, dpi: int = 150) -> None:
    """Writes a matplotlib figure as PNG, whole or not at all."""
    with whole_file(path) as file:
        figure.savefig(file, format="png", dpi=dpi)
