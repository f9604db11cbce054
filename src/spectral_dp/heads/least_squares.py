"""Private least squares: the Gram matrix and the moments of projected features, released together, and a ridge.

    x_b = P^t (f_b - m) / |P^t (f_b - m)|        projected to d numbers by a public matrix P, at unit length
    z_b = (upper triangle of x_b x_b^t, with √2 off the diagonal;  w x_b in the row of its class)
    S   = sum_b z_b + N(0, σ² (1 + w²) I)        one vector: |z_b|² = |x_b|⁴ + w² |x_b|² <= 1 + w²
    W   = (G + λ I)^-1 M                         G, M from S; λ from the noise level alone

With √2 off the diagonal, the norm of the triangle is the Frobenius norm of the whole matrix, and all of the noise goes
into numbers that are used.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from spectral_dp.accounting import Ledger
from spectral_dp.heads.errors import HeadError
from spectral_dp.heads.linear_head import LinearHead
from spectral_dp.heads.records import check_records, record_parts
from spectral_dp.mechanism.clipping import Clipped, clip_each, row_norms
from spectral_dp.mechanism.noise import NoiseSource
from spectral_dp.mechanism.release import release_sum

#: Weight ``w`` of the moments against the Gram matrix in the vector that is released. Fixed in advance.
MOMENT_WEIGHT = 1.0

#: The most dimensions of a Gram matrix. Its noise grows with their root, and more are seldom worth it.
MOST_DIMENSIONS = 256

_RIDGE = 0.5  # in units of the largest eigenvalue that the noise of the Gram matrix has by itself
_LEAST_RIDGE = 1e-6  # for each record: where there is hardly any noise, the matrix must be invertible all the same


def joint_bound(moment_weight: float = MOMENT_WEIGHT) -> float:
    """Returns the norm that the contribution of a record of unit length has: ``√(1 + w²)``."""
    return math.sqrt(1 + moment_weight**2)


def private_least_squares(
    rows: Any,
    labels: Tensor,
    classes: int,
    *,
    noise_multiplier: float,
    records: int,
    ledger: Ledger,
    projection: Tensor | None = None,
    centre: Tensor | None = None,
    moment_weight: float = MOMENT_WEIGHT,
    noise: NoiseSource | None = None,
) -> LinearHead:
    """Releases Gram matrix and moments of the features as one Gaussian mechanism, and returns the head that they give.

    The head is the ridge regression of the one-hot classes on the features. Its ridge follows from the noise level, and
    negative eigenvalues of the noisy Gram matrix are set to zero. All of this is post-processing of the release.

    Formal guarantee:

    * What is bounded: a record contributes the Gram matrix of its features, and its features times ``moment_weight`` in
      the row of its class, as one vector. This vector is clipped to :func:`joint_bound`, which is the norm that it has
      for features of unit length. The sum declares this bound as its sensitivity, and the noise is scaled by it.
    * For which neighbours: those of the ledger's relation.
    * What is charged: one step with this noise multiplier and sample rate 1, entered in the ledger before the release.
    * Under which assumptions: ``projection`` and ``centre`` depend on no private record, features are a fixed function
      of one record each, every label is a class (others are refused, which tells that there is one), and ``records``
      and ``classes`` are public.

    Args:
        rows: The features ``(N, ...)``, read in parts: a tensor, a cache, or rows of one.
        labels: The classes ``(N,)``.
        classes: The number of classes.
        noise_multiplier: ``σ`` of the release. With 0 nothing is private, and a warning says so.
        records: The public number of records.
        ledger: The ledger that the release is charged to.
        projection: A public matrix ``(n, d)``; see :func:`~spectral_dp.heads.projection.random_projection`. None takes
            the features as they are, if they are few enough.
        centre: A public point that is subtracted from the features. None for zero.
        moment_weight: ``w``, a public number.
        noise: The source of the noise. By default a new :class:`~spectral_dp.mechanism.noise.SecureNoise`.
    """
    features = check_records(rows, labels, classes, noise_multiplier, centre)
    dimensions = features if projection is None else _dimensions(projection, features)
    if dimensions > MOST_DIMENSIONS:
        raise HeadError(
            f"least squares on {dimensions} features would release {dimensions * (dimensions + 1) // 2} noisy numbers: "
            f"project to {MOST_DIMENSIONS} dimensions or fewer, for instance by random_projection"
        )
    if not 1 <= records < math.inf or not 0 < moment_weight < math.inf:
        raise HeadError(f"records and moment_weight must be positive and finite, got {records}, {moment_weight}")
    parts = (gram_and_moments(x, y, classes, moment_weight) for x, y in record_parts(rows, labels, centre, projection))
    released = release_sum(parts, noise_multiplier=noise_multiplier, ledger=ledger, noise=noise)
    deviation = noise_multiplier * Clipped(released, joint_bound(moment_weight)).sensitivity(ledger.relation)
    gram, moments = unpacked(released / records, dimensions, moment_weight)
    weight = ridge_solution(gram, moments, ridge_of_noise(deviation / records, dimensions))
    return LinearHead.on_centred(weight if projection is None else weight @ projection.double().T, centre)


def _dimensions(projection: Tensor, features: int) -> int:
    """Returns how many numbers a projection leaves of so many features."""
    if projection.ndim != 2 or projection.shape[1] < 1 or not bool(projection.isfinite().all()):
        shape = tuple(projection.shape)
        raise HeadError(f"a projection is a finite matrix (features, dimensions), got {projection.dtype} of {shape}")
    if projection.shape[0] != features:
        raise HeadError(f"a projection of {projection.shape[0]} features does not fit records of {features}")
    return projection.shape[1]


def gram_and_moments(x: Tensor, labels: Tensor, classes: int, moment_weight: float = MOMENT_WEIGHT) -> Clipped:
    """Returns the clipped sum of what records contribute, as one vector: ``(n, d) -> (d (d + 1) / 2 + classes d,)``.

    No record's own vector is formed: its norm is ``√(|x|⁴ + w² |x|²)``, and the sum of clipped vectors is a matrix
    product.
    """
    lengths, bound = row_norms(x), joint_bound(moment_weight)
    norms = torch.hypot(lengths.square(), moment_weight * lengths)
    scaled = clip_each(x, bound, norms)  # every number of a contribution gets the factor of its record once
    gram = scaled.value.T @ x.where(norms.isfinite()[:, None], torch.zeros((), dtype=x.dtype))
    moments = x.new_zeros(classes, x.shape[1]).index_add_(0, labels, scaled.value)
    return Clipped(packed(gram, moments, moment_weight), bound, scaled.nonfinite)


def packed(gram: Tensor, moments: Tensor, moment_weight: float) -> Tensor:
    """Returns a symmetric matrix ``(d, d)`` and moments ``(classes, d)`` as the vector that is released."""
    row, column = torch.triu_indices(len(gram), len(gram))
    triangle = gram[row, column] * _triangle_weights(row, column, gram.dtype)
    return torch.cat([triangle, moment_weight * moments.flatten()])


def unpacked(vector: Tensor, dimensions: int, moment_weight: float) -> tuple[Tensor, Tensor]:
    """Returns the matrix and the moments of a vector: the inverse of :func:`packed`."""
    row, column = torch.triu_indices(dimensions, dimensions)
    triangle = vector[: len(row)] / _triangle_weights(row, column, vector.dtype)
    gram = vector.new_zeros(dimensions, dimensions)
    gram[row, column] = triangle
    gram[column, row] = triangle
    return gram, vector[len(row) :].view(-1, dimensions) / moment_weight


def _triangle_weights(row: Tensor, column: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(row == column, 1.0, 2.0).to(dtype).sqrt()


def ridge_of_noise(deviation: float, dimensions: int) -> float:
    """Returns the ridge for a Gram matrix whose diagonal has noise of this deviation: a public rule.

    Off the diagonal the noise has the deviation over √2. The largest eigenvalue of such a matrix is about
    ``deviation √(2 d)`` (Wigner's semicircle): what is smaller in the data cannot be told from noise.
    """
    return max(_RIDGE * deviation * math.sqrt(2 * dimensions), _LEAST_RIDGE)


def ridge_solution(gram: Tensor, moments: Tensor, ridge: float) -> Tensor:
    """Returns ``M (G + λ I)^-1``, ``(classes, d)``, with negative eigenvalues of ``G`` taken as zero."""
    eigenvalues, vectors = torch.linalg.eigh(gram)
    return (moments @ vectors) / (eigenvalues.clamp(min=0) + ridge) @ vectors.T
