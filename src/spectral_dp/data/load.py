"""From a name to a data set in memory."""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

from spectral_dp.data.cache import read_cached
from spectral_dp.data.catalog import DatasetInfo, find
from spectral_dp.data.dataset import ImageDataset, validation_order
from spectral_dp.data.errors import DataError
from spectral_dp.data.formats import Bytes, Samples
from spectral_dp.data.originals import read_path
from spectral_dp.data.texts import TextDataset

_DIGITS_TEST_EVERY = 5


def load_dataset(
    name: str, *, path: str | os.PathLike[str] | None = None, cache: str | os.PathLike[str] | None = None
) -> ImageDataset | TextDataset:
    """Loads a data set, with its files compared with their published checksums.

    Args:
        name: Name of the data set, one of ``NAMES``.
        path: Official archive, or a directory that holds it or its files, to read instead of the cache.
        cache: Cache directory to use instead of the user's.

    Raises:
        DataError: There is no such data set, it was not fetched yet, its files are not the published ones, or it
            comes with a package that is not installed.
    """
    info = find(name)
    if not info.editions:
        if path is not None:
            raise DataError(f"{name} comes with scikit-learn and is not read from a path: leave out {path}")
        return _assemble(info, *_digits())
    if path is None:
        edition, contents = info.editions[0], read_cached(info, cache)
    else:
        try:
            edition, contents = read_path(info, path)
        except OSError as error:
            raise DataError(f"cannot read {name} from {path}: {error}") from error
    splits = [files for files in (edition.train, edition.test) if files]
    parsed = [edition.parse([contents[file.name] for file in files]) for files in splits]
    train, test = parsed if edition.test else _held_out(info, *parsed[0])
    return _assemble(info, train, test)


def _held_out(info: DatasetInfo, records: Bytes, labels: Bytes) -> tuple[Samples, Samples]:
    """Splits records that are published as one set: a fixed random choice, which depends on their number alone."""
    held, kept = (index.numpy() for index in validation_order(info.name, len(labels), info.test_samples))
    return (records[kept], labels[kept]), (records[held], labels[held])


def _assemble(info: DatasetInfo, train: Samples, test: Samples) -> ImageDataset | TextDataset:
    records = (_tensor(train[0]), _tensor(train[1]).long(), _tensor(test[0]), _tensor(test[1]).long())
    if info.has_texts:
        return TextDataset(info.name, *records, info.classes)
    return ImageDataset(info.name, *records, info.classes, info.mean, info.std)


def _tensor(array: Bytes) -> Tensor:
    return torch.from_numpy(np.array(array, order="C"))  # a copy: the parsed arrays are read-only views of the files


def _digits() -> tuple[Samples, Samples]:
    """The digits of scikit-learn, split by a fixed rule: sorted by class, every fifth is a test image."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # late: takes a second
    except ImportError as error:
        raise DataError(
            "digits come with scikit-learn, which is not installed: pip install 'spectral-dp[cli]'"
        ) from error

    digits = load_digits()
    images = np.round(digits.images[:, None] * (255 / 16)).astype(np.uint8)  # pixels are 0 to 16
    labels = digits.target.astype(np.uint8)
    in_test = np.zeros(len(labels), bool)
    in_test[np.argsort(labels, kind="stable")[::_DIGITS_TEST_EVERY]] = True
    return (images[~in_test], labels[~in_test]), (images[in_test], labels[in_test])
