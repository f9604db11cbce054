"""Where the records of a run come from: a data set of the catalog, or the user's own images or texts."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from spectral_dp import data
from spectral_dp.data import ImageDataset, TextDataset, catalog, read_csv_texts, read_image_folder
from spectral_dp.data.catalog import DatasetInfo
from spectral_dp.experiments.settings import ResolvedSettings, Settings, SettingsError

Records: TypeAlias = ImageDataset | TextDataset


def load_records(settings: Settings | ResolvedSettings, cache: str | os.PathLike[str] | None = None) -> Records:
    """Returns all records of the data set of a run; images are resized if the settings say so.

    Args:
        settings: Where the records are.
        cache: Cache directory to use instead of the user's, for a data set of the catalog.
    """
    if settings.image_folder is not None or settings.csv is not None:
        return _own(settings)
    records = data.load_dataset(settings.dataset, path=settings.data_path, cache=cache)
    is_resized = settings.image_size and settings.tune is None  # a pretrained network resizes every batch
    return records.resized(settings.image_size) if is_resized and settings.image_size else records


def load_images(settings: ResolvedSettings) -> ImageDataset:
    """Returns all records of a run whose model reads images.

    Raises:
        SettingsError: If they are texts. The message names features of texts.
    """
    records = load_records(settings)
    if isinstance(records, TextDataset):
        raise SettingsError(
            f"{settings.dataset} has texts, which {settings.model} does not read: use model linear with features of "
            "texts, such as hashed-words"
        )
    return records


def records_info(settings: ResolvedSettings) -> DatasetInfo:
    """Returns the public facts of the data set of a run: shape, number of classes and of records, and constants."""
    if settings.image_folder is None and settings.csv is None:
        return catalog.find(settings.dataset)
    own = _own(settings)
    sizes = len(own.train_labels), len(own.test_labels)
    return DatasetInfo(settings.dataset, own.input_shape, own.classes, *sizes, own.mean, own.std)


def _own(settings: Settings | ResolvedSettings) -> Records:
    """Returns the user's own records; they are read again where a file has changed."""
    if settings.image_folder is not None:
        root = Path(settings.image_folder)
        return _images(settings.image_folder, settings.image_size, _newest(root))
    assert settings.csv is not None
    if settings.image_size:
        raise SettingsError(f"{settings.csv} has texts: leave out image_size")
    columns = settings.text_column, settings.label_column
    return _texts(settings.csv, *columns, settings.csv_encoding, _newest(Path(settings.csv)))


# A run asks for facts of its records several times. What was read last is kept.
@lru_cache(maxsize=1)
def _images(path: str, size: int | None, _: object) -> ImageDataset:
    return read_image_folder(path, size)


@lru_cache(maxsize=1)
def _texts(path: str, text_column: str, label_column: str, encoding: str, _: object) -> TextDataset:
    return read_csv_texts(path, text_column=text_column, label_column=label_column, encoding=encoding)


def _newest(path: Path) -> tuple[int, int]:
    """Returns how many files there are, and when the last of them was changed."""
    files = [path, *path.rglob("*")] if path.is_dir() else [path] if path.exists() else []
    return len(files), max((file.stat().st_mtime_ns for file in files), default=0)
