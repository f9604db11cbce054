"""CIFAR-10 out of a package that holds it as pictures: back to the published bytes."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping

import numpy as np

from spectral_dp.data.errors import DataError
from spectral_dp.data.formats import Bytes

_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEST = "test_batch"
_PIXELS = 32 * 32
_ROWS_LIMIT = 10_000  # images in a batch of CIFAR-10

PNG_FILES = (
    *(f"{batch}.png" for batch in (*_BATCHES, _TEST)),
    "train_lables.json",
    "test_lables.json",
)


def batches_from_pictures(found: Mapping[str, bytes]) -> dict[str, bytes]:
    """Rebuilds the binary batches of CIFAR-10 from pictures with one image a row, and lists of labels."""
    train, test = (_labels(found[f"{split}_lables.json"]) for split in ("train", "test"))  # spelled so in the package
    if len(train) % len(_BATCHES):
        raise DataError(f"{len(train)} training labels are not {len(_BATCHES)} batches")
    labels = [*np.split(train, len(_BATCHES)), test]
    return {
        f"{batch}.bin": _binary_batch(found[f"{batch}.png"], of_batch)
        for batch, of_batch in zip((*_BATCHES, _TEST), labels, strict=True)
    }


def _labels(content: bytes) -> Bytes:
    try:
        return np.array(json.loads(content), np.uint8).reshape(-1)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise DataError(f"the labels are not a list of small numbers: {error}") from error


def _binary_batch(picture: bytes, labels: Bytes) -> bytes:
    pixels = _rows(picture, len(labels))  # (N, 1024, 3); a record has its channels one after another
    return np.column_stack([labels, pixels.transpose(0, 2, 1).reshape(len(labels), -1)]).tobytes()


def _rows(picture: bytes, rows: int) -> Bytes:
    from PIL import Image  # late: only this fallback needs it

    try:
        with Image.open(io.BytesIO(picture), formats=["PNG"]) as image:
            # The header is compared before any pixel is decoded: a picture of another size never takes memory.
            if rows > _ROWS_LIMIT or image.size != (_PIXELS, rows) or image.mode != "RGB":
                raise DataError(
                    f"the picture is {image.size[0]} x {image.size[1]} {image.mode}, "
                    f"not {_PIXELS} x {rows} RGB with at most {_ROWS_LIMIT} rows"
                )
            return np.asarray(image).reshape(rows, _PIXELS, 3)
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"the picture is truncated or corrupt: {error}") from error
