"""Images of one bright figure, centred and made upright before a front end reads them.

    w        = the brightness of a pixel, all of an image's adding up to 1
    (cx, cy) = sum w (x, y)                                        the centre of the figure
    k        = sum w (x - cx)(y - cy) / sum w (y - cy)²            its slant: how far it leans aside in each row
    out(x, y) = image(x + k y + cx, y + cy)                        from the centre of the image, between pixels linearly

People write at different slants, which says nothing of what they write. A linear head on features cannot undo it, and
would have to learn every slant through the noise. Here each image loses its own, which costs no privacy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spectral_dp.features.errors import FeatureError
from spectral_dp.features.extractor import Extractor, FixedExtractor, Shape

_STEEPEST = 1.0  # a figure that leans by more than 45 degrees is no slanted writing
_LEAST_HEIGHT = 1e-3  # in squared pixels: a figure of one row has no slant


@dataclass(frozen=True)
class Upright(FixedExtractor):
    """A front end that sees images centred and upright: for bright writing on a dark ground.

    Formal guarantee. What is done to an image depends on that image alone, so features are a fixed function of one
    record wherever those of ``of`` are, and cost no privacy budget.

    Attributes:
        of: The front end that reads the images.
    """

    version: ClassVar[int] = 1

    of: Extractor

    @property
    def name(self) -> str:
        """The name of the front end, with a prefix."""
        return f"upright-{self.of.name}"

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the front end, and the version."""
        return {"of": [self.of.name, dict(self.of.settings)], "version": self.version}

    @property
    def is_public(self) -> bool:
        """Whether the features depend on no private record but the one they are of."""
        return getattr(self.of, "is_public", True)

    def output_shape(self, input_shape: Shape) -> Shape:
        """Returns the shape of the features, which is that of the front end."""
        if len(input_shape) != 3:
            raise FeatureError(f"only images (C, H, W) can be made upright, got records of shape {input_shape}")
        return self.of.output_shape(input_shape)

    def _module(self, input_shape: Shape) -> nn.Module:
        return UprightImages(self.of.module(input_shape))


class UprightImages(nn.Module):
    """Gives a front end the images centred and upright: ``(B, C, H, W) -> features``.

    Images are bytes from 0 to 255, or floating-point numbers from 0 to 1.
    """

    def __init__(self, front_end: nn.Module) -> None:
        super().__init__()
        self.front_end = front_end
        if hasattr(front_end, "rows_at_once"):
            self.rows_at_once = front_end.rows_at_once

    def forward(self, images: Tensor) -> Tensor:
        """Returns the features of the images."""
        return self.front_end((255 * made_upright(images)).round().clamp(0, 255).to(torch.uint8))  # they read bytes


def made_upright(images: Tensor) -> Tensor:
    """Returns images from 0 to 1 with the figure of each in the middle and upright; a black image stays black.

    Args:
        images: Images ``(B, C, H, W)``, as bytes, or as numbers from 0 to 1; others count as the nearest one.
    """
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise FeatureError(f"images are bytes from 0 to 255 or floating-point from 0 to 1, got {images.dtype}")
    pixels = images.float() / 255 if images.dtype == torch.uint8 else images.float().nan_to_num(0).clamp(0, 1)
    if not len(pixels):
        return pixels
    # One at a time, so that to the last bit no image depends on another.
    return torch.cat([_upright(image[None]) for image in pixels])


def _upright(image: Tensor) -> Tensor:
    """Returns one image ``(1, C, H, W)``, upright."""
    _, _, height, width = image.shape
    y = torch.arange(height, device=image.device) + 0.5 - height / 2
    x = torch.arange(width, device=image.device) + 0.5 - width / 2
    w = image[0].mean(0)
    w = w / w.sum().clamp(min=1e-6)
    cx, cy = (w * x).sum(), (w * y[:, None]).sum()
    leaning, upwards = x - cx, (y - cy)[:, None]
    slant = (w * leaning * upwards).sum() / (w * upwards.square()).sum().clamp(min=_LEAST_HEIGHT)
    slant = slant.clamp(-_STEEPEST, _STEEPEST)
    read_x = x + slant * y[:, None] + cx
    read_y = (y + cy)[:, None].expand_as(read_x)
    positions = torch.stack([read_x / (width / 2), read_y / (height / 2)], dim=-1)
    return F.grid_sample(image, positions[None], align_corners=False)
