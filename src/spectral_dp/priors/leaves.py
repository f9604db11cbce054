"""Dead leaves: images of random shapes that cover each other, the simplest images with edges, corners and occlusion.

With radii of density ``r^-3`` the images look alike at every scale, as natural images do (Lee, Mumford and Huang 2001).

Every leaf is given by a linear map of the pixel's position to two coordinates ``(u, v)``, and by a number ``κ``:

    d² = u² + v² + 2 κ |u v|        the pixel is in the leaf if d is below the radius r

``κ = 0`` is an ellipse, and ``κ = 1`` is a diamond ``|u| + |v| < r``. A rectangle is a diamond in coordinates that are
turned by 45 degrees. So one formula draws all shapes, a whole batch of images at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from spectral_dp.priors.generator import ImagePrior, Shape, slightly_blurred, uniform
from spectral_dp.priors.noise_fields import textures

_MARGIN = 6  # in pixels: centres of leaves lie up to so far outside of the image
_PER_PIXELS = 1024  # the number of leaves is given for an image of so many pixels


@dataclass(frozen=True)
class DeadLeaves(ImagePrior):
    """Random overlapping ellipses, rectangles and diamonds with shading and texture.

    Attributes:
        leaves: Number of leaves of an image of 32 x 32 pixels. Other images have as many for each pixel.
        smallest: Radius of the smallest leaves, in pixels.
        largest: Radius of the largest leaves, in units of the shorter side of the image.
        texture: Largest deviation of the texture, which lies over all leaves. Pixels are from 0 to 1.
        shading: Largest relative change of a leaf's brightness from its centre to its edge.
        grey: Whether all channels are the same.
    """

    kind = "dead-leaves"

    leaves: int = 40
    smallest: float = 2.0
    largest: float = 0.75
    texture: float = 0.18
    shading: float = 0.25
    grey: bool = False

    def __post_init__(self) -> None:
        if self.leaves < 1 or not self.smallest > 0 or not self.largest > 0:
            raise ValueError(
                "dead leaves need at least one leaf and positive radii, got "
                f"leaves={self.leaves}, smallest={self.smallest}, largest={self.largest}"
            )
        if not 0 <= self.texture <= 1 or not 0 <= self.shading <= 1:
            raise ValueError(f"texture and shading are from 0 to 1, got {self.texture} and {self.shading}")

    def draw(self, count: int, shape: Shape, generator: torch.Generator) -> Tensor:
        """Returns independent images; see :class:`ImagePrior`."""
        _, height, width = shape
        channels = 1 if self.grey else shape[0]
        palette = uniform(generator, count, channels, low=0.1, high=0.9)
        maps, bends, radii, paints = self._leaves(palette, (channels, height, width), generator)
        y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
        position = torch.stack([x.flatten(), y.flatten(), torch.ones(height * width)])
        image = palette[:, :, None].expand(-1, -1, height * width).contiguous()
        u, v, d = (torch.empty(count, height * width) for _ in range(3))  # made once: this loop is all of the time
        paint = torch.empty(count * channels, height * width)
        for map_u, map_v, bend, radius, colour in zip(*maps, bends, radii, paints, strict=True):
            torch.mm(map_u, position, out=u)
            torch.mm(map_v, position, out=v)
            torch.mul(u, v, out=d).abs_().mul_(bend).addcmul_(u, u).addcmul_(v, v).sqrt_()
            mask = torch.sub(radius, d, out=d).clamp_(0, 1)  # edges are as soft as a pixel is wide
            torch.mm(colour, position, out=paint)
            image.lerp_(paint.view_as(image), mask[:, None])
        image = image.view(count, channels, height, width)
        exponents = uniform(generator, count, low=0.6, high=1.6)
        strength = uniform(generator, count, 1, 1, high=self.texture)
        image += (textures(exponents, height, width, generator) * strength)[:, None]
        image = slightly_blurred(image, uniform(generator, count, 1, 1, 1)).clamp_(0, 1)
        return image.expand(count, *shape)

    def _leaves(
        self, palette: Tensor, shape: Shape, generator: torch.Generator
    ) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor, Tensor]:
        """Returns the leaves of all images from the lowest to the topmost, in the first dimension of each tensor.

        These are the linear maps of ``(x, y, 1)`` to ``u`` and ``v``, each ``(L, N, 3)``; ``2 κ`` and the radius, each
        ``(L, N, 1)``; and the colour with its shading, ``(L, N C, 3)``.
        """
        channels, height, width = shape
        count, number = len(palette), max(1, round(self.leaves * height * width / _PER_PIXELS))
        largest = max(self.largest * min(height, width), self.smallest)
        share = uniform(generator, number, count)
        radius = (self.smallest**-2 + share * (largest**-2 - self.smallest**-2)) ** -0.5  # density r^-3
        x = uniform(generator, number, count, low=-_MARGIN, high=width + _MARGIN)
        y = uniform(generator, number, count, low=-_MARGIN, high=height + _MARGIN)
        angle = uniform(generator, number, count, high=math.pi)
        aspect = uniform(generator, number, count, low=-0.8, high=0.8).exp_()
        a = _line(angle.cos() / aspect, angle.sin() / aspect, x, y)
        b = _line(-angle.sin() * aspect, angle.cos() * aspect, x, y)
        kind = torch.randint(3, (number, count, 1), generator=generator)
        ellipse, rectangle = kind == 0, kind == 1
        u = torch.where(ellipse, a, torch.where(rectangle, (a + b) / 2, 0.9 * a))
        v = torch.where(ellipse, b, torch.where(rectangle, (a - b) / 2, 0.9 * b))
        colour = (palette + uniform(generator, number, count, channels, low=-0.5, high=0.5)).clamp_(0, 1)
        colour = colour.lerp(colour.mean(2, keepdim=True), uniform(generator, count, 1))
        slope = uniform(generator, number, count, 1, low=-self.shading, high=self.shading) / radius[..., None]
        paint = colour[..., None] * (slope * a)[:, :, None]
        paint[..., 2] += colour
        return (u, v), 2.0 * ~ellipse, radius[..., None] + 0.5, paint.flatten(1, 2)


def _line(across: Tensor, down: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Returns the linear function of ``(x, y, 1)`` with these slopes that is zero at the point ``(x, y)``."""
    return torch.stack([across, down, -(across * x + down * y)], dim=-1)
