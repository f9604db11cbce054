"""Atomic writing of files: a failed or interrupted write leaves the old file unchanged.

A file that is not complete yet is called ``.name.<8 hex digits>.partial``, is in the directory of its target, and is
locked by its writer. The operating system releases the lock when the writer ends for any reason. So a partial file that
somebody else can lock was abandoned, and the next writer of the same target removes it. Where the file system has no
locks, abandoned files stay.
"""

from __future__ import annotations

import hashlib
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
    """Opens a binary file for writing, which replaces ``path`` when the ``with`` block ends without an error.

    The file is written in the same directory, forced to the disk and then renamed. So at any moment ``path`` is the
    complete old file or the complete new one.

    Args:
        path: File to write. Its directory must exist.

    Raises:
        FileNotFoundError: If the directory does not exist.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write {target}: there is no directory {target.parent}")
    with _partial(target, _new_file) as (partial, descriptor):
        with open(descriptor, "wb", closefd=False) as file:
            yield file
        os.fsync(descriptor)
        partial.replace(target)  # while it is locked: otherwise another writer might remove it
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # so that the new name survives a power cut, too
    finally:
        os.close(directory)


@contextmanager
def partial_directory(target: Path) -> Iterator[Path]:
    """Makes a hidden directory beside ``target``, and removes it with all its contents when the ``with`` block ends.

    Use it to prepare the contents of ``target``, and rename what is complete.
    """
    with _partial(target, _new_directory) as (partial, _):
        yield partial


def remove_abandoned(target: Path) -> None:
    """Removes the partial files that killed writers of ``target`` left, but none that is still being written."""
    left_by_us = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.partial")
    with suppress(OSError):  # a directory in which one may write, but which one may not list
        for path in [path for path in target.parent.iterdir() if left_by_us.fullmatch(path.name)]:
            with suppress(OSError):  # somebody else removed it first, or we have no permission
                _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    access = os.O_RDONLY if path.is_dir() else os.O_RDWR  # some file systems lock only files open for writing
    descriptor = os.open(path, access | os.O_NOFOLLOW)
    try:
        if _lock(descriptor):
            _remove(path)
    finally:
        os.close(descriptor)


@contextmanager
def _partial(target: Path, create: Callable[[Path], int]) -> Iterator[tuple[Path, int]]:
    """Yields a new partial file or directory and the descriptor that keeps it locked. Removes it at the end."""
    remove_abandoned(target)
    while True:
        path = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
        descriptor = create(path)
        if _lock(descriptor) is not False and path.exists():
            break
        os.close(descriptor)  # another writer removed it before it was locked, so try again
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
    """Returns whether we hold the lock now, or None if the file system or the platform has no locks."""
    try:
        import fcntl  # not on Windows

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (OSError, ImportError):
        return None
    return True


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Makes a file if there is none, and locks it; the system frees the lock however the process ends.

    Args:
        path: The file.
        wait: Whether to wait for a process that holds the lock. Without, the context says whether we hold it.
    """
    import fcntl  # not on Windows

    is_ours = True
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_ours = False
        yield is_ours


def digest_of(value: Any) -> str:
    """Returns a digest of a plain value: equal values, in whatever order their names are, have equal ones."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text file atomically."""
    with whole_file(path) as file:
        file.write(text.encode())


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Writes a value as indented JSON, atomically. NaN and infinity, which JSON does not have, are a ``ValueError``."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def save_figure(figure: Any, path: str | os.PathLike[str], *, dpi: int = 150) -> None:
    """Writes a matplotlib figure as a PNG file, atomically."""
    with whole_file(path) as file:
        figure.savefig(file, format="png", dpi=dpi)
