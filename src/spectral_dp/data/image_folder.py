"""One's own images: a directory with one folder for each class."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from spectral_dp.data.dataset import ImageDataset, validation_order
from spectral_dp.data.decoded import decoded_once
from spectral_dp.data.errors import DataError
from spectral_dp.data.formats import Bytes

#: Share of the images that is held out where the directory has no ``train`` and ``test``.
TEST_SHARE = 0.2

#: Mean and standard deviation of every channel. Public constants: those of the images would be private statistics.
MEAN, STD = 0.5, 0.25

_NAME = "image-folder"
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
_MOST_BYTES = 8 * 2**30  # of all images together, in memory

Listed = list[tuple[Path, int]]


def read_image_folder(path: str | os.PathLike[str], size: int | None = None) -> ImageDataset:
    """Reads images from a directory with one folder for each class, as RGB.

    Classes are numbered in the order of their names. With the folders ``train`` and ``test``, each of which has the
    folders of the classes, this is the split. Otherwise a fifth of the images is held out: a fixed random choice, which
    depends on the number of images alone. Files whose names begin with a dot are left out.

    Args:
        path: The directory.
        size: Pixels a side to resize every image to. None leaves them as they are, if all have the same size.

    Raises:
        DataError: If there are fewer than two classes, an empty one, a file that cannot be read as an image, or images
            of different sizes without ``size``. The message names the file.
    """
    root = Path(path)
    try:
        train, test, classes = _listed(root)
        return _dataset(root, train, test, classes, size)
    except OSError as error:
        raise DataError(f"cannot read the images in {root}: {error}") from error


def class_names(path: str | os.PathLike[str]) -> list[str]:
    """Returns the names of the classes of a directory of images, in the order of their numbers."""
    root = Path(path)
    return _class_names(root / "train" if _is_split(root) else root)


def _listed(root: Path) -> tuple[Listed, Listed | None, int]:
    """Returns the files of the training and the test split with their classes, and how many classes there are."""
    if not root.is_dir():
        raise DataError(f"{root} is no directory: give one with a folder of images for each class")
    names = class_names(root)
    if not _is_split(root):
        return _files(root, names), None, len(names)
    if strangers := sorted(set(_folders(root / "test")) - set(names)):
        raise DataError(f"{root / 'test' / strangers[0]} is a class that {root / 'train'} does not have")
    return _files(root / "train", names), _files(root / "test", names, may_be_empty=True), len(names)


def _is_split(root: Path) -> bool:
    found = [name for name in ("train", "test") if (root / name).is_dir()]
    if len(found) == 1 and len(_folders(root)) == 1:
        missing = "test" if found == ["train"] else "train"
        raise DataError(f"{root} has {found[0]} but no {missing}: add it, or give {root / found[0]} to have it split")
    return len(found) == 2


def _class_names(root: Path) -> list[str]:
    names = _folders(root)
    if len(names) < 2:
        found = f"only the folder {names[0]}" if names else "no folder"
        raise DataError(f"{root} has {found}: a classifier needs one folder for each of at least two classes")
    return names


def _folders(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _files(root: Path, names: list[str], *, may_be_empty: bool = False) -> Listed:
    found: Listed = []
    for label, name in enumerate(names):
        folder = root / name
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
        files = [entry for entry in entries if not entry.name.startswith(".")]
        if nested := [entry for entry in files if entry.is_dir()]:
            raise DataError(f"{nested[0]} is a folder in the folder of a class: put images there only")
        if not files and not may_be_empty:
            raise DataError(f"{folder} has no image: a class needs at least one, or remove the folder")
        found += [(file, label) for file in files]
    if not found:
        raise DataError(f"{root} has no image")
    return found


def _dataset(root: Path, train: Listed, test: Listed | None, classes: int, size: int | None) -> ImageDataset:
    listed = train + (test or [])
    files = [file for file, _ in listed]
    images = torch.from_numpy(decoded_once(root, files, size, lambda: _images(files, size)))
    labels = torch.tensor([label for _, label in listed])
    if test is None:
        held, kept = validation_order(_NAME, len(listed), max(1, round(TEST_SHARE * len(listed))))
    else:
        kept, held = torch.arange(len(train)), torch.arange(len(train), len(listed))
    return ImageDataset(
        name=_NAME,
        train_images=images[kept],
        train_labels=labels[kept],
        test_images=images[held],
        test_labels=labels[held],
        classes=classes,
        mean=(MEAN,) * 3,
        std=(STD,) * 3,
    )


def _images(files: list[Path], size: int | None) -> Bytes:
    """Reads all files: ``(N, 3, H, W)``, uint8."""
    rows: Bytes | None = None
    for number, file in enumerate(files):
        image = _read(file, size)
        if rows is None:
            height, width, _ = image.shape
            if len(files) * image.size > _MOST_BYTES:
                raise DataError(
                    f"{len(files)} images of {width} x {height} pixels, as {file} has, take "
                    f"{len(files) * image.size / 2**30:.0f} GB of memory: give a smaller --image-size"
                )
            rows = np.empty((len(files), 3, height, width), np.uint8)
        elif image.shape[:2] != rows.shape[2:]:
            raise DataError(
                f"{file} has {image.shape[1]} x {image.shape[0]} pixels, and {files[0]} {rows.shape[3]} x "
                f"{rows.shape[2]}: give --image-size, to which all are resized"
            )
        rows[number] = image.transpose(2, 0, 1)
    assert rows is not None
    return rows


def _read(file: Path, size: int | None) -> Bytes:
    try:
        from PIL import Image, ImageOps  # late: only those who have images of their own need it
    except ImportError as error:
        raise DataError("images are read by Pillow, which is not installed: pip install 'spectral-dp[cli]'") from error
    try:
        with Image.open(file, formats=_FORMATS) as opened:
            image = ImageOps.exif_transpose(opened).convert("RGB")
            if size is not None:
                image = image.resize((size, size), Image.Resampling.BILINEAR)  # averages where it gets smaller
            return np.asarray(image)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{file} cannot be read as an image ({error}): repair it, or move it away") from error
