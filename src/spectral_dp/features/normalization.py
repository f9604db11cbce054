"""Normalisation of feature channels by a mean and a standard deviation: public ones, or private ones that are released.

Medians or means of the training features are statistics of private records. Whoever normalises by them without noise,
and without charging them, leaks. Here they are either computed from generated images, which costs nothing, or released
once like a training step: clipped, summed, noised at the one place where noise is added, and charged to the ledger.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spectral_dp.accounting import Ledger
from spectral_dp.features.errors import FeatureError
from spectral_dp.features.extractor import Extractor, Shape
from spectral_dp.mechanism.clipping import clip_and_sum
from spectral_dp.mechanism.noise import NoiseSource
from spectral_dp.mechanism.release import release_sum
from spectral_dp.priors import generate_images

#: Bounds, in public units and for each root of a channel, of a record's mean and of its mean square. Fixed in advance.
MEAN_BOUND, SQUARE_BOUND = 1.0, 2.0

#: Bound of both together, each in units of its own bound.
JOINT_BOUND = math.sqrt(2)

_LEAST_STD = 0.05  # in public units: a channel that hardly varies is not blown up
_ROWS_AT_ONCE = 512


class ChannelStatistics(NamedTuple):
    """Mean and standard deviation of every channel, each ``(C,)``."""

    mean: Tensor
    std: Tensor


class ChannelNormalization(nn.Module):
    """Subtracts a mean and divides by a standard deviation, by channel: ``(B, C, H, W) -> (B, C, H, W)``.

    Both are buffers, so they are saved with the model. Until they are set, they are zero and one.

    Args:
        channels: Number of channels C.
        spectrum: Whether the input is cosine coefficients ``(B, C, M)`` of maps of so many positions, of which only the
            first has the mean. None for maps.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, channels: int, spectrum: int | None = None) -> None:
        super().__init__()
        self._spectrum = spectrum
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("std", torch.ones(channels))

    def set(self, statistics: ChannelStatistics) -> None:
        """Takes over statistics."""
        if statistics.mean.shape != self.mean.shape or not bool((statistics.std > 0).all()):
            raise FeatureError(
                f"expected {len(self.mean)} means and positive deviations, got {tuple(statistics.mean.shape)}"
            )
        self.mean.copy_(statistics.mean)
        self.std.copy_(statistics.std)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalised features."""
        channels = (-1, *[1] * (x.ndim - 2))
        mean, std = self.mean.view(channels), self.std.view(channels)
        if self._spectrum is None:
            return (x - mean).div_(std)
        # The cosine transform is orthonormal: a constant 1 has the coefficient sqrt(H W) at frequency zero.
        scaled = x / std
        scaled[..., :1] -= math.sqrt(self._spectrum) * mean / std
        return scaled


def public_channel_statistics(
    extractor: Extractor, input_shape: Shape, *, images: int = 256, seed: int = 0
) -> ChannelStatistics:
    """Returns the statistics of features of generated images, whose amplitudes fall as one over the frequency.

    Formal guarantee. No private record is read, so nothing is released and nothing is to be charged.

    Args:
        extractor: What computes the features, maps ``(C, H, W)`` or vectors ``(C,)``.
        input_shape: Shape ``(C, H, W)`` of an image.
        images: How many images to generate.
        seed: Seed of the images.
    """
    pixels = generate_images("one-over-f", images, input_shape, seed=seed)
    module = extractor.module(input_shape)
    with torch.no_grad():
        features = torch.cat([module(part) for part in pixels.split(16)]).double()
    std, mean = torch.std_mean(features, dim=[axis for axis in range(features.ndim) if axis != 1])
    return ChannelStatistics(mean.float(), std.clamp(min=1e-3 * float(std.max())).float())


def private_channel_statistics(
    rows: Any,
    public: ChannelStatistics,
    *,
    noise_multiplier: float,
    records: int,
    ledger: Ledger,
    noise: NoiseSource | None = None,
) -> ChannelStatistics:
    """Releases the mean and the standard deviation of every channel of private features, as one Gaussian mechanism.

    Formal guarantee:

    * What is bounded: in public units (less the public mean, over the public deviation) a record contributes its mean
      of every channel, over ``MEAN_BOUND √C``, and its mean square of every channel, over ``SQUARE_BOUND √C``. Both
      together are one vector, which is clipped to ``JOINT_BOUND``. That is what the sum declares as its sensitivity,
      and what the noise is scaled by.
    * For which neighbours: those of the ledger's relation.
    * What is charged: one step with this noise multiplier and sample rate 1, entered in the ledger before the release.
    * Under which assumptions: ``public`` depends on no private record, and ``records`` is public, as it is in training.

    Args:
        rows: The features ``(N, C, H, W)`` or ``(N, C)``, read in parts: a cache, or rows of one.
        public: Statistics that depend on no private record.
        noise_multiplier: ``σ`` of the release.
        records: The public number of records to divide by.
        ledger: The ledger that the release is charged to.
        noise: The source of the noise. By default a new :class:`~spectral_dp.mechanism.noise.SecureNoise`.
    """
    channels = len(public.mean)
    if len(rows.shape) not in (2, 4) or rows.shape[1] != channels:
        raise FeatureError(f"expected maps (N, {channels}, H, W) or vectors (N, {channels}), got {tuple(rows.shape)}")
    if records < 1 or not noise_multiplier > 0:
        raise FeatureError(
            f"private statistics need a positive noise_multiplier and number of records, got {noise_multiplier}, "
            f"{records}"
        )
    parts = (moments(rows[start : start + _ROWS_AT_ONCE], public) for start in range(0, len(rows), _ROWS_AT_ONCE))
    empty = torch.zeros(0, 2 * len(public.mean), dtype=torch.float64)
    total = release_moments(
        itertools.chain([empty], parts), noise_multiplier=noise_multiplier, ledger=ledger, noise=noise
    )
    root = math.sqrt(len(public.mean))
    mean, square = (total / records).view(2, -1) * torch.tensor([[MEAN_BOUND * root], [SQUARE_BOUND * root]]).double()
    deviation = (square - mean.square()).clamp(min=_LEAST_STD**2).sqrt()
    released_mean = public.mean.double() + public.std.double() * mean
    return ChannelStatistics(released_mean.float(), (public.std.double() * deviation).float())


def moments(rows: Tensor, public: ChannelStatistics) -> Tensor:
    """Returns what each record contributes, in units of the bounds: ``(n, C, [H, W]) -> (n, 2 C)`` in float64."""
    root = math.sqrt(len(public.mean))
    positions = rows.flatten(2) if rows.ndim > 2 else rows[..., None]
    x = (positions.double() - public.mean.view(-1, 1)) / public.std.view(-1, 1)
    return torch.cat([x.mean(2) / (MEAN_BOUND * root), x.square().mean(2) / (SQUARE_BOUND * root)], dim=1)


def release_moments(
    parts: Iterable[Tensor], *, noise_multiplier: float, ledger: Ledger, noise: NoiseSource | None = None
) -> Tensor:
    """Releases the sum of the records' :func:`moments`: clips each record, charges the ledger, adds noise once.

    Args:
        parts: The moments of some records each, ``(n, 2 C)``. There is at least one part, and it may be empty.
        noise_multiplier: ``σ`` of the release.
        ledger: The ledger that the release is charged to.
        noise: The source of the noise. By default a new :class:`~spectral_dp.mechanism.noise.SecureNoise`.

    Returns:
        The noisy sum, ``(2 C,)``.
    """
    clipped = (clip_and_sum(part, JOINT_BOUND) for part in parts)
    return release_sum(clipped, noise_multiplier=noise_multiplier, ledger=ledger, noise=noise)
