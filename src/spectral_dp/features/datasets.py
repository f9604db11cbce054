"""Features of the data sets of the catalog, in the user's cache directory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from spectral_dp.data import ImageDataset, TextDataset, cache_directory
from spectral_dp.features.cache import FeatureCache
from spectral_dp.features.extraction import ExtractionProgress
from spectral_dp.features.extractor import Extractor
from spectral_dp.features.pipeline import extract_in_stages
from spectral_dp.features.registry import ImageFacts
from spectral_dp.features.views import VIEWS, View

Split = Literal["train", "test"]


def features_directory(cache: str | os.PathLike[str] | None = None) -> Path:
    """Returns the directory of all cached features, there or not."""
    return (cache_directory() if cache is None else Path(cache)) / "features"


def dataset_features(
    dataset: ImageDataset | TextDataset,
    extractor: Extractor,
    split: Split,
    *,
    stages: Sequence[Extractor] = (),
    views: Sequence[View] = VIEWS[:1],
    cache: str | os.PathLike[str] | None = None,
    jobs: int = 1,
    verify: bool = False,
    show: Callable[[ExtractionProgress], None] = lambda _: None,
) -> FeatureCache:
    """Returns the features of a data set, computed where they are not in the cache yet.

    Args:
        dataset: The data set as published, all of it. Take parts of the features, not features of parts.
        extractor: What computes the features.
        split: Which images.
        stages: What is done to the features, one after the other.
        views: Which views of them; several are averaged by the first stage.
        cache: Cache directory to use instead of the user's.
        jobs: The number of processes that compute.
        verify: Whether to compare rows that are there with their checksums, and to compute damaged ones again.
        show: Called with how far the computation is.
    """
    images = dataset.train_images if split == "train" else dataset.test_images
    size = "x".join(map(str, dataset.input_shape[1:] or dataset.input_shape))
    title = f"{dataset.name}-{size}-{split}"
    return extract_in_stages(
        images,
        extractor,
        stages,
        features_directory(cache),
        title=title,
        views=views,
        jobs=jobs,
        verify=verify,
        show=show,
    )


def facts_of(dataset: ImageDataset | TextDataset) -> ImageFacts:
    """Returns the public facts of the images of a data set: what a front end is made from."""
    return ImageFacts(dataset.input_shape, dataset.mean, dataset.std)
