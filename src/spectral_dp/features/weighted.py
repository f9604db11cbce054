"""Gains of the coordinates in a public spectrum, by eigenvalue.

    z_i = (λ_i / λ_1 + damp)^-p  c_i,     i = 1 .. k

``c_i`` are the coordinates of ``projected``, and ``λ_i`` the eigenvalues of the covariance that features of *generated*
images have. With ``p = 1/2`` strong directions do not use up the clipping bound alone.

At unit length, ``z`` is divided by ``max(|z|, l)``. The floor ``l`` is a small share of the length that generated
images have, a public number. Of a record that is orthogonal to the basis only rounding errors are left, which may
depend on the records beside it. At unit length they would be a direction of their own, and one record more could move
others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from spectral_dp.features.errors import FeatureError
from spectral_dp.features.extractor import FixedExtractor, Shape
from spectral_dp.features.spectrum import StoredSpectrum

#: The least length that is scaled to one, as a share of the length that features of generated images have.
LEAST_SHARE = 1e-3


@dataclass(frozen=True)
class Weighted(FixedExtractor):
    """An :class:`~spectral_dp.features.Extractor` from coordinates in a public basis to the same with gains.

    Formal guarantee. The gains are computed from generated images, so they depend on no private record. Scaling a
    record, also to unit length, is a function of that record alone, and what a record gets from rounding errors of the
    projection stays as small as they are. So nothing is released, and nothing is charged.

    Attributes:
        spectrum: Where the spectrum of the basis is. Channels are scaled further, all alike, so that those of generated
            images have unit variance on average, as normalised channels have: a network reads them.
        power: ``p``. With 0 the coordinates are as they are, with 1/2 all directions vary alike under generated images.
        damp: Bounds the gains: directions that vary less than this share of the first one gain no more.
        unit: Whether each record is scaled to unit length at the end; much shorter ones stay shorter than one.
    """

    version: ClassVar[int] = 2

    spectrum: StoredSpectrum
    power: float = 0.5
    damp: float = 1e-3
    unit: bool = True

    def __post_init__(self) -> None:
        if not self.power >= 0 or not self.damp > 0:
            raise FeatureError(
                f"gains have a power of at least 0 and a positive damp, got power {self.power}, damp {self.damp}"
            )

    @property
    def name(self) -> str:
        """The name of this stage."""
        return "weighted"

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings, and the checksum of the spectrum: one that was computed again may differ by rounding."""
        own = {"power": self.power, "damp": self.damp, "unit": self.unit}
        return {**own, "spectrum": self.spectrum.checksum, "version": self.version}

    def output_shape(self, input_shape: Shape) -> Shape:
        """Returns the shape of the coordinates, which stays as it is."""
        if input_shape[0] > self.spectrum.rank:
            raise FeatureError(
                f"the spectrum has {self.spectrum.rank} directions, but there are {input_shape[0]} coordinates: use "
                "the spectrum that they were projected on"
            )
        return input_shape

    def _module(self, input_shape: Shape) -> nn.Module:
        return SpectralGains(self, input_shape)


class SpectralGains(nn.Module):
    """Coordinates times their gains: ``(B, k) -> (B, k)``, or ``(B, k, H, W) -> (B, k, H, W)``.

    It has no parameters, and nothing of it is in its ``state_dict``.
    """

    gains: Tensor

    def __init__(self, weighted: Weighted, shape: Shape) -> None:
        super().__init__()
        self._unit = weighted.unit
        spectrum = weighted.spectrum.load(shape[0])
        gains = spectrum.gains(weighted.power, weighted.damp).double()
        energies = gains.square() * spectrum.eigenvalues.double()  # of generated images, by coordinate
        if weighted.spectrum.channels:
            gains = gains / energies.mean().sqrt().clamp(min=1e-30)
            energies = energies / energies.mean()
        positions = math.prod(shape[1:])
        self._least = LEAST_SHARE * math.sqrt(float(energies.sum()) * positions)
        self.register_buffer("gains", gains.float().view(-1, *[1] * (len(shape) - 1)), persistent=False)

    def forward(self, coordinates: Tensor) -> Tensor:
        """Returns the coordinates with their gains, in float32."""
        z = coordinates.float() * self.gains
        return F.normalize(z.flatten(1), eps=self._least).view_as(z) if self._unit else z
