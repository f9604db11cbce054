"""What a head reads of cached maps: averaged over views, compressed, normalised for each record, and only the cosines
it keeps.

All of it is a fixed function of one record, so it is done once and cached like the maps themselves. A linear head that
trains on kept cosine coefficients only is exactly the filtered layer of ``SpectralConfig(input_layouts=...)``: weights
of dropped coefficients that begin at zero stay there. But a step costs only the fraction that is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spectral_dp.features.errors import FeatureError
from spectral_dp.features.extractor import FixedExtractor, Shape
from spectral_dp.mechanism.filters import LowPassFilter
from spectral_dp.mechanism.projection import Projection
from spectral_dp.mechanism.transforms import get_transform

_WITH_VIEWS = (2, 4)  # numbers of axes: views come before the axes of maps or of vectors


@dataclass(frozen=True)
class Prepared(FixedExtractor):
    """An :class:`~spectral_dp.features.Extractor` from cached features: maps ``(C, H, W)`` or vectors ``(D,)``.

    Several views of them come as ``(V, C, H, W)`` or ``(V, D)``, and are averaged. A linear head on features averaged
    over the mirror image has the same answer for both, which leaves half of the directions to learn.

    Attributes:
        groups: Number of groups of channels that are normalised for each record by itself; 0 for none.
        ratio: Fraction of the cosine coefficients of each map to drop, the highest first; 0 keeps the maps as they are.
            Frequencies are kept whole, as by ``LowPassFilter``, so a little more may be dropped.
        unit: Whether each record is scaled to unit length at the end.
        exponent: Every feature ``x`` becomes ``sign(x) |x|^exponent``, before it is normalised. Averaged responses are
            small for most images and large for a few: square roots let these few not use up the clipping bound.

    >>> Prepared(groups=27, ratio=0.75).output_shape((243, 8, 8))
    (243, 15)
    """

    name = "prepared"

    groups: int = 0
    ratio: float = 0.0
    unit: bool = False
    exponent: float = 1.0

    def __post_init__(self) -> None:
        if self.groups < 0 or not 0 <= self.ratio < 1:
            raise FeatureError(
                f"groups must be at least 0, and ratio in [0, 1): the fraction to drop, got {self.groups}, {self.ratio}"
            )
        if not 0 < self.exponent <= 1:
            raise FeatureError(f"the exponent must be above 0 and at most 1, got {self.exponent}: 0.5 for square roots")

    @property
    def settings(self) -> Mapping[str, Any]:
        """The fields and the version, without an exponent of 1: caches from before there was one are still found."""
        return {name: value for name, value in super().settings.items() if name != "exponent" or value != 1}

    def output_shape(self, input_shape: Shape) -> Shape:
        """Returns the shape of one view, ``(C, H, W)`` or ``(D,)``, or ``(C, M)`` if M cosines of a map are kept."""
        shape = one_view(input_shape)
        channels, *size = shape
        if self.groups and channels % self.groups:
            divisors = [n for n in range(1, channels + 1) if channels % n == 0]
            raise FeatureError(
                f"{channels} channels are no multiple of {self.groups} groups: choose one of "
                f"{', '.join(map(str, divisors))}"
            )
        if self.groups and math.prod(shape) < 2 * self.groups:
            raise FeatureError(f"{self.groups} groups of one number each have nothing to normalise: use fewer groups")
        if not self.ratio:
            return shape
        if not size:
            raise FeatureError(f"vectors {shape} have no frequencies to drop: leave the ratio (feature_ratio) out")
        return channels, self.kept(size[0], size[1])

    def kept(self, height: int, width: int) -> int:
        """Returns the number of cosine coefficients that are kept of a map of this size."""
        return _projection(self.ratio, (height, width)).counted_size

    def _module(self, input_shape: Shape) -> nn.Module:
        return Preparation(self, input_shape)


class Preparation(nn.Module):
    """Averages over views, compresses, normalises groups of channels, and keeps the lowest cosines of maps.

    It has no parameters, and nothing of it is in its ``state_dict``.
    """

    def __init__(self, prepared: Prepared, input_shape: Shape) -> None:
        super().__init__()
        self.prepared = prepared
        self._has_views = len(input_shape) in _WITH_VIEWS
        size = (input_shape[-2], input_shape[-1]) if prepared.ratio else (1, 1)
        matrix = _projection(prepared.ratio, size).matrix(torch.empty(0)) if prepared.ratio else None
        self.register_buffer("cosines", matrix, persistent=False)

    def forward(self, maps: Tensor) -> Tensor:
        """Returns what the head reads, in float32."""
        x = maps.float()
        if self._has_views:
            x = x.mean(1)
        if self.prepared.exponent != 1:
            x = x.sign() * x.abs() ** self.prepared.exponent
        if self.prepared.groups:
            x = F.group_norm(x, self.prepared.groups)
        if self.cosines is not None:
            x = x.flatten(2) @ self.cosines.T  # type: ignore[operator]
        return unit_length(x) if self.prepared.unit else x


def unit_length(features: Tensor) -> Tensor:
    """Returns the features ``(B, ...)`` with each record scaled to length one; zeros stay zeros."""
    return F.normalize(features.flatten(1)).view_as(features)


def one_view(input_shape: Shape) -> Shape:
    """Returns the shape of the features of one view: of maps ``([V,] C, H, W)``, or of vectors ``([V,] D)``."""
    if len(input_shape) not in (1, 2, 3, 4):
        raise FeatureError(
            f"expected maps (C, H, W), vectors (D,), or views of them (V, C, H, W), (V, D), got shape {input_shape}"
        )
    return input_shape[1:] if len(input_shape) in _WITH_VIEWS else input_shape


def _projection(ratio: float, size: tuple[int, int]) -> Projection:
    cosine = get_transform("dct")
    return Projection(cosine, LowPassFilter(ratio).gains(cosine, size))
