"""The Python edition of CIFAR, read without running it.

A pickle is a program. This reader runs it with nothing to call: the three numpy names that the CIFAR batches mention
are inert stand-ins that hold what the pickle says of an array, and any other name is refused. (The files are also
compared with their published checksums before they come here.)
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from spectral_dp.data.errors import DataError
from spectral_dp.data.formats import CIFAR_SHAPE, Bytes, Samples


def parse_cifar_pickles(files: Sequence[bytes], label_key: bytes) -> Samples:
    """Reads the batches of the Python edition: dictionaries with ``data`` and a list of labels.

    Raises:
        DataError: A pickle that asks for anything but byte arrays, is damaged, or holds something else.
    """
    batches = [_batch(content, label_key) for content in files]
    images, labels = zip(*batches, strict=True)
    return np.concatenate(images), np.concatenate(labels)


def _batch(content: bytes, label_key: bytes) -> Samples:
    try:
        batch = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        images = batch[b"data"].pixels().reshape(-1, *CIFAR_SHAPE)
        labels = np.array(batch[label_key], np.uint8)
    except DataError:
        raise
    except Exception as error:  # a damaged pickle raises whatever its opcodes happen to do
        raise DataError(f"not a CIFAR batch, or corrupt: {type(error).__name__}: {error}") from error
    if labels.shape != (len(images),):
        raise DataError(f"{len(images)} images but labels of shape {labels.shape}")
    return images, labels


class _Array:
    """Stands in for a numpy array: what the pickle says of it, uninterpreted."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def pixels(self) -> Bytes:
        _, shape, element, column_major, content = self.state
        if not (isinstance(element, _Type) and element.name == b"u1" and isinstance(content, bytes)):
            raise DataError("refused: the images are not an array of bytes")
        if len(content) != math.prod(shape):
            raise DataError(f"truncated or corrupt: {len(content)} bytes for images of shape {shape}")
        return np.frombuffer(content, np.uint8).reshape(shape, order="F" if column_major else "C")


class _Type:
    """Stands in for a numpy dtype."""

    def __init__(self, name: bytes, *_: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        """Byte order and alignment: a byte has none."""


_STAND_INS = {
    "numpy.core.multiarray._reconstruct": lambda *_: _Array(),
    "numpy.ndarray": _Array,
    "numpy.dtype": _Type,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        stand_in = _STAND_INS.get(f"{module}.{name}")
        if stand_in is None:
            raise DataError(f"refused: the pickle asks for {module}.{name}, which no CIFAR batch needs")
        return stand_in
