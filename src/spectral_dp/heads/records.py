"""Records in the form in which they contribute to a one-shot head: centred, projected, of unit length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from spectral_dp.heads.errors import HeadError

_ROWS_AT_ONCE = 2048


def unit_rows(rows: Tensor, centre: Tensor | None = None, projection: Tensor | None = None) -> Tensor:
    """Returns each record's features, less the centre, projected, at unit length: ``(n, ...) -> (n, d)`` in float64.

    A record of zeros stays zero. In float64, because a matrix product may round a row in another way if other rows
    stand beside it: in float32 the records of a large data set could move together by more than the guard of a clip.
    """
    x = rows.flatten(1).double()
    if centre is not None:
        x = x - centre.double()
    if projection is not None:
        x = x @ projection.double()
    norms = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    return x / norms.where(norms > 0, torch.ones_like(norms))


def record_parts(
    rows: Any, labels: Tensor, centre: Tensor | None = None, projection: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields :func:`unit_rows` and labels of some records at a time; the first part has none, and gives the shape."""
    starts = range(0, len(labels), _ROWS_AT_ONCE)
    for part in (slice(0, 0), *(slice(start, start + _ROWS_AT_ONCE) for start in starts)):
        yield unit_rows(rows[part], centre, projection), labels[part]


def check_records(rows: Any, labels: Tensor, classes: int, noise_multiplier: float) -> int:
    """Returns the number of features of a record, if a head can be made of such records.

    Raises:
        HeadError: If the numbers of records and labels differ, or a label is no class.
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
    return int(torch.Size(rows.shape[1:]).numel())
