"""Wavelet scattering (Bruna and Mallat 2013), the fixed front end of the paper's ScatterLinear and ScatterCNN.

    S0 = x * φ_J
    S1 = |x * ψ_{j,θ}| * φ_J
    S2 = ||x * ψ_{j1,θ1}| * ψ_{j2,θ2}| * φ_J,   j2 > j1

kymatio designs the filters ψ and φ. Its results are reproduced here to rounding, in the same order of maps, in less
time: all angles of a scale go through one transform, and the low-pass φ_J with its subsampling is a product with two
small matrices, because φ_J is separable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spectral_dp.features.errors import FeatureError
from spectral_dp.features.extractor import FixedExtractor, Shape
from spectral_dp.features.kymatio_filters import kymatio_transform


@dataclass(frozen=True)
class Scattering(FixedExtractor):
    """Scattering of images as an :class:`~spectral_dp.features.Extractor`.

    Attributes:
        mean: Mean of each channel, for pixels from 0 to 1. A public constant, never computed from private images.
        std: Standard deviation of each channel, likewise.
        scales: ``J``: features are averaged over ``2^J`` pixels, and subsampled as much.
        angles: ``L``, the number of orientations of wavelets.
        order: 1 or 2, the largest number of wavelets in a row.

    >>> Scattering((0.5,), (0.25,)).output_shape((1, 28, 28))
    (81, 7, 7)
    """

    name = "scattering"

    mean: tuple[float, ...]
    std: tuple[float, ...]
    scales: int = 2
    angles: int = 8
    order: int = 2

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not self.mean or min(self.std) <= 0:
            raise FeatureError(f"give one mean and one positive std a channel, got {self.mean} and {self.std}")
        if self.scales < 1 or self.angles < 1 or self.order not in (1, 2):
            raise FeatureError(
                f"scattering needs at least one scale and one angle, and order 1 or 2, got scales={self.scales}, "
                f"angles={self.angles}, order={self.order}"
            )

    @property
    def maps(self) -> int:
        """The number of maps of one channel: 81 for two scales and eight angles."""
        first, pairs = self.scales * self.angles, self.scales * (self.scales - 1) // 2 * self.angles**2
        return 1 + first + (pairs if self.order == 2 else 0)

    def output_shape(self, input_shape: Shape) -> Shape:
        """Returns ``(C * maps, H / 2^J, W / 2^J)``."""
        step = 2**self.scales
        if len(input_shape) != 3 or input_shape[0] != len(self.mean):
            raise FeatureError(f"expected images of {len(self.mean)} channels, (C, H, W), got shape {input_shape}")
        channels, height, width = input_shape
        if height % step or width % step or min(height, width) < 2 * step:  # mirrored at its borders by a step
            larger = max(2 * step, step * -(-max(height, width) // step))
            raise FeatureError(
                f"scattering over {self.scales} scales needs images whose sides are multiples of {step} and at "
                f"least {2 * step}, got {height} x {width}: resize them (--image-size {larger})"
            )
        return channels * self.maps, height // step, width // step

    def _module(self, input_shape: Shape) -> nn.Module:
        return ScatteringTransform(self, (input_shape[1], input_shape[2]))


class ScatteringTransform(nn.Module):
    """Scattering of images of one size: ``(B, C, H, W) -> (B, C * maps, H / 2^J, W / 2^J)``.

    It has no parameters, and its filters are no part of its ``state_dict``: they follow from the settings. Images are
    bytes from 0 to 255, or floating-point numbers from 0 to 1.
    """

    def __init__(self, scattering: Scattering, size: tuple[int, int]) -> None:
        super().__init__()
        self.scattering, self.size = scattering, size
        kymatio = kymatio_transform(scattering.scales, scattering.angles, scattering.order, size)
        padded = (kymatio._M_padded, kymatio._N_padded)
        before = [(whole - part) // 2 for whole, part in zip(padded, size, strict=True)]
        after = [whole - part - first for whole, part, first in zip(padded, size, before, strict=True)]
        self._padding = (before[1], after[1], before[0], after[0])
        for name, value in (("mean", scattering.mean), ("std", scattering.std)):
            self._constant(name, torch.tensor(value).view(-1, 1, 1))
        for j in range(scattering.scales):
            wavelets = [psi["levels"] for psi in kymatio.psi if psi["j"] == j]
            for level in range(max(j, 1) if scattering.order == 2 else 1):
                psi = torch.from_numpy(np.stack([levels[level] for levels in wavelets]))
                self._constant(f"psi_{j}_{level}", _in_aliases(psi, 2 ** (j - level)) / 4 ** (j - level))
            rows, columns = _low_pass(kymatio.phi["levels"][j], 2 ** (scattering.scales - j))
            self._constant(f"rows_{j}", rows)
            self._constant(f"columns_{j}", columns)

    def _constant(self, name: str, value: Tensor) -> None:
        self.register_buffer(name, value.float().contiguous(), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Returns the maps of each channel one after the other, as kymatio orders them."""
        if images.ndim != 4 or images.shape[1] != len(self.scattering.mean) or tuple(images.shape[2:]) != self.size:
            expected = (len(self.scattering.mean), *self.size)
            raise FeatureError(f"expected images of shape (B, {', '.join(map(str, expected))}), got {images.shape[1:]}")
        if images.dtype != torch.uint8 and not images.is_floating_point():
            raise FeatureError(f"images are bytes from 0 to 255 or floating-point from 0 to 1, got {images.dtype}")
        pixels = images.float() / 255 if images.dtype == torch.uint8 else images.float()
        x = F.pad((pixels - self.mean) / self.std, self._padding, mode="reflect").flatten(0, 1)  # type: ignore[operator]
        spectrum, zeroth, first, second = torch.fft.fft2(x), self._averaged(x[:, None], 0), [], []
        for j1 in range(self.scattering.scales):
            modulus = self._modulus(spectrum, j1, 0)
            first.append(self._averaged(modulus, j1))
            if self.scattering.order == 2 and j1 + 1 < self.scattering.scales:
                inner = torch.fft.fft2(modulus).flatten(0, 1)
                finer = [
                    self._averaged(self._modulus(inner, j2, j1), j2) for j2 in range(j1 + 1, self.scattering.scales)
                ]
                second.append(torch.cat(finer, 1).unflatten(0, (len(x), -1)).flatten(1, 2))
        maps = torch.cat([zeroth, *first, *second], 1)
        return maps.unflatten(0, images.shape[:2]).flatten(1, 2)

    def _modulus(self, spectrum: Tensor, j: int, level: int) -> Tensor:
        """Returns ``|u * ψ_{j,θ}|`` for all angles, subsampled: ``(n, H, W) -> (n, L, H / k, W / k)``."""
        aliases = _in_aliases(spectrum, 2 ** (j - level))
        psi = self.get_buffer(f"psi_{j}_{level}")
        product = aliases[:, 0, None] * psi[:, 0]
        for number in range(1, psi.shape[1]):  # one after the other: their sum alone has to fit into the cache
            product += aliases[:, number, None] * psi[:, number]
        return torch.fft.ifft2(product).abs()

    def _averaged(self, u: Tensor, j: int) -> Tensor:
        """Returns ``u * φ_J``, subsampled to one number in ``2^J`` pixels and without the padding."""
        return self.get_buffer(f"rows_{j}") @ (u @ self.get_buffer(f"columns_{j}"))


def _in_aliases(spectrum: Tensor, k: int) -> Tensor:
    """Returns the parts of a spectrum that fall together when the signal is subsampled: ``-> (..., k k, H/k, W/k)``."""
    *batch, height, width = spectrum.shape
    parts = spectrum.reshape(*batch, k, height // k, k, width // k).transpose(-3, -2)
    return parts.reshape(*batch, k * k, height // k, width // k)


def _low_pass(phi: Any, k: int) -> tuple[Tensor, Tensor]:
    """Returns the matrices that apply a separable low-pass to rows and columns, keep every k-th and cut the padding."""
    spectrum = torch.from_numpy(np.asarray(phi)).double()
    scale = spectrum[0, 0].sqrt()
    matrices = []
    for profile in (spectrum[:, 0] / scale, spectrum[0] / scale):
        pulses = torch.fft.fft(torch.eye(len(profile), dtype=torch.float64), dim=0)
        matrices.append(torch.fft.ifft(profile[:, None] * pulses, dim=0).real[::k][1:-1])
    return matrices[0], matrices[1].T
