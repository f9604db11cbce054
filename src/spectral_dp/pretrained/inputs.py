"""What a pretrained network reads: pixels in its size and scale, and word pieces.

Frozen features and fine-tuning share these, so that both see the same. The data sets hold records as they are
published; ``normalise`` makes a batch of them into what the network reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from spectral_dp.data import ImageDataset, TextDataset
from spectral_dp.data.texts import decoded_texts
from spectral_dp.pretrained.weights import PretrainedWeights

Interpolation = Literal["bilinear", "bicubic"]


def network_pixels(
    images: Tensor,
    side: int,
    mean: Sequence[float],
    std: Sequence[float],
    interpolation: Interpolation = "bilinear",
) -> Tensor:
    """Returns images as a network reads them: ``(B, 1 or 3, H, W) -> (B, 3, side, side)``, channels last in memory.

    Args:
        images: Bytes, or numbers from 0 to 1. Grey images are repeated in three channels.
        side: Pixels a side to which they are resized, antialiased where they get smaller.
        mean: Mean of pixels from 0 to 1 that the weights expect: constants that were published with them.
        std: Deviation likewise.
        interpolation: How they are resized.
    """
    pixels = images.float() / 255 if images.dtype == torch.uint8 else images.float()
    if tuple(pixels.shape[2:]) != (side, side):
        pixels = F.interpolate(pixels, (side, side), mode=interpolation, antialias=True)
    means, deviations = (torch.tensor(value, device=pixels.device).view(-1, 1, 1) for value in (mean, std))
    return ((pixels.expand(-1, 3, -1, -1) - means) / deviations).contiguous(memory_format=torch.channels_last)


def without_padding(pieces: Tensor) -> Tensor:
    """Cuts off the columns of word pieces ``(B, L)`` that are padding in every row; padding costs time."""
    longest = int((pieces != 0).sum(1).max()) if len(pieces) else 1
    return pieces[:, : max(longest, 1)]


@dataclass(frozen=True, eq=False)
class NetworkImages(ImageDataset):
    """Images for a pretrained network, whose constants ``mean`` and ``std`` are.

    Attributes:
        side: Pixels a side to which a batch is resized.
    """

    side: int = 224

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """``(3, side, side)``: what the network reads."""
        return 3, self.side, self.side

    def normalise(self, images: Tensor) -> Tensor:
        """Returns what the network reads of images as they are held."""
        return network_pixels(images, self.side, self.mean, self.std)


@dataclass(frozen=True, eq=False)
class NetworkTexts(TextDataset):
    """Texts as word pieces ``(N, L)``, in the place of bytes."""

    def normalise(self, texts: Tensor) -> Tensor:
        """Returns what the network reads of word pieces as they are held."""
        return without_padding(texts)


def network_images(images: ImageDataset, weights: PretrainedWeights, side: int) -> NetworkImages:
    """Returns images for the network of some weights, in this size."""
    return NetworkImages(**vars(images) | {"mean": weights.mean, "std": weights.std, "side": side})


def network_texts(texts: TextDataset, weights: PretrainedWeights, length: int) -> NetworkTexts:
    """Returns texts for the network of some weights: at most ``length`` word pieces of each."""
    tokenizer = weights.tokenizer()

    def pieces(rows: Tensor) -> Tensor:
        return tokenizer.encode(decoded_texts(rows), length=length)

    train, test = pieces(texts.train_images), pieces(texts.test_images)
    return NetworkTexts(texts.name, train, texts.train_labels, test, texts.test_labels, texts.classes)
