"""Records in the form in which they contribute to a one-shot head: centred, projected, of unit length."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from spectral_dp.heads.errors import HeadError

#: The least share of a record that is scaled to unit length, if a projection leaves less of it.
LEAST_SHARE = 1e-3

_ROWS_AT_ONCE = 2048


def unit_rows(rows: Tensor, centre: Tensor | None = None, projection: Tensor | None = None) -> Tensor:
    """Returns each record's features, less the centre, projected, at unit length: ``(n, ...) -> (n, d)`` in float64.

    A record of zeros stays zero. A matrix product may round a row in another way if other rows stand beside it, so
    that one record more could move all the others. Two things keep this far below the guard of a clip:

    - It is computed in float64. In float32 the records of a large data set could move together by more than the guard.
    - A record of which the projection leaves less than ``LEAST_SHARE`` is divided as if it left that much, so it stays
      shorter than one. Of a record that is orthogonal to the projection only rounding errors are left, and at unit
      length these would be a direction that depends on the other records alone.
    """
    x = rows.flatten(1).double()
    if centre is not None:
        x = x - centre.double().flatten()
    norms = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    if projection is not None:
        p = projection.double()
        scale = torch.linalg.matrix_norm(p) / math.sqrt(p.shape[1])  # 1 for orthonormal columns
        least = LEAST_SHARE * scale * norms
        x = x @ p
        norms = torch.linalg.vector_norm(x, dim=1, keepdim=True).maximum(least)
    return x / norms.where(norms > 0, torch.ones_like(norms))


def record_parts(
    rows: Any, labels: Tensor, centre: Tensor | None = None, projection: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields :func:`unit_rows` and labels of some records at a time; the first part has none, and gives the shape."""
    starts = range(0, len(labels), _ROWS_AT_ONCE)
    for part in (slice(0, 0), *(slice(start, start + _ROWS_AT_ONCE) for start in starts)):
        yield unit_rows(rows[part], centre, projection), labels[part]


def check_records(
    rows: Any, labels: Tensor, classes: int, noise_multiplier: float, centre: Tensor | None = None
) -> int:
    """Returns the number of features of a record, if a head can be made of such records.

    What would fail later is found here, because then the release would have been charged already.

    Raises:
        HeadError: If the numbers of records and labels differ, a label is no class, or the centre is no point among the
            features.
    """
    if len(rows) != len(labels):
        raise HeadError(f"every record has one label, got {len(rows)} records and {len(labels)} labels")
    if labels.ndim != 1 or labels.dtype not in (torch.int64, torch.int32):
        kind = f"{labels.dtype} of shape {tuple(labels.shape)}"
        raise HeadError(f"labels are whole numbers, one for each record, got {kind}: use labels.flatten().long()")
    if classes < 2:
        raise HeadError(f"a classifier needs at least two classes, got {classes}")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise HeadError(
            f"labels are whole numbers from 0 to {classes - 1}, got {int(labels.min())} to {int(labels.max())}"
        )
    if not noise_multiplier >= 0:
        raise HeadError(f"noise_multiplier must be at least 0, got {noise_multiplier}")
    features = int(torch.Size(rows.shape[1:]).numel())
    if features < 1:
        raise HeadError(f"a record needs at least one feature, got records of shape {tuple(rows.shape[1:])}")
    if centre is not None and (centre.numel() != features or not bool(centre.isfinite().all())):
        raise HeadError(
            f"a centre has a finite number for each of the {features} features, got {tuple(centre.shape)}: compute it "
            "from public features of the same shape"
        )
    return features
