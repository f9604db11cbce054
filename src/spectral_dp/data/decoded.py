"""Pixels of one's own images, decoded once: they are read from the cache for as long as no image file changes.

Tens of thousands of small images take ten seconds to decode, and every run reads them. What is kept is one array a
directory of images, in the cache directory, readable by its owner alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from spectral_dp.data.cache import cache_directory
from spectral_dp.data.formats import Bytes
from spectral_dp.files import whole_file

#: Fewer images are decoded in less than a second, and are not kept.
LEAST_FILES = 2000

_FORMAT = 1  # of what is kept, and of how images are decoded


def decoded_once(root: Path, files: Sequence[Path], size: int | None, decode: Callable[[], Bytes]) -> Bytes:
    """Returns the pixels of some images, from the cache if they are there and no file has changed since.

    A cache that cannot be read or written, such as on a full disk, is done without.

    Args:
        root: The directory of the images. The cache keeps its newest pixels only.
        files: The images, in the order of the rows.
        size: Pixels a side to which they are resized; None if they are not.
        decode: Reads the images: ``(N, 3, H, W)``.
    """
    if len(files) < LEAST_FILES:
        return decode()
    place = cache_directory() / "images"
    family = _digest(str(root.resolve()), size)
    path = place / f"{family}-{_digest(_FORMAT, [_facts(file) for file in files])}.npy"
    with suppress(OSError, ValueError):
        return np.load(path, allow_pickle=False)
    pixels = decode()
    with suppress(OSError):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        with whole_file(path) as file:
            np.save(file, pixels, allow_pickle=False)
        for old in place.glob(f"{family}-*.npy"):
            if old != path:
                old.unlink()
    return pixels


def _facts(file: Path) -> tuple[str, int, int]:
    """What changes when a file does: its name, its length, and when it was written."""
    status = file.stat()
    return str(file), status.st_size, status.st_mtime_ns


def _digest(*facts: object) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
