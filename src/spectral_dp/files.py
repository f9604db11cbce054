"""Writing files whole or not at all: a failed or interrupted write leaves the old file as it was."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
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
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the renaming, too, outlives a power cut
    finally:
        os.close(directory)


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
