"""A control that is NOT private: the images of a data set itself in the place of generated ones.

Dictionaries and spectra of the training images show what a prior loses against knowing the data. They are statistics
of private records that nobody noised and nobody charged. So runs that use them are marked as not private. As options:

    --feature-option prior=spectral_dp.experiments.training_images:cifar10
    --feature-prior spectral_dp.experiments.training_images:cifar10
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from spectral_dp.data import ImageDataset, load_dataset
from spectral_dp.priors.generator import ImagePrior, Shape


@dataclass(frozen=True)
class TrainingImages(ImagePrior):
    """Training images of a data set, drawn with replacement. What is computed from them is NOT public.

    Attributes:
        dataset: Name of the data set.
    """

    kind = "training-images"
    is_public = False
    assumption = "they are the training records themselves, for which nothing was charged"

    dataset: str

    def draw(self, count: int, shape: Shape, generator: torch.Generator) -> Tensor:
        """Returns images of the data set; see :class:`ImagePrior`."""
        images = _images(self.dataset)
        if tuple(images.shape[1:]) != tuple(shape):
            raise ValueError(f"images of {self.dataset} have the shape {tuple(images.shape[1:])}, not {tuple(shape)}")
        return images[torch.randint(len(images), (count,), generator=generator)].float() / 255


@cache
def _images(dataset: str) -> Tensor:
    found = load_dataset(dataset)
    assert isinstance(found, ImageDataset)
    return found.train_images


digits, mnist, fashion_mnist, cifar10 = (
    partial(TrainingImages, name) for name in ("digits", "mnist", "fashion-mnist", "cifar10")
)
