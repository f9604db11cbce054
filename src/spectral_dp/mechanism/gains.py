"""Gains: what a filter does to each spectral coordinate in one step, before the clip and after the noise."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Gains:
    """The gains of one step for coordinates of one shape.

    Attributes:
        pre: ``a``, applied before clipping; float64 or boolean (a mask), shape of the coordinates.
        post: ``b``, applied after the noise; the same.
    """

    pre: Tensor
    post: Tensor

    def __post_init__(self) -> None:
        if self.pre.shape != self.post.shape:
            raise ValueError(f"pre-gains {tuple(self.pre.shape)} and post-gains {tuple(self.post.shape)} differ")
        for name, gain in (("pre", _stored(self.pre)), ("post", _stored(self.post))):
            if not bool(torch.isfinite(gain).all()) or bool((gain < 0).any()):
                raise ValueError(f"{name}-gains must be finite and not negative, got {value_range(gain)}")
        if not bool(_stored(self.kept).any()):
            raise ValueError("these gains drop every coordinate: keep at least one, or freeze the parameter")

    @cached_property
    def kept(self) -> Tensor:
        """Which coordinates are released, as booleans."""
        return ((_stored(self.pre) > 0) & (_stored(self.post) > 0)).expand(self.pre.shape)

    @cached_property
    def counted(self) -> Tensor:
        """Which coordinates count in the clipped norm, as booleans."""
        return (_stored(self.pre) > 0).expand(self.pre.shape)

    @cached_property
    def index(self) -> Tensor:
        """Positions of the kept coordinates in the flattened spectrum, ``(M,)``."""
        return self.kept.flatten().nonzero().squeeze(-1)

    @property
    def effective_ratio(self) -> float:
        """The fraction of real degrees of freedom that is dropped: ``1 - K/N``."""
        return 1.0 - self.count / self.kept.numel()

    @property
    def noise_variance(self) -> float:
        """Noise variance left per output sample, as a fraction of ``σ² S²``.

        Proposition 1 and Corollary 1: ``K/N`` for a filter that only drops. The value is the mean over the samples;
        for Fourier each sample has exactly this variance, for the other transforms it varies along the signal.
        """
        return float((self.post * self.kept).double().square().mean())

    def compress(self, z: Tensor) -> Tensor:
        """Picks the kept coordinates: ``(..., *shape) -> (..., M)``."""
        flat = z.flatten(z.ndim - self.pre.ndim)
        if self._is_prefix:
            return flat[..., : self.count]
        return flat.index_select(-1, self.index.to(z.device))

    def expand(self, kept: Tensor) -> Tensor:
        """Puts kept coordinates back among zeros: ``(..., M) -> (..., *shape)``."""
        if not self.keeps_all:
            flat = kept.new_zeros(*kept.shape[:-1], self.kept.numel())
            if self._is_prefix:
                flat[..., : self.count] = kept
            else:
                flat.index_copy_(-1, self.index.to(kept.device), kept)
            kept = flat
        return kept.unflatten(-1, self.pre.shape)

    @cached_property
    def count(self) -> int:
        """``M``, the number of kept coordinates."""
        return self.kept.numel() if self.keeps_all else int(self.kept.sum())

    @cached_property
    def keeps_all(self) -> bool:
        """Whether nothing is dropped."""
        return bool(_stored(self.kept).all())

    @cached_property
    def is_identity(self) -> bool:
        """Whether every gain is one."""
        return bool((_stored(self.pre) == 1).all() and (_stored(self.post) == 1).all())

    @cached_property
    def kept_pre(self) -> Tensor | None:
        """Pre-gains of the kept coordinates, ``(M,)``; None where all are one."""
        return None if self.is_identity else _unless_ones(self.compress(self.pre))

    @cached_property
    def kept_post(self) -> Tensor | None:
        """Post-gains of the kept coordinates, ``(M,)``; None where all are one."""
        return None if self.is_identity else _unless_ones(self.compress(self.post))

    @cached_property
    def clips_dropped(self) -> bool:
        """Whether coordinates that are not released count in the clipped norm all the same (the paper's order)."""
        return bool(((_stored(self.pre) > 0) & ~_stored(self.kept)).any())

    @cached_property
    def _is_prefix(self) -> bool:  # as of every low-pass in one dimension; spares the indices
        return self.keeps_all or bool(self.kept.flatten()[: self.count].all())


def _unless_ones(gains: Tensor) -> Tensor | None:
    return None if bool((gains == 1).all()) else gains


def _stored(t: Tensor) -> Tensor:
    """The elements in memory: of a number expanded to a shape, that number."""
    return t[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in t.stride())]


def value_range(t: Tensor) -> str:
    """Smallest and largest value, for messages."""
    return f"values from {t.min().item():g} to {t.max().item():g}"
