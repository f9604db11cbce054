"""Pen strokes: bright curves on a dark ground, for data sets of written characters.

A stroke starts at a random point and walks on in small steps, while its heading turns: ``θ(s) = θ0 + κ s + κ' s² / 2``.
A pixel is as bright as its distance to the nearest point of a stroke says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from spectral_dp.priors.generator import ImagePrior, Shape, slightly_blurred, uniform

_STEP = 1.5  # in pixels: points of a stroke that are not further apart than this leave no gaps


@dataclass(frozen=True)
class PenStrokes(ImagePrior):
    """Bright pen strokes of random thickness and curvature on a dark ground.

    Lengths are in units of the shorter side of the image.

    Attributes:
        most_strokes: Largest number of strokes of an image. Each number from one on is as likely.
        thinnest: Half the width of the thinnest pen.
        thickest: Half the width of the thickest pen. A pen draws all strokes of an image.
        longest: Largest length of a stroke.
        most_turns: Largest change of heading along a stroke, in full turns, by either part of its curvature.
    """

    kind = "strokes"

    most_strokes: int = 4
    thinnest: float = 0.02
    thickest: float = 0.07
    longest: float = 1.2
    most_turns: float = 0.7

    def __post_init__(self) -> None:
        if self.most_strokes < 1 or not 0 < self.thinnest <= self.thickest or not self.longest > 0:
            raise ValueError(
                "pen strokes need at least one stroke, 0 < thinnest <= thickest and a positive length, got "
                f"most_strokes={self.most_strokes}, thinnest={self.thinnest}, thickest={self.thickest}, "
                f"longest={self.longest}"
            )

    def draw(self, count: int, shape: Shape, generator: torch.Generator) -> Tensor:
        """Returns independent images; see :class:`ImagePrior`."""
        channels, height, width = shape
        side = min(height, width)
        px, py = self._points(count, height, width, generator)
        # The squared distance is a sum of a function of x and one of y, so each point costs a sum and a minimum.
        across = (torch.arange(width) + 0.5 - px[..., None]).square_()
        down = (torch.arange(height) + 0.5 - py[..., None]).square_()
        nearest = torch.full((count, height, width), math.inf)
        square = torch.empty_like(nearest)
        for from_x, from_y in zip(across, down, strict=True):
            torch.add(from_y[:, :, None], from_x[:, None, :], out=square)
            torch.minimum(nearest, square, out=nearest)
        pen = uniform(generator, count, 1, 1, low=self.thinnest * side, high=self.thickest * side)
        ink = (pen + 0.5 - nearest.sqrt_()).clamp_(0, 1)[:, None]
        colour = uniform(generator, count, channels, 1, 1, low=0.6, high=1.0)
        return slightly_blurred(ink * colour, uniform(generator, count, 1, 1, 1)).clamp_(0, 1)

    def _points(self, count: int, height: int, width: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Returns the points of all strokes, ``x`` and ``y``, each ``(P S, N)`` in pixels."""
        side, strokes = min(height, width), self.most_strokes
        points = math.ceil(self.longest * side / max(_STEP, self.thinnest * side)) + 1
        s = torch.linspace(0, 1, points)[:, None, None]
        turn = 2 * math.pi * self.most_turns
        heading = uniform(generator, strokes, count, high=2 * math.pi)
        bend, change = (uniform(generator, strokes, count, low=-turn, high=turn) for _ in range(2))
        length = uniform(generator, strokes, count, low=0.2 * self.longest * side, high=self.longest * side)
        angle = heading + bend * s + change * s.square() / 2
        steps = torch.stack([angle.cos(), angle.sin()]) * (length / points)
        walk = steps.cumsum(1)
        walk -= walk.mean(1, keepdim=True)  # a stroke lies around its own centre
        low, high = 0.3, 0.7  # of the side: centres of strokes are in the middle of the image
        centre = torch.stack([uniform(generator, strokes, count, low=low * n, high=high * n) for n in (width, height)])
        used = torch.arange(strokes)[:, None] <= torch.randint(strokes, (count,), generator=generator)
        x, y = (walk + centre[:, None]).where(used, 4.0 * max(height, width)).flatten(1, 2)  # unused: far outside
        return x, y
