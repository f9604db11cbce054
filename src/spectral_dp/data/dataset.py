"""A data set with its split, and one of images in memory: bytes as published, made into numbers on the fly."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Generic, Self, TypeVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import TensorDataset

from spectral_dp.data.errors import DataError

Rows = TypeVar("Rows")

_RESIZE_CHUNK = 1024  # images turned to float at once: bounds the memory of resizing


@dataclass(frozen=True, eq=False)
class SplitDataset(Generic[Rows]):
    """Records and labels, split as published: what data sets of images, texts and features have in common.

    Attributes:
        name: Name of the data set.
        train_images: The training records, ``N`` of them.
        train_labels: ``(N,)``, int64 in ``[0, classes)``.
        test_images: The test records, ``M`` of them.
        test_labels: ``(M,)``, int64.
        classes: Number of classes.
    """

    name: str
    train_images: Rows
    train_labels: Tensor
    test_images: Rows
    test_labels: Tensor
    classes: int

    def subset(self, train: int | None = None, test: int | None = None) -> Self:
        """Keeps the first ``train`` and ``test`` samples of a fixed public permutation; None keeps all, in order.

        The permutation depends on the number of samples alone, never on records or labels, so the choice reveals
        nothing about them and keeps the class mix as any random choice does. Smaller subsets are parts of larger ones.

        Raises:
            DataError: More samples asked for than there are, or fewer than one.
        """
        kept = subset_order(self.name, "training", len(self.train_labels), train)
        held = subset_order(self.name, "test", len(self.test_labels), test)
        result = self if kept is None else self._with_train(kept)
        if held is None:
            return result
        return replace(result, test_images=self._rows(self.test_images, held), test_labels=self.test_labels[held])

    def with_validation(self, size: int) -> Self:
        """Puts a fixed random part of the training samples in the place of the test set, for choosing settings.

        Raises:
            DataError: Nothing would be left to train on, or to validate with.
        """
        held, kept = validation_order(self.name, len(self.train_labels), size)
        held_out = self._rows(self.train_images, held)
        return replace(self._with_train(kept), test_images=held_out, test_labels=self.train_labels[held])

    def _with_train(self, kept: Tensor) -> Self:
        return replace(self, train_images=self._rows(self.train_images, kept), train_labels=self.train_labels[kept])

    def _rows(self, images: Rows, index: Tensor) -> Rows:
        """Returns some of the records."""
        return images[index]  # type: ignore[index]


@dataclass(frozen=True, eq=False)
class ImageDataset(SplitDataset[Tensor]):
    """Images ``(N, C, H, W)``, uint8, and labels, split as published.

    Attributes:
        mean: Mean per channel of pixels in [0, 1]. A published constant of the data set: computing it from the private
            images at run time would release something about them that no accountant has seen.
        std: Standard deviation per channel, likewise.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """``(C, H, W)`` of one image."""
        _, channels, height, width = self.train_images.shape
        return channels, height, width

    def training(self) -> TensorDataset:
        """Returns the training samples as torch's loaders take them."""
        return TensorDataset(self.train_images, self.train_labels)

    def normalise(self, images: Tensor) -> Tensor:
        """Turns uint8 images ``(..., C, H, W)`` into standardised float32 ones, on their device."""
        if images.dtype != torch.uint8:
            raise DataError(f"normalise takes uint8 images, got {images.dtype}: these may be normalised already")
        if images.dim() < 3 or images.shape[-3] != len(self.mean):
            raise DataError(f"{self.name} images are (..., {len(self.mean)}, H, W), got {tuple(images.shape)}")
        # (x / 255 - mean) / std with the 255 moved to the constants; in place, on the copy that float() makes.
        mean, std = (255 * torch.tensor(value, device=images.device).view(-1, 1, 1) for value in (self.mean, self.std))
        return images.float().sub_(mean).div_(std)

    def resized(self, size: int) -> ImageDataset:
        """Scales the images to ``size`` x ``size`` (bilinear, antialiased), still uint8.

        Mean and standard deviation stay the published ones.
        """
        if size < 1:
            raise DataError(f"the size of an image is at least 1 pixel, got {size}")
        if self.input_shape[1:] == (size, size):
            return self
        return replace(self, train_images=_resize(self.train_images, size), test_images=_resize(self.test_images, size))


def subset_order(name: str, split: str, samples: int, wanted: int | None) -> Tensor | None:
    """Returns the indices of the samples that a subset keeps; None for all, in their order.

    Raises:
        DataError: More samples asked for than there are, or fewer than one.
    """
    if wanted is None:
        return None
    if not 1 <= wanted <= samples:
        raise DataError(f"{name} has {samples} {split} samples: ask for 1 to {samples} of them, got {wanted}")
    return _public_order(samples)[:wanted]


def validation_order(name: str, samples: int, size: int) -> tuple[Tensor, Tensor]:
    """Returns the indices of the training samples that are held out for validation, and of those that are kept.

    Raises:
        DataError: Nothing would be left to train on, or to validate with.
    """
    if not 1 <= size < samples:
        raise DataError(f"{name} has {samples} training samples: take 1 to {samples - 1} of them, got {size}")
    order = _public_order(samples)
    return order[:size], order[size:]


def _public_order(samples: int) -> Tensor:
    """A permutation that depends on the number of samples alone."""
    # Python fixes the sequence of random() for a seed for all time; torch and numpy do not fix their permutations.
    source = random.Random(0)
    rank = [source.random() for _ in range(samples)]
    return torch.tensor(sorted(range(samples), key=rank.__getitem__))


def _resize(images: Tensor, size: int) -> Tensor:
    resized = images.new_empty((*images.shape[:2], size, size))
    for source, target in zip(images.split(_RESIZE_CHUNK), resized.split(_RESIZE_CHUNK), strict=True):
        scaled = functional.interpolate(source.float(), (size, size), mode="bilinear", antialias=True)
        target.copy_(scaled.round_().clamp_(0, 255))
    return resized
