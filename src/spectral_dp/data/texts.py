"""A data set of texts in memory: their bytes, in rows of one length, as extractors of features read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from spectral_dp.data.dataset import SplitDataset
from spectral_dp.data.errors import DataError
from spectral_dp.data.formats import Bytes

#: Bytes of a text that are kept. Encoders of sentences read less than that.
MOST_BYTES = 4096


@dataclass(frozen=True, eq=False)
class TextDataset(SplitDataset[Tensor]):
    """Texts and labels, with what training asks of an :class:`~spectral_dp.data.ImageDataset`, whose names it has.

    A text is a row of the bytes of its UTF-8 encoding, uint8, with zeros behind it; rows have one length: ``(N, L)``.
    """

    @property
    def input_shape(self) -> tuple[int, ...]:
        """``(L,)``: how many bytes a row has."""
        return tuple(self.train_images.shape[1:])

    @property
    def mean(self) -> tuple[float, ...]:
        """Texts have no channels, so there are no constants to normalise by."""
        return ()

    std = mean

    def training(self) -> TensorDataset:
        """Returns the training samples as torch's loaders take them."""
        return TensorDataset(self.train_images, self.train_labels)

    def normalise(self, texts: Tensor) -> Tensor:
        """Raises ``DataError``: bytes of texts are no numbers to calculate with."""
        raise DataError(f"{self.name} has texts, which no network here reads as they are: choose features of them")

    def resized(self, size: int) -> TextDataset:
        """Raises ``DataError``: texts have no size in pixels."""
        raise DataError(f"{self.name} has texts: leave out the image size {size}")


def encoded_texts(texts: Sequence[str], width: int | None = None) -> Bytes:
    """Returns texts in UTF-8, with zeros behind them: ``(N, width)``; long ones are cut off between characters.

    Args:
        texts: The texts.
        width: Bytes of a row. None takes those of the longest text, but :data:`MOST_BYTES` at most.
    """
    encoded = [text.replace("\0", " ").encode() for text in texts]
    width = width or min(max(map(len, encoded), default=1) or 1, MOST_BYTES)
    rows = np.zeros((len(encoded), width), np.uint8)
    for row, content in zip(rows, encoded, strict=True):
        kept = content[:width]
        if len(content) > width:
            kept = kept.decode(errors="ignore").encode()
        row[: len(kept)] = np.frombuffer(kept, np.uint8)
    return rows


def decoded_texts(rows: Tensor) -> list[str]:
    """Returns the texts of rows of bytes: the inverse of :func:`encoded_texts`, but for what was cut off."""
    return [bytes(row).rstrip(b"\0").decode() for row in rows.numpy()]


def check_classes(labels: Iterable[str], source: str) -> list[str]:
    """Returns the classes that labels name, in their order: by number if all are whole numbers, else by name.

    Raises:
        DataError: If there are fewer than two.
    """
    names = set(labels)
    if len(names) < 2:
        found = f"only {next(iter(names))!r}" if names else "none"
        raise DataError(f"{source} has {found} as classes: a classifier needs at least two")
    if all(name.removeprefix("-").isdecimal() for name in names):
        return sorted(names, key=int)
    return sorted(names)


def as_dataset(name: str, rows: Bytes, labels: Sequence[int], classes: int, test_share: float) -> TextDataset:
    """Returns texts as a data set, of which a fixed random part is for tests.

    The part depends on the number of texts alone, never on texts or labels.
    """
    images, numbers = torch.from_numpy(rows), torch.tensor(labels, dtype=torch.int64)
    empty = images[:0], numbers[:0]
    whole = TextDataset(name, images, numbers, *empty, classes)
    return whole.with_validation(max(1, round(test_share * len(numbers))))
