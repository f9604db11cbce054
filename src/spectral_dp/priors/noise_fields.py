"""Random fields without edges: noise whose amplitudes fall as one over the frequency, and white noise."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spectral_dp.priors.generator import ImagePrior, Shape

_DEVIATION = 63 / 255  # of a pixel from 0 to 1: two deviations on both sides of the middle fit


@dataclass(frozen=True)
class OneOverF(ImagePrior):
    """Noise with the mean spectrum of natural images: amplitudes fall as one over the frequency.

    Attributes:
        own_colour: Deviation of what is drawn for each channel alone, in units of what is common to all channels. The
            channels of natural images go together.
    """

    kind = "one-over-f"

    own_colour: float = 0.3

    def __post_init__(self) -> None:
        if not self.own_colour >= 0:
            raise ValueError(f"own_colour is a deviation and must not be negative, got {self.own_colour}")

    def draw(self, count: int, shape: Shape, generator: torch.Generator) -> Tensor:
        """Returns independent images; see :class:`ImagePrior`."""
        channels, height, width = shape
        frequency = _frequencies(height, width)
        common = torch.randn(count, 1, height, width, generator=generator)
        white = common + self.own_colour * torch.randn(count, channels, height, width, generator=generator)
        pink = torch.fft.irfft2(torch.fft.rfft2(white) / frequency, s=(height, width))
        # Interior columns of the half spectrum stand for their mirror images, too.
        weight = torch.full((width // 2 + 1,), 2.0)
        weight[0] = 1
        if width % 2 == 0:
            weight[-1] = 1
        variance = float((weight / frequency.square()).sum() / (height * width)) * (1 + self.own_colour**2)
        return (0.5 + pink * (_DEVIATION / variance**0.5)).clamp_(0, 1)


@dataclass(frozen=True)
class WhiteNoise(ImagePrior):
    """Independent Gaussian pixels: images without any structure, for comparison."""

    kind = "white-noise"

    def draw(self, count: int, shape: Shape, generator: torch.Generator) -> Tensor:
        """Returns independent images; see :class:`ImagePrior`."""
        return torch.randn(count, *shape, generator=generator).mul_(_DEVIATION).add_(0.5).clamp_(0, 1)


def textures(exponents: Tensor, height: int, width: int, generator: torch.Generator) -> Tensor:
    """Returns one texture for each exponent ``α``, ``(N, H, W)``, of zero mean and unit deviation.

    Their amplitudes fall as the frequency to the power ``-α``.
    """
    noise = torch.randn(len(exponents), height, width, generator=generator)
    log_frequency = _frequencies(height, width).log()
    spectrum = torch.fft.rfft2(noise) * torch.exp(-exponents.view(-1, 1, 1) * log_frequency)
    spectrum[:, 0, 0] = 0
    field = torch.fft.irfft2(spectrum, s=(height, width))
    return field / field.square().mean((1, 2), keepdim=True).sqrt().clamp_(min=1e-12)


def _frequencies(height: int, width: int) -> Tensor:
    """Returns the frequencies of ``rfft2``, where that of the mean is replaced by the lowest."""
    across, down = torch.fft.rfftfreq(width), torch.fft.fftfreq(height)
    return torch.hypot(down[:, None], across[None]).clamp_(min=1 / max(height, width))
