"""The published file formats, parsed strictly: a file is read whole and as specified, or refused with the reason."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from spectral_dp.data.errors import DataError

Bytes = npt.NDArray[np.uint8]
Samples = tuple[Bytes, Bytes]
"""Images ``(N, C, H, W)`` and labels ``(N,)``."""

CIFAR_SHAPE = (3, 32, 32)
_CIFAR_PIXELS = math.prod(CIFAR_SHAPE)


def parse_idx(content: bytes, dimensions: int) -> Bytes:
    """Reads an IDX file of unsigned bytes (MNIST and its kin) with so many dimensions.

    Raises:
        DataError: Wrong magic number, or a length other than the one the header announces.
    """
    header = 4 * (1 + dimensions)
    if len(content) < header:
        raise DataError(f"truncated: {len(content)} bytes are less than the IDX header of {header}")
    magic, *shape = struct.unpack(f">{1 + dimensions}I", content[:header])
    expected = 0x0800 | dimensions  # type unsigned byte, then the number of dimensions
    if magic != expected:
        raise DataError(
            f"not an IDX file of bytes in {dimensions} dimensions: magic {magic:#010x}, not {expected:#010x}"
        )
    announced = math.prod(shape)  # Python integers: a hostile header cannot overflow
    found = len(content) - header
    if found != announced:
        fault = "truncated" if found < announced else "trailing bytes"
        raise DataError(f"{fault}: the IDX header announces {shape} = {announced} bytes, {found} follow it")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def parse_idx_pair(files: Sequence[bytes]) -> Samples:
    """Reads the image file and the label file of one split of MNIST or its kin."""
    images, labels = parse_idx(files[0], 3), parse_idx(files[1], 1)
    if len(images) != len(labels):
        raise DataError(f"{len(images)} images but {len(labels)} labels: the files belong to different splits")
    return images[:, None], labels


def parse_cifar(files: Sequence[bytes], label_bytes: int) -> Samples:
    """Reads CIFAR binary batches: records of labels (the last one is the class) and 3 x 32 x 32 pixels."""
    record = label_bytes + _CIFAR_PIXELS
    for content in files:
        if not content or len(content) % record:
            raise DataError(f"truncated or corrupt: {len(content)} bytes are not whole records of {record}")
    records = np.concatenate([np.frombuffer(content, np.uint8).reshape(-1, record) for content in files])
    return records[:, label_bytes:].reshape(-1, *CIFAR_SHAPE), records[:, label_bytes - 1]
