"""Clipping: bound what one record can contribute, and remember the bound.

A clipped value knows its own sensitivity. Noise is scaled by asking it, so no bound is ever passed a second time.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from spectral_dp.relations import Relation

#: Clipping aims this far (relatively) below the bound, so that rounding cannot push a contribution above it.
ROUNDING_GUARD = 1e-5


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
    if not max_norm > 0:
        raise ValueError(f"the clipping bound must be positive, got {max_norm}")
    if math.isinf(max_norm):  # no clipping, hence no privacy: for comparisons with plain training
        factors = torch.ones_like(norms)
    else:
        factors = (max_norm / (norms * (1 + ROUNDING_GUARD))).clamp(max=1)
    return factors.where(norms.isfinite(), torch.zeros_like(norms))


def clip_each(z: Tensor, max_norm: float, norms: Tensor | None = None) -> Clipped:
    """Clips each ``z[b]`` to norm ``max_norm``: a batch of independent queries, ``(B, ...) -> (B, ...)``.

    The sensitivity is that of *one* of them. A record that takes part in several composes them.

    Args:
        z: The contributions.
        max_norm: ``C``.
        norms: ``(B,)``, where more counts than ``z`` shows (coordinates that will be dropped): at least ``||z[b]||``.
    """
    norms = row_norms(z) if norms is None else norms
    factors = clip_factors(norms, max_norm)
    finite = norms.isfinite()
    nonfinite = int(finite.numel() - finite.sum())
    if nonfinite:
        z = z.where(_per_sample(finite, z), torch.zeros((), dtype=z.dtype, device=z.device))
        warnings.warn(
            f"{nonfinite} of {finite.numel()} contributions are NaN, infinite or too long for {z.dtype} and count as "
            "zero: check the data and the loss for overflow",
            NonFiniteWarning,
            stacklevel=3,
        )
    return Clipped(z * _per_sample(factors.to(z.dtype), z), max_norm, nonfinite)


def clip_and_sum(z: Tensor, max_norm: float, norms: Tensor | None = None) -> Clipped:
    """Clips each sample's ``z[b]`` to norm ``max_norm`` and sums: ``(B, ...) -> (...)``. ``B`` may be 0."""
    clipped = clip_each(z, max_norm, norms)
    return Clipped(clipped.value.sum(0), max_norm, clipped.nonfinite)


def row_norms(z: Tensor) -> Tensor:
    """Returns the norm of each ``z[b]``, ``(B,)`` in float64.

    In pieces: float32 sums of a million squares are off by more than the rounding guard, sums of a few thousand are
    not, and adding those up in float64 costs nothing.
    """
    pieces = [torch.linalg.vector_norm(piece, dim=1).double() for piece in z.flatten(1).split(1 << 15, dim=1)]
    return torch.linalg.vector_norm(torch.stack(pieces), dim=0)


def _per_sample(v: Tensor, like: Tensor) -> Tensor:
    return v.view(-1, *[1] * (like.ndim - 1))
