"""Gains: the factors by which a filter multiplies each coordinate in one step, before the clip and after the noise."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Gains:
    """The gains of one step for coordinates of one shape.

    A coordinate is *kept* if both of its gains are positive. The others are dropped: they are not released, and no
    noise is drawn for them.

    Attributes:
        pre: The pre-gains ``a``, which are applied before clipping: float64 or boolean (a mask), with the shape of the
            coordinates.
        post: The post-gains ``b``, which are applied after the noise, in the same form.

    Raises:
        ValueError: If the two shapes differ, if a gain is negative or not finite, or if every coordinate is dropped.
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
        """Booleans: whether each coordinate is released."""
        return ((_stored(self.pre) > 0) & (_stored(self.post) > 0)).expand(self.pre.shape)

    @cached_property
    def counted(self) -> Tensor:
        """Booleans: whether each coordinate counts in the norm that is clipped."""
        return (_stored(self.pre) > 0).expand(self.pre.shape)

    @cached_property
    def index(self) -> Tensor:
        """The positions of the kept coordinates in the flattened spectrum, ``(M,)``."""
        return self.kept.flatten().nonzero().squeeze(-1)

    @property
    def effective_ratio(self) -> float:
        """The fraction of real degrees of freedom that is dropped: ``1 - K/N``."""
        return 1.0 - self.count / self.kept.numel()

    @property
    def noise_variance(self) -> float:
        """The noise variance of each output sample, as a fraction of ``σ² S²``.

        For a filter that only drops coordinates it is ``K/N`` (Proposition 1 and Corollary 1). The value is the mean
        over the samples. With the Fourier transform each sample has exactly this variance. With the other transforms
        the variance differs along the signal.
        """
        return float((self.post * self.kept).double().square().mean())

    def compress(self, z: Tensor) -> Tensor:
        """Returns the kept coordinates only: ``(..., *shape) -> (..., M)``."""
        flat = z.flatten(z.ndim - self.pre.ndim)
        if self._is_prefix:
            return flat[..., : self.count]
        return flat.index_select(-1, self.index.to(z.device))

    def expand(self, kept: Tensor) -> Tensor:
        """Returns all coordinates, with zeros where they were dropped: ``(..., M) -> (..., *shape)``."""
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
        """The number ``M`` of kept coordinates."""
        return self.kept.numel() if self.keeps_all else int(self.kept.sum())

    @cached_property
    def keeps_all(self) -> bool:
        """Whether no coordinate is dropped."""
        return bool(_stored(self.kept).all())

    @cached_property
    def is_identity(self) -> bool:
        """Whether every gain is one."""
        return bool((_stored(self.pre) == 1).all() and (_stored(self.post) == 1).all())

    @cached_property
    def kept_pre(self) -> Tensor | None:
        """The pre-gains of the kept coordinates, ``(M,)``, or None if all of them are one."""
        return None if self.is_identity else _unless_ones(self.compress(self.pre))

    @cached_property
    def kept_post(self) -> Tensor | None:
        """The post-gains of the kept coordinates, ``(M,)``, or None if all of them are one."""
        return None if self.is_identity else _unless_ones(self.compress(self.post))

    @cached_property
    def clips_dropped(self) -> bool:
        """Whether some dropped coordinates count in the clipped norm nevertheless (the order of the paper)."""
        return bool(((_stored(self.pre) > 0) & ~_stored(self.kept)).any())

    @cached_property
    def _is_prefix(self) -> bool:  # true for every 1-D low-pass; needs no indices
        return self.keeps_all or bool(self.kept.flatten()[: self.count].all())


def _unless_ones(gains: Tensor) -> Tensor | None:
    return None if bool((gains == 1).all()) else gains


def _stored(t: Tensor) -> Tensor:
    """Returns the elements that are stored in memory. For one number expanded to a shape, this is that number."""
    return t[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in t.stride())]


def value_range(t: Tensor) -> str:
    """Returns the smallest and the largest value as text, for error messages."""
    return f"values from {t.min().item():g} to {t.max().item():g}"
