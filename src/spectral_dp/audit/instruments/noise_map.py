"""The noise of a release, exactly: the linear map from the numbers that are drawn to the numbers that come out.

A release ``y = signal + N n`` is linear in its draws ``n ~ N(0, I)``, so ``Sigma = N N^t`` is the covariance of its
noise. :func:`~spectral_dp.audit.instruments.noise_search.find_noise_map` finds the map of a target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from spectral_dp.audit.targets.target import Output

#: Noise of less than this share of the largest deviation is rounding: no noise.
NO_NOISE = 1e-4


@dataclass(frozen=True, eq=False)
class Part:
    """Blocks of the release that get their noise from draws of their own.

    Attributes:
        start: Where they begin in the release.
        maps: ``(1, k, M)`` for all blocks alike, or ``(L, k, M)``: from ``M`` draws to the ``k`` numbers of a block.
        count: ``L``, the number of blocks.
        processes: Number of processes that draw shares of this noise, which are added.
    """

    start: int
    maps: Tensor
    count: int
    processes: int = 1

    @property
    def stop(self) -> int:
        """Where they end."""
        return self.start + self.count * self.maps.shape[1]

    @cached_property
    def eigen(self) -> tuple[Tensor, Tensor]:
        """Deviations ``(1 or L, k)`` and orthonormal axes ``(1 or L, k, k)`` of the noise of a block."""
        if self.maps.shape[1] == 1:
            return self.maps.norm(dim=2), torch.ones_like(self.maps[:, :, :1])
        values, axes = torch.linalg.eigh(self.maps @ self.maps.mT)
        return values.clamp(min=0).sqrt(), axes

    @cached_property
    def inverse(self) -> Tensor:
        """Pseudo-inverse of the maps, ``(1 or L, M, k)``: back from the noise of a block to its draws."""
        return torch.linalg.pinv(self.maps)

    @cached_property
    def tells_its_draws(self) -> bool:
        """Whether the noise of a block determines its draws. Shares that several processes add cannot be told apart.

        A single process has no reason to add draws, so its draws are asked for: where they were added, as real noise on
        complex coefficients is, they come out too small.
        """
        if self.processes == 1:
            return True
        columns = torch.eye(self.maps.shape[2], dtype=self.maps.dtype)
        return bool(torch.isclose(self.inverse @ self.maps, columns, atol=1e-6).all())

    @cached_property
    def merged(self) -> Part:
        """The same noise as one process would draw it, if all processes add equal shares; else this part.

        The draws are then those of the whole noise, in their order, so that layers that share some of them are found.
        """
        columns = self.maps.shape[2]
        if self.processes == 1 or columns % self.processes:
            return self
        shares = self.maps.unflatten(2, (self.processes, -1))
        if not torch.allclose(shares, shares[:, :, :1], rtol=0, atol=1e-6 * float(self.maps.abs().max())):
            return self
        return replace(self, maps=shares[:, :, 0] * math.sqrt(self.processes), processes=1)

    def along_axes(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Deviations of the noise and coordinates of ``y``, both ``(L, k)``, along the axes of the noise."""
        deviations, axes = self.eigen
        blocks = y[..., self.start : self.stop].unflatten(-1, (self.count, -1))
        return deviations.expand(self.count, -1), (blocks[..., None, :] @ axes).squeeze(-2)


@dataclass(frozen=True, eq=False)
class NoiseMap:
    """The noise of a release, in independent parts.

    Attributes:
        parts: In the order of the release.
        releases: How many releases it took to find them.
        structure: What was found, in words.
    """

    parts: tuple[Part, ...]
    releases: int
    structure: str

    @cached_property
    def largest(self) -> float:
        """The largest deviation in any direction."""
        return max((float(part.eigen[0].max()) for part in self.parts), default=0.0)

    def covariance(self, at: Tensor) -> Tensor:
        """Returns ``Sigma`` of the numbers of the release at these indices, ``(n, n)``."""
        sigma = torch.zeros(len(at), len(at)).double()
        for part in self.parts:
            mine = ((at >= part.start) & (at < part.stop)).nonzero().flatten()
            block = (at[mine] - part.start).div(part.maps.shape[1], rounding_mode="floor")
            row = (at[mine] - part.start) % part.maps.shape[1]
            rows = part.maps[block if len(part.maps) > 1 else torch.zeros_like(block), row]  # (n, M)
            sigma[mine[:, None], mine] = (rows @ rows.T) * (block[:, None] == block)
        return sigma

    def in_deviations(self, weights: Tensor, at: Tensor) -> Tensor:
        """Returns ``N^t w`` along the axes of the noise, for weights ``(m, n)`` of the numbers at these indices.

        The inner products of the rows are the covariances of the noise of ``w^t y``.
        """
        size = max(part.stop for part in self.parts)
        spread = weights.new_zeros(len(weights), size).index_copy_(1, at, weights)
        out = []
        for part in self.parts:
            deviations, along = part.along_axes(spread)
            out.append((along * deviations).flatten(1))
        return torch.cat(out, 1)

    def whiten(self, y: Tensor) -> Tensor:
        """Returns ``y`` in deviations of the noise, along its axes; zero where there is no noise. ``(d,)``."""
        out, floor = torch.zeros_like(y), NO_NOISE * self.largest
        for part in self.parts:
            deviations, along = part.along_axes(y)
            noised = deviations > floor
            scaled = torch.where(noised, along / deviations.where(noised, 1.0), 0.0)
            out[..., part.start : part.stop] = scaled.flatten(-2)
        return out

    def measure(self, shift: Tensor) -> tuple[float, float]:
        """Returns how far a shift of the release is in deviations of the noise, and how much of it meets no noise.

        The second is a length in units of the release. Where it is not zero the release gives the shift away, whatever
        the first says.
        """
        bare, floor = 0.0, NO_NOISE * self.largest
        for part in self.parts:
            deviations, y = part.along_axes(shift)
            bare += float(y[deviations <= floor].square().sum())
        return float(self.whiten(shift).norm()), math.sqrt(bare)


def standardise_noise(release: Tensor, noise: NoiseMap | None, outputs: list[Output]) -> list[Tensor]:
    """Returns the noise of every parameter as numbers that are standard normal if the claim holds.

    Args:
        release: A release of records that contribute nothing, ``(d,)``.
        noise: The noise map of the target. If None, every number is taken by itself.
        outputs: What the release consists of, with the deviations that are claimed.
    """
    if noise is None:
        sizes = [output.size for output in outputs]
        pieces = zip(release.split(sizes), outputs, strict=True)
        return [numbers / (output.noise_std or 1.0) for numbers, output in pieces]
    floor = NO_NOISE * noise.largest
    if len(noise.parts) == len(outputs):
        return [_undo(part, release, output, floor) for part, output in zip(noise.parts, outputs, strict=True)]
    deviations, along = noise.parts[0].along_axes(release)  # one map for everything: its scale is as measured
    return [(along / deviations)[deviations > floor]]


def _undo(part: Part, release: Tensor, output: Output, floor: float) -> Tensor:
    """What a part's noise was drawn from, in units of the claimed deviation."""
    part = part.merged
    lengths = part.maps.norm(dim=1)  # of every column, (1 or L, M)
    if part.maps.shape[1] == 1 and part.maps.shape[2] == 1:
        along, deviations = release[part.start : part.stop, None], lengths
    elif part.maps.shape[2] <= part.maps.shape[1] and bool((lengths > floor).all()) and part.tells_its_draws:
        blocks = release[part.start : part.stop].view(part.count, -1, 1)
        drawn = part.inverse @ blocks
        along, deviations = drawn.squeeze(2) * lengths, lengths
    else:
        deviations, along = part.along_axes(release)
    deviations = deviations.expand_as(along)
    kept = deviations > floor
    scale = deviations if output.noise_std is None else torch.full_like(deviations, output.noise_std)
    return (along / scale)[kept]
