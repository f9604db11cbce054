"""Features in the coordinates of a public spectrum: the directions in which generated images vary, the strongest first.

    c_i = u_i^t (x - m),     i = 1 .. k

``u_i`` are eigenvectors of the covariance that features of *generated* images have, and ``m`` is their mean (see
``spectrum``). A linear head on ``c`` has k weights for each class, not as many as features, so there is less noise. The
gains of the coordinates are a stage of their own (``weighted``): projecting takes minutes, and other gains seconds.

It is a stage from cached features to cached features, like ``prepared``, and comes after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from spectral_dp.features.errors import FeatureError
from spectral_dp.features.extractor import FixedExtractor, Shape
from spectral_dp.features.spectrum import StoredSpectrum


@dataclass(frozen=True)
class Projected(FixedExtractor):
    """An :class:`~spectral_dp.features.Extractor` from features to their first coordinates in a public basis.

    Formal guarantee. Features that are projected cost no more privacy than those that are not, which is nothing:

    - The basis and the mean are computed from generated images, so they depend on no private record.
    - The coordinates of a record are a fixed function of that record alone.
    - Nothing of the spectrum is released by training, and nothing is charged for it.

    Attributes:
        spectrum: Where the spectrum is. If it is one of channels, ``(C, H, W)`` becomes ``(k, H, W)``: the channels of
            every position are projected. Otherwise all numbers of a record are, and it becomes ``(k,)``.
        rank: ``k``, the number of coordinates that are kept.
    """

    version: ClassVar[int] = 2

    spectrum: StoredSpectrum
    rank: int

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise FeatureError(f"a projection keeps at least one direction, got rank {self.rank}")
        if self.rank > self.spectrum.rank:
            raise FeatureError(
                f"the spectrum has {self.spectrum.rank} directions, so no {self.rank} of them can be kept: lower the "
                "rank (feature_rank, feature_channels), or generate more images (feature_prior_images)"
            )

    @property
    def name(self) -> str:
        """The name of this stage."""
        return "channels" if self.spectrum.channels else "projected"

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings, and the checksum of the spectrum: one that was computed again may differ by rounding."""
        return {"rank": self.rank, "spectrum": self.spectrum.checksum, "version": self.version}

    def output_shape(self, input_shape: Shape) -> Shape:
        """Returns ``(k,)``, or ``(k, H, W)`` for a spectrum of channels."""
        shape = projected_shape(input_shape, self.rank, channels=self.spectrum.channels)
        size = input_shape[0] if self.spectrum.channels else math.prod(input_shape)
        if size != self.spectrum.size:
            raise FeatureError(
                f"the spectrum is of {self.spectrum.size} numbers, but features of shape {input_shape} have {size}: "
                "compute the spectrum with the same front end and preparation"
            )
        return shape

    def _module(self, input_shape: Shape) -> nn.Module:
        return SpectralProjection(self)


class SpectralProjection(nn.Module):
    """Coordinates in the basis of a spectrum: ``(B, ...) -> (B, k)``, or ``(B, C, H, W) -> (B, k, H, W)``.

    It has no parameters. Its basis is no part of its ``state_dict``: it is in the file of the spectrum.
    """

    rows_at_once = 256  # the basis is larger than the cache: it is to be read for many records together
    basis: Tensor
    offset: Tensor

    def __init__(self, projected: Projected) -> None:
        super().__init__()
        self._of_channels = projected.spectrum.channels
        spectrum = projected.spectrum.load(projected.rank)
        self.register_buffer("basis", spectrum.basis.contiguous(), persistent=False)
        offset = spectrum.mean.double() @ spectrum.basis.double()
        self.register_buffer("offset", offset.float(), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """Returns the coordinates, in float32."""
        x = features.float()
        if self._of_channels:
            return torch.einsum("bchw,ck->bkhw", x, self.basis) - self.offset.view(-1, 1, 1)
        return x.flatten(1) @ self.basis - self.offset


def projected_shape(shape: Shape, rank: int, *, channels: bool) -> Shape:
    """Returns the shape of features after a projection, which needs no spectrum."""
    if not channels:
        return (rank,)
    if len(shape) != 3:
        raise FeatureError(
            f"a projection of channels reads maps (C, H, W), got shape {shape}: leave feature_channels out, or "
            "feature_ratio"
        )
    return (rank, *shape[1:])
