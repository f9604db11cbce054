"""What the networks for images have in common: maps, their average, and a head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor, nn


class ImageBackbone(nn.Module, ABC):
    """A network for images that ends in maps, their average over positions, and a linear head.

    Attributes:
        width: The number of channels of the last maps, which is the number of pooled features.
        head: The name of the head.
    """

    width: int
    head: ClassVar[str] = "fc"

    @abstractmethod
    def maps(self, images: Tensor) -> Tensor:
        """Returns the last maps before they are averaged: ``(B, 3, H, W) -> (B, width, h, w)``."""

    def pooled(self, images: Tensor) -> Tensor:
        """Returns the average of the maps over positions: ``(B, 3, H, W) -> (B, width)``."""
        return self.maps(images).mean((2, 3))

    def forward(self, images: Tensor) -> Tensor:
        """``(B, 3, H, W) -> (B, classes)``; without a head, ``(B, width)``."""
        return self.get_submodule(self.head)(self.pooled(images))

    def _through(self, x: Tensor, stage: str, number: int) -> Tensor:
        """Runs ``x`` through so many stages, which are called ``stage`` and their number, from 1 on."""
        for n in range(1, number + 1):
            x = self.get_submodule(f"{stage}{n}")(x)
        return x


def linear_head(width: int, classes: int | None) -> nn.Module:
    """Returns a linear head for so many classes, or nothing that acts for None."""
    return nn.Identity() if classes is None else nn.Linear(width, classes)
