"""Clipping: it bounds the contribution of one record, and the clipped value declares its own sensitivity.

The noise is scaled by the sensitivity that the clipped value declares, so no bound is passed a second time.

A model has several blocks (layers). :class:`FlatClipping`, :class:`PerLayerClipping` and :class:`AutomaticClipping`
define how the blocks are clipped together, and by which bound the noise of each block is scaled.

Edge cases:

==================================================  ==================================================================
contribution or bound                               result
==================================================  ==================================================================
zero                                                zero
NaN, infinite, or a norm that overflows             zero, with a :class:`NonFiniteWarning`, counted in ``nonfinite``
squares that underflow to zero                      the norm is rounded up by what they can hide, so the bound holds
empty batch                                         the sum is zero
half precision                                      clipped in float32, and returned as float32
``C`` infinite                                      nothing is clipped; ``add_noise`` then refuses to add noise
``C`` zero, negative or NaN                         ``ValueError``
==================================================  ==================================================================
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

#: Contributions are clipped to this much (relatively) below the bound, so that rounding does not exceed the bound.
ROUNDING_GUARD = 1e-5

_PIECE = 512  # number of squares that are added in the precision of the input, before float64 is used


class NonFiniteWarning(RuntimeWarning):
    """Warns that some contributions were NaN or infinite and were replaced by zero."""


@dataclass(frozen=True, eq=False)
class Clipped:
    """A value to which each record contributes a vector of norm at most ``max_norm``.

    Attributes:
        value: The clipped query, or a sum of clipped contributions.
        max_norm: The bound ``C`` on the norm of every single contribution to ``value``.
        nonfinite: Number of contributions that were NaN or infinite and count as zero. This diagnostic is computed
            from raw data. It is not covered by the privacy guarantee and must not be published.
    """

    value: Tensor
    max_norm: float
    nonfinite: int = 0

    def sensitivity(self, relation: Relation = Relation.ADD_OR_REMOVE_ONE) -> float:
        """Returns the largest distance between the values of two neighbouring data sets.

        Formal guarantee:

        - What is bounded: the Euclidean distance between the values. Both bounds are attained.
        - For which neighbours: adding or removing a record moves ``value`` by at most ``C``. Replacing a record moves
          it by at most ``2 C`` (triangle inequality).
        - Under which assumption: ``value`` is a sum of one contribution per record, each of norm at most ``C``.
        """
        return self.max_norm if Relation(relation) is Relation.ADD_OR_REMOVE_ONE else 2 * self.max_norm


def clip_factors(norms: Tensor, max_norm: float) -> Tensor:
    """Returns ``min(1, C / norm)`` for each norm, and zero where the norm is not finite.

    Formal guarantee. ``factor * norm <= max_norm``, with a margin for the rounding of the norm and of the product.

    The factor is zero for a contribution whose norm overflows or is NaN. The caller must replace such a contribution
    by zero rather than multiply it, because ``0 * inf`` is NaN.
    """
    _check_bound(max_norm)
    if math.isinf(max_norm):  # no clipping and no privacy, for comparisons with plain training
        factors = torch.ones_like(norms)
    else:
        factors = (max_norm / (norms * (1 + ROUNDING_GUARD))).clamp(max=1)
    return factors.where(norms.isfinite(), torch.zeros_like(norms))


def clip_each(z: Tensor, max_norm: float, norms: Tensor | None = None) -> Clipped:
    """Clips each of a batch of independent queries ``z[b]`` to norm ``max_norm``: ``(B, ...) -> (B, ...)``.

    The declared sensitivity is that of *one* query. If a record contributes to several queries, they compose.

    Args:
        z: The contributions, one for each query. Half precision is returned as float32.
        max_norm: The clipping bound ``C``.
        norms: The norms ``(B,)`` to clip by, each at least ``||z[b]||``. Give them if more than ``z`` counts, such as
            coordinates that were dropped. The default is the norm of each ``z[b]``.

    Returns:
        The clipped contributions. Those that were not finite are zero.
    """
    z = z.to(torch.promote_types(z.dtype, torch.float32))  # half precision rounds by more than the guard
    norms = row_norms(z) if norms is None else norms
    factors = clip_factors(norms, max_norm)
    finite = norms.isfinite()
    nonfinite = int(finite.numel() - finite.sum())
    if nonfinite:
        z = z.where(_per_sample(finite, z), torch.zeros((), dtype=z.dtype, device=z.device))
        # No numbers here: the number of records may be private (perturb_sum), and warnings end up in log files.
        warnings.warn(
            f"some contributions are NaN, infinite or too long for {z.dtype} and count as zero: check the data and the "
            "loss for overflow (how many is in Clipped.nonfinite)",
            NonFiniteWarning,
            stacklevel=3,
        )
    return Clipped(z * _per_sample(factors.to(z.dtype), z), max_norm, nonfinite)


def clip_and_sum(z: Tensor, max_norm: float, norms: Tensor | None = None) -> Clipped:
    """Clips the contribution ``z[b]`` of each sample to norm ``max_norm`` and sums them: ``(B, ...) -> (...)``.

    The arguments are those of :func:`clip_each`. ``B`` may be 0, and then the sum is zero.
    """
    clipped = clip_each(z, max_norm, norms)
    return Clipped(clipped.value.sum(0), max_norm, clipped.nonfinite)


class Clipping(ABC):
    """A policy that defines how the blocks of a model are clipped together."""

    @abstractmethod
    def factors(self, squared_norms: Tensor) -> Tensor:
        """Returns the factor of each sample in each block.

        Args:
            squared_norms: Squared norm of each sample's gradient in each block, ``(L, B)``.

        Returns:
            The factors, ``(L, B)``. They are zero in every block for a sample that is not finite in one block.
        """

    @abstractmethod
    def noise_bounds(self, sizes: Sequence[int]) -> list[float]:
        """Returns ``bound_l``, the ``max_norm`` that the :class:`Clipped` sum of each block ``l`` declares.

        Formal guarantee:

        - What is bounded: releasing the clipped sums of all blocks, with noise of standard deviation ``σ * bound_l`` on
          block ``l``, is one Gaussian mechanism with noise multiplier ``σ``.
        - For which neighbours: add or remove one. With twice the noise, replace one.
        - Proof: one record moves block ``l`` by at most ``C_l``, and ``sum_l C_l² / (σ bound_l)² <= 1 / σ²``. Where
          one bound ``C`` holds for all blocks together, ``sum_l (shift_l / (σ C))² <= 1 / σ²``.

        Args:
            sizes: The number of coordinates of each block.
        """


@dataclass(frozen=True)
class FlatClipping(Clipping):
    """Clipping of the whole gradient of a sample, over all blocks together, to one bound.

    Attributes:
        max_norm: The clipping bound ``C``.
    """

    max_norm: float

    def __post_init__(self) -> None:
        _check_bound(self.max_norm)

    def factors(self, squared_norms: Tensor) -> Tensor:
        """Returns ``min(1, C / ||g_b||)``, which is the same in every block."""
        return clip_factors(squared_norms.sum(0).sqrt(), self.max_norm).expand_as(squared_norms)

    def noise_bounds(self, sizes: Sequence[int]) -> list[float]:
        """Returns ``C`` for every block."""
        return [self.max_norm] * len(sizes)


@dataclass(frozen=True)
class AutomaticClipping(FlatClipping):
    """Scaling of every gradient, also of short ones, to a norm just below ``C`` (Bu et al. 2023).

    Only the learning rate is left to tune.

    Attributes:
        max_norm: The bound ``C`` on the norm of a scaled gradient.
        stability: The constant ``γ`` in ``C / (||g_b|| + γ)``. It keeps gradients close to zero small.
    """

    stability: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.stability > 0:
            raise ValueError(f"stability must be positive, got {self.stability}")

    def factors(self, squared_norms: Tensor) -> Tensor:
        """Returns ``C / (||g_b|| + γ)``, and zero where the norm is not finite."""
        norms = squared_norms.sum(0).sqrt()
        factors = self.max_norm / (norms * (1 + ROUNDING_GUARD) + self.stability)
        return factors.where(norms.isfinite(), torch.zeros_like(norms)).expand_as(squared_norms)


@dataclass(frozen=True)
class PerLayerClipping(Clipping):
    """Clipping of each block ``l`` to a bound ``C_l`` of its own (Algorithm 4).

    Attributes:
        max_norms: The bounds ``C_l`` of the blocks, in their order. Or one number ``C``, which is shared equally so
            that ``sum C_l² = C²``.
        allocation: How the noise is shared between blocks. ``"uniform"`` adds noise of standard deviation ``σ C``, with
            ``C² = sum C_l²``, to every coordinate (as in the paper). ``"optimal"`` minimises the total noise: for a
            block of ``d_l`` coordinates, ``bound_l² = C_l / √d_l * sum_k C_k √d_k``.
    """

    max_norms: float | tuple[float, ...]
    allocation: Literal["uniform", "optimal"] = "uniform"

    def __post_init__(self) -> None:
        for bound in (self.max_norms,) if isinstance(self.max_norms, int | float) else self.max_norms:
            _check_bound(bound)
        if self.allocation not in ("uniform", "optimal"):
            raise ValueError(f"unknown noise allocation {self.allocation!r}: choose 'uniform' or 'optimal'")

    def factors(self, squared_norms: Tensor) -> Tensor:
        """Returns ``min(1, C_l / ||g_bl||)``, and zero in every block for a sample that is not finite in one block."""
        bounds = self._bounds(len(squared_norms))
        rows = [clip_factors(row.sqrt(), bound) for row, bound in zip(squared_norms, bounds, strict=True)]
        finite = squared_norms.isfinite().all(0)
        return torch.stack(rows) * finite if rows else squared_norms

    def noise_bounds(self, sizes: Sequence[int]) -> list[float]:
        """Returns ``C`` for every block, or the bounds of the optimal allocation."""
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
    """Returns the clipping policy with this name and these bounds.

    Args:
        clipping: ``"flat"``, ``"per_layer"`` or ``"automatic"``. A :class:`Clipping` is returned unchanged.
        max_grad_norm: The clipping bound. With ``"per_layer"`` it may be a sequence with one bound for each block.
        allocation: How per-layer clipping shares the noise between blocks (see :class:`PerLayerClipping`).

    Raises:
        ValueError: If the name is unknown, or if a sequence of bounds is given without ``"per_layer"``.
    """
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
    """Returns the norm of each ``z[b]``, as ``(B,)`` in float64, rounded to the private side.

    - The squares are added in pieces of 512, and the pieces in float64. Torch adds squares one after the other, some
      sums side by side. In a float32 sum of ten thousand, a hostile record (all of whose squares are rounded down)
      would lose more than the rounding guard. In a sum of 512 it cannot.
    - Numbers that do not lie side by side are copied first: of those torch makes a single sum, and 512 are too many.
    - The norm is rounded up by what underflow can hide, so that the bound also holds for very short contributions.
    """
    z = (z[:, None] if z.ndim == 1 else z.flatten(1)).contiguous()
    whole = z.shape[1] // _PIECE * _PIECE
    norms = torch.linalg.vector_norm(z[:, whole:] if whole else z, dim=1)
    if whole:
        pieces = torch.linalg.vector_norm(z[:, :whole].view(z.shape[0], whole // _PIECE, _PIECE), dim=2)
        norms = torch.linalg.vector_norm(torch.cat([pieces, norms[:, None]], dim=1).double(), dim=1)
    return norms.double() + underflow(z.shape[1], z.dtype)


def underflow(numbers: int, dtype: torch.dtype) -> float:
    """Returns the largest norm of a vector of so many numbers whose squares all underflow to zero."""
    return math.sqrt(numbers * torch.finfo(dtype).tiny)


def _per_sample(v: Tensor, like: Tensor) -> Tensor:
    return v.view(-1, *[1] * (like.ndim - 1))


def _check_bound(max_norm: float) -> None:
    if not max_norm > 0:
        raise ValueError(f"the clipping bound must be positive, got {max_norm}")
