"""Pixels as features: an image as a vector, standardised by published constants, for heads that read vectors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spectral_dp.features.errors import FeatureError
from spectral_dp.features.extractor import FixedExtractor, Shape
from spectral_dp.features.registry import ImageFacts, register_extractor


@dataclass(frozen=True)
class Pixels(FixedExtractor):
    """The pixels of an image ``(C, H, W)`` as a vector: an :class:`~spectral_dp.features.Extractor`.

    Attributes:
        mean: Published mean of each channel, for pixels from 0 to 1.
        std: Published standard deviation of each channel, likewise.
    """

    name = "pixels"

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def output_shape(self, input_shape: Shape) -> Shape:
        """Returns ``(C H W,)``."""
        if len(input_shape) != 3 or input_shape[0] != len(self.mean):
            raise FeatureError(f"expected images ({len(self.mean)}, H, W), got shape {input_shape}")
        return (math.prod(input_shape),)

    def _module(self, input_shape: Shape) -> nn.Module:
        return _Standardised(self)


class _Standardised(nn.Module):
    def __init__(self, pixels: Pixels) -> None:
        super().__init__()
        self.mean, self.std = (torch.tensor(value).view(-1, 1, 1) for value in (pixels.mean, pixels.std))

    def forward(self, images: Tensor) -> Tensor:
        return ((images.float() / 255 - self.mean) / self.std).flatten(1)


def pixels_of(images: ImageFacts) -> Pixels:
    """Returns the front end for some images, with their published mean and standard deviation."""
    return Pixels(images.mean, images.std)


register_extractor("pixels", pixels_of, assumption="the pixels themselves, standardised by public constants")
