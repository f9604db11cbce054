"""Clipping: bound what one record can contribute, and remember the bound.

A clipped value knows its own sensitivity. Noise is scaled by asking it, so no bound is ever passed a second time.

A model has several blocks (layers). :class:`FlatClipping`, :class:`PerLayerClipping` and :class:`AutomaticClipping`
say how they are clipped together, and with which bound each block's noise is scaled.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from spectral_dp.relations import Relation

ClippingName = Literal["flat", "per_layer", "automatic"]

#: Clipping aims this far (relatively) below the bound, so that rounding cannot push a contribution above it.
ROUNDING_GUARD = 1e-5

_PIECE = 512  # squares that are added up in the precision of the numbers


class NonFiniteWarning(RuntimeWarning):
    """Some contributions were NaN or infinite and have been replaced by zero."""


@dataclass(frozen=True, eq=False)
class Clipped:
    """What one record can move by at most ``max_norm``.

    Attributes:
        value: The clipped query, or a sum of clipped contributions.
        max_norm: ``C``: no single contribution to ``value`` is longer.
        nonfinite: How many contributions were NaN or infinite, and count as zero. A diagnostic computed from raw
            data: outside the privacy guarantee, not to be published.
    """

    value: Tensor
    max_norm: float
    nonfinite: int = 0

    def sensitivity(self, relation: Relation = Relation.ADD_OR_REMOVE_ONE) -> float:
        """Returns the largest distance between the values of two neighbouring data sets.

        Formal guarantee. ``value`` is a sum of one contribution per record, each of norm at most ``C``. Adding or
        removing a record moves it by at most ``C``; replacing one by at most ``2 C`` (triangle inequality). Both are
        attained.
        """
        return self.max_norm if Relation(relation) is Relation.ADD_OR_REMOVE_ONE else 2 * self.max_norm


def clip_factors(norms: Tensor, max_norm: float) -> Tensor:
    """Returns ``min(1, C / norm)`` for each norm, and zero where the norm is not finite.

    Formal guarantee. ``factor * norm <= max_norm``, with room for the rounding of the norm and of the product.
    A contribution whose norm overflows or is NaN gets zero; the caller must not multiply it (``0 * inf`` is NaN)
    but replace it.
    """
    _check_bound(max_norm)
    if math.isinf(max_norm):  # no clipping, hence no privacy: for comparisons with plain training
        factors = torch.ones_like(norms)
    else:
        factors = (max_norm / (norms * (1 + ROUNDING_GUARD))).clamp(max=1)
    return factors.where(norms.isfinite(), torch.zeros_like(norms))


def clip_each(z: Tensor, max_norm: float, norms: Tensor | None = None) -> Clipped:
    """Clips each ``z[b]`` to norm ``max_norm``: a batch of independent queries, ``(B, ...) -> (B, ...)``.

    The sensitivity is that of *one* of them. A record that takes part in several composes them.

    Args:
        z: The contributions. Half precision comes back as float32.
        max_norm: ``C``.
        norms: ``(B,)``, where more counts than ``z`` shows (coordinates that will be dropped): at least ``||z[b]||``.
    """
    z = z.to(torch.promote_types(z.dtype, torch.float32))  # half precision rounds by more than the guard allows for
    norms = row_norms(z) if norms is None else norms
    factors = clip_factors(norms, max_norm)
    finite = norms.isfinite()
    nonfinite = int(finite.numel() - finite.sum())
    if nonfinite:
        z = z.where(_per_sample(finite, z), torch.zeros((), dtype=z.dtype, device=z.device))
        # Without numbers: how many records there are may be private (perturb_sum), and warnings end up in log files.
        warnings.warn(
            f"some contributions are NaN, infinite or too long for {z.dtype} and count as zero: check the data and the "
            "loss for overflow (how many is in Clipped.nonfinite)",
            NonFiniteWarning,
            stacklevel=3,
        )
    return Clipped(z * _per_sample(factors.to(z.dtype), z), max_norm, nonfinite)


def clip_and_sum(z: Tensor, max_norm: float, norms: Tensor | None = None) -> Clipped:
    """Clips each sample's ``z[b]`` to norm ``max_norm`` and sums: ``(B, ...) -> (...)``. ``B`` may be 0."""
    clipped = clip_each(z, max_norm, norms)
    return Clipped(clipped.value.sum(0), max_norm, clipped.nonfinite)


class Clipping(ABC):
    """How the blocks of a model are clipped together."""

    @abstractmethod
    def factors(self, squared_norms: Tensor) -> Tensor:
        """Returns what each sample is multiplied by in each block, ``(L, B)``, given the squared norms ``(L, B)``."""

    @abstractmethod
    def noise_bounds(self, sizes: Sequence[int]) -> list[float]:
        """Returns, for blocks of these numbers of coordinates, the ``max_norm`` of each block's :class:`Clipped`.

        Formal guarantee. With noise of deviation ``σ * bound_l`` on the clipped sum of every block ``l``, releasing all
        blocks is one Gaussian mechanism with noise multiplier ``σ`` (add or remove one; with twice the noise, replace
        one): one record moves block ``l`` by at most ``C_l``, and ``sum_l C_l² / (σ bound_l)² <= 1 / σ²``; or, where
        one bound ``C`` holds for all blocks together, ``sum_l (shift_l / (σ C))² <= 1 / σ²``.
        """


@dataclass(frozen=True)
class FlatClipping(Clipping):
    """One bound ``C`` for the gradient of a sample over all blocks together."""

    max_norm: float

    def __post_init__(self) -> None:
        _check_bound(self.max_norm)

    def factors(self, squared_norms: Tensor) -> Tensor:
        """``min(1, C / ||g_b||)``, the same in every block."""
        return clip_factors(squared_norms.sum(0).sqrt(), self.max_norm).expand_as(squared_norms)

    def noise_bounds(self, sizes: Sequence[int]) -> list[float]:
        """``C`` for every block."""
        return [self.max_norm] * len(sizes)


@dataclass(frozen=True)
class AutomaticClipping(FlatClipping):
    """Every gradient is scaled to just below ``C``, short ones too (Bu et al. 2023): nothing to tune but the step size.

    Attributes:
        max_norm: ``C``.
        stability: ``γ`` of ``C / (||g_b|| + γ)``, which keeps gradients near zero from being blown up.
    """

    stability: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.stability > 0:
            raise ValueError(f"stability must be positive, got {self.stability}")

    def factors(self, squared_norms: Tensor) -> Tensor:
        """``C / (||g_b|| + γ)``; zero where the norm is not finite."""
        norms = squared_norms.sum(0).sqrt()
        factors = self.max_norm / (norms * (1 + ROUNDING_GUARD) + self.stability)
        return factors.where(norms.isfinite(), torch.zeros_like(norms)).expand_as(squared_norms)


@dataclass(frozen=True)
class PerLayerClipping(Clipping):
    """A bound ``C_l`` for each block (Algorithm 4).

    Attributes:
        max_norms: ``C_l`` of each block in turn; or one number ``C``, shared equally so that ``sum C_l² = C²``.
        allocation: ``"uniform"`` noise of deviation ``σ C``, ``C² = sum C_l²``, on every coordinate (the paper); or the
            ``"optimal"`` one, which gives a block of ``d_l`` coordinates the share that minimises the total noise,
            ``bound_l² = C_l / √d_l * sum_k C_k √d_k``.
    """

    max_norms: float | tuple[float, ...]
    allocation: Literal["uniform", "optimal"] = "uniform"

    def __post_init__(self) -> None:
        for bound in (self.max_norms,) if isinstance(self.max_norms, int | float) else self.max_norms:
            _check_bound(bound)
        if self.allocation not in ("uniform", "optimal"):
            raise ValueError(f"unknown noise allocation {self.allocation!r}: choose 'uniform' or 'optimal'")

    def factors(self, squared_norms: Tensor) -> Tensor:
        """``min(1, C_l / ||g_bl||)``; zero in every block for a sample that is not finite in one."""
        bounds = self._bounds(len(squared_norms))
        rows = [clip_factors(row.sqrt(), bound) for row, bound in zip(squared_norms, bounds, strict=True)]
        finite = squared_norms.isfinite().all(0)
        return torch.stack(rows) * finite if rows else squared_norms

    def noise_bounds(self, sizes: Sequence[int]) -> list[float]:
        """One number for all blocks, or the optimal ones."""
        bounds = self._bounds(len(sizes))
        if self.allocation == "uniform":
            return [math.hypot(*bounds)] * len(sizes)
        weighted = sum(bound * math.sqrt(size) for bound, size in zip(bounds, sizes, strict=True))
        return [math.sqrt(bound / math.sqrt(size) * weighted) for bound, size in zip(bounds, sizes, strict=True)]

    def _bounds(self, blocks: int) -> tuple[float, ...]:
        if isinstance(self.max_norms, int | float):
            return (self.max_norms / math.sqrt(blocks),) * blocks if blocks else ()
        if len(self.max_norms) != blocks:
            raise ValueError(
                f"got {len(self.max_norms)} clipping bounds for {blocks} blocks: give one for each, or one number"
            )
        return self.max_norms


def clipping_policy(
    clipping: ClippingName | Clipping,
    max_grad_norm: float | Sequence[float],
    allocation: Literal["uniform", "optimal"] = "uniform",
) -> Clipping:
    """Returns the clipping of that name with these bounds; an object that already is one is returned as it is."""
    if isinstance(clipping, Clipping):
        return clipping
    bounds = max_grad_norm if isinstance(max_grad_norm, int | float) else tuple(max_grad_norm)
    if clipping == "per_layer":
        return PerLayerClipping(bounds, allocation)
    if isinstance(bounds, tuple):
        raise ValueError(f"a list of clipping bounds needs clipping='per_layer', got clipping={clipping!r}")
    if clipping == "flat":
        return FlatClipping(bounds)
    if clipping == "automatic":
        return AutomaticClipping(bounds)
    raise ValueError(f"unknown clipping {clipping!r}: choose 'flat', 'per_layer' or 'automatic'")


def row_norms(z: Tensor) -> Tensor:
    """Returns the norm of each ``z[b]``, ``(B,)`` in float64.

    In pieces: torch adds up squares one after the other, and a record made for it (all its squares rounded down) would
    lose more than the rounding guard in a float32 sum of ten thousand. Of 512 it cannot; those are added up in float64.
    Rounded up by what underflow can hide, so that the bound holds for the shortest of contributions too.
    """
    z = z[:, None] if z.ndim == 1 else z.flatten(1)
    whole = z.shape[1] // _PIECE * _PIECE
    pieces = torch.linalg.vector_norm(z[:, :whole].unflatten(1, (-1, _PIECE)), dim=2) if whole else z[:, :0]
    rest = torch.linalg.vector_norm(z[:, whole:], dim=1, keepdim=True)
    return torch.linalg.vector_norm(torch.cat([pieces, rest], dim=1).double(), dim=1) + underflow(z.shape[1], z.dtype)


def underflow(numbers: int, dtype: torch.dtype) -> float:
    """Returns how long a vector of so many numbers can be though all their squares underflow to zero."""
    return math.sqrt(numbers * torch.finfo(dtype).tiny)


def _per_sample(v: Tensor, like: Tensor) -> Tensor:
    return v.view(-1, *[1] * (like.ndim - 1))


def _check_bound(max_norm: float) -> None:
    if not max_norm > 0:
        raise ValueError(f"the clipping bound must be positive, got {max_norm}")
