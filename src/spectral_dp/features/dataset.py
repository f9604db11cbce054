"""A data set of cached features, with what training asks of an ``ImageDataset``."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from spectral_dp.data.dataset import SplitDataset
from spectral_dp.features.errors import FeatureError
from spectral_dp.features.extractor import Shape
from spectral_dp.features.rows import FeatureRows

_BATCH_BYTES = 16 * 2**20  # of features as float32
_LEAST_BATCH = 64  # with fewer records, a step is mostly calls of Python


@dataclass(frozen=True, eq=False)
class FeatureDataset(SplitDataset[FeatureRows]):
    """Features and labels, split as published; the features stay on the disk until they are asked for.

    The names are those of :class:`~spectral_dp.data.ImageDataset`, whose place it takes in a training run. Features are
    float16. The training records have those of several views of each image, where they are augmented.
    """

    @property
    def input_shape(self) -> Shape:
        """The shape of the features of one view of an image."""
        return tuple(self.train_images.tensor.shape[1:])

    @property
    def physical_batch_size(self) -> int:
        """How many records are best trained on together: so many that their features stay in the processor's cache.

        In larger batches, features are written to memory and read again for every product of a step.
        """
        views = 1 + len(self.train_images.others)
        return max(_LEAST_BATCH, _BATCH_BYTES // (4 * views * math.prod(self.input_shape)))

    def normalise(self, features: Tensor) -> Tensor:
        """Turns features into float32; to normalise them is the model's part."""
        return features.float()

    def augmented(self, views: Tensor, multiplicity: int, generator: torch.Generator | None = None) -> Tensor:
        """Returns the views of each record that a step trains on, next to each other: ``(B, V, ...) -> (B K, ...)``.

        Args:
            views: All cached views of some records.
            multiplicity: ``K``, how many of them. With as many as there are, all are taken; with 1, one at random.
            generator: Generator to draw from.

        Raises:
            FeatureError: If more views are asked for than are cached, or a part of them.
        """
        records, cached = views.shape[:2]
        if multiplicity == cached:
            return views.flatten(0, 1)
        if multiplicity != 1:
            raise FeatureError(f"{cached} views of each record are cached: take 1 of them or all, not {multiplicity}")
        # A word for each record, in their order: a batch that comes in parts gets the views that it would get whole.
        words = torch.randint(2**31, (records,), generator=generator)
        return views[torch.arange(records), words % cached]

    def training(self) -> Dataset[Any]:
        """Returns the training records as a data set for a loader, without a copy of them.

        A record is the features of each view, and the label.
        """
        rows = self.train_images
        views = (rows.tensor, *rows.others)
        if rows.index is None:
            return TensorDataset(*views, self.train_labels)
        labels = self.train_labels.new_zeros(len(rows.tensor))
        labels[rows.index] = self.train_labels
        return Subset(TensorDataset(*views, labels), rows.index.tolist())

    def with_validation(self, size: int) -> Self:
        """Holds out the training records that :meth:`ImageDataset.with_validation` holds out, without augmentation."""
        result = super().with_validation(size)
        return replace(result, test_images=result.test_images.first_view)

    def _rows(self, images: FeatureRows, index: Tensor) -> FeatureRows:
        return images.take(index)
