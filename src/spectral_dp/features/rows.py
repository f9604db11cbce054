"""Rows of cached features: a part of them by index, or several views of the same records side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from spectral_dp.features.cache import FeatureCache
from spectral_dp.features.errors import FeatureError
from spectral_dp.features.extractor import Shape


class FeatureRows:
    """Some rows of a tensor that is mapped from the disk, in a given order; nothing is copied until rows are asked for.

    Args:
        tensor: All rows, ``(N, ...)``.
        index: Which of them, ``(n,)``. None means all, in their order.
        others: All rows of other views of the same records, in tensors of the same shape. With them, a row has all
            views side by side: ``(n, V, ...)``.
    """

    def __init__(self, tensor: Tensor, index: Tensor | None = None, others: Sequence[Tensor] = ()) -> None:
        if any(other.shape != tensor.shape for other in others):
            shapes = [tuple(part.shape) for part in (tensor, *others)]
            raise FeatureError(f"views of the same records have the same shape, got {shapes}")
        self.tensor, self.index, self.others = tensor, index, tuple(others)

    @property
    def shape(self) -> torch.Size:
        """The shape that the rows would have as one tensor."""
        views = (1 + len(self.others),) if self.others else ()
        return torch.Size((len(self), *views, *self.tensor.shape[1:]))

    @property
    def first_view(self) -> FeatureRows:
        """The rows of the first view only."""
        return FeatureRows(self.tensor, self.index)

    def __len__(self) -> int:
        return len(self.tensor) if self.index is None else len(self.index)

    def __getitem__(self, rows: Any) -> Tensor:
        taken = rows if self.index is None else self.index[rows]
        if not self.others:
            return self.tensor[taken]
        return torch.stack([view[taken] for view in (self.tensor, *self.others)], dim=1)

    def take(self, index: Tensor) -> FeatureRows:
        """Returns a part of these rows."""
        return FeatureRows(self.tensor, index if self.index is None else self.index[index], self.others)

    def split(self, size: int) -> Iterator[Tensor]:
        """Yields the rows in their order, so many at a time."""
        return (self[start : start + size] for start in range(0, len(self), size))


class ViewsOfRows:
    """Several caches with views of the same records, read as one source of rows ``(N, V, ...)``.

    Raises:
        FeatureError: If the caches have different shapes, or were computed from different records.
    """

    def __init__(self, *caches: FeatureCache) -> None:
        if not caches or len({cache.shape for cache in caches}) > 1:
            raise FeatureError(f"views of the same records have the same shape, got {[c.shape for c in caches]}")
        if len({cache.description["inputs"] for cache in caches}) > 1:
            raise FeatureError(
                f"{', '.join(str(c.path) for c in caches)} are features of different records, not views of the same: "
                "compute all of them from the same images"
            )
        self._caches = caches
        rows, *features = caches[0].shape
        self.shape: Shape = (rows, len(caches), *features)

    @property
    def identity(self) -> str:
        """A checksum of the contents of all views, in their order."""
        return " ".join(cache.identity for cache in self._caches)

    def verify(self) -> None:
        """Compares the rows of all views with their checksums, like :meth:`FeatureCache.verify`."""
        for cache in self._caches:
            cache.verify()

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Tensor:
        return torch.stack([cache[rows] for cache in self._caches], dim=1)
