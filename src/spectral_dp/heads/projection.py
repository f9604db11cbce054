"""Public projections of features to fewer numbers: they depend on no record, so they cost nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from spectral_dp.heads.errors import HeadError


def random_projection(features: int, dimensions: int, *, seed: int = 0) -> Tensor | None:
    """Returns a random matrix ``(features, dimensions)`` with orthonormal columns, in float64.

    Formal guarantee. No private record is read, so nothing is released and nothing is to be charged.

    Args:
        features: The number of features.
        dimensions: How many numbers to project to.
        seed: Seed of the generator.

    Returns:
        The matrix, or None if there are no more features than that, so that there is nothing to project.
    """
    if features < 1 or dimensions < 1:
        raise HeadError(f"a projection needs at least one feature and one dimension, got {features}, {dimensions}")
    if features <= dimensions:
        return None
    generator = torch.Generator().manual_seed(seed)
    q, r = torch.linalg.qr(torch.randn(features, dimensions, generator=generator, dtype=torch.float64))
    return q * r.diagonal().sign()  # then it is uniform among all such matrices
