"""Private class means: the direction in which the features of each class lie, released once, and cosine scores.

x_b = (f_b - m) / |f_b - m|                  unit length, less a public centre m
S_k = sum of x_b over the records of class k
M   = S + N(0, σ² I)                         one vector (classes, n), of sensitivity 1
score of class k = <f - m, M_k> / |M_k|      its direction only, so no counts are needed
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spectral_dp.accounting import Ledger
from spectral_dp.heads.linear_head import LinearHead
from spectral_dp.heads.records import check_records, record_parts
from spectral_dp.mechanism.clipping import Clipped, clip_each
from spectral_dp.mechanism.noise import NoiseSource
from spectral_dp.mechanism.release import release_sum

#: Bound of what a record contributes: its features, in the row of its class. Fixed in advance.
BOUND = 1.0


def private_class_means(
    rows: Any,
    labels: Tensor,
    classes: int,
    *,
    noise_multiplier: float,
    ledger: Ledger,
    centre: Tensor | None = None,
    noise: NoiseSource | None = None,
) -> LinearHead:
    """Releases the sum of the features of every class as one Gaussian mechanism, and returns the head of their cosines.

    Formal guarantee:

    * What is bounded: a record contributes its features, less the centre and at unit length, in the row of its class,
      and zeros in the others. That is one vector, which is clipped to ``BOUND``, so the bound does not rest on how its
      length was rounded. The sum declares this bound as its sensitivity, and the noise is scaled by it.
    * For which neighbours: those of the ledger's relation. Replacing a record may change two rows, each by the bound.
    * What is charged: one step with this noise multiplier and sample rate 1, entered in the ledger before the release.
    * Under which assumptions: ``centre`` depends on no private record, features are a fixed function of one record
      each, every label is a class (others are refused, which tells that there is one), and ``classes`` is public. How
      many records a class has is not used and not released.

    Args:
        rows: The features ``(N, ...)``, read in parts: a tensor, a cache, or rows of one.
        labels: The classes ``(N,)``.
        classes: The number of classes.
        noise_multiplier: ``σ`` of the release. With 0 nothing is private, and a warning says so.
        ledger: The ledger that the release is charged to.
        centre: A public point to measure directions from, with as many numbers as a record has. None for zero.
        noise: The source of the noise. By default a new :class:`~spectral_dp.mechanism.noise.SecureNoise`.
    """
    check_records(rows, labels, classes, noise_multiplier, centre)
    parts = (class_sums(x, y, classes) for x, y in record_parts(rows, labels, centre))
    sums = release_sum(parts, noise_multiplier=noise_multiplier, ledger=ledger, noise=noise)
    return LinearHead.on_centred(torch.nn.functional.normalize(sums, dim=1), centre)


def class_sums(x: Tensor, labels: Tensor, classes: int) -> Clipped:
    """Returns the clipped sum of the records of every class: ``(n, d) -> (classes, d)``.

    A contribution has one row that is not zero, so its norm is that of the record, and only that row is ever formed.
    """
    clipped = clip_each(x, BOUND)
    sums = x.new_zeros(classes, x.shape[1]).index_add_(0, labels, clipped.value)
    return Clipped(sums, BOUND, clipped.nonfinite)
