"""From images to what a head reads: a front end on some views, then stages, each cached."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from torch import Tensor

from spectral_dp.features.cache import FeatureCache
from spectral_dp.features.errors import FeatureError
from spectral_dp.features.extraction import ExtractionProgress, extract_features
from spectral_dp.features.extractor import Extractor, Shape
from spectral_dp.features.rows import ViewsOfRows
from spectral_dp.features.views import VIEWS, View


def extract_in_stages(
    images: Tensor,
    extractor: Extractor,
    stages: Sequence[Extractor],
    root: str | os.PathLike[str],
    *,
    title: str,
    views: Sequence[View] = VIEWS[:1],
    jobs: int = 1,
    verify: bool = False,
    show: Callable[[ExtractionProgress], None] = lambda _: None,
) -> FeatureCache:
    """Returns what a head reads of some images, and computes what is not in the cache yet.

    Args:
        images: The images ``(N, C, H, W)``, as bytes.
        extractor: The front end.
        stages: What is done to its features, one after the other, such as :class:`~spectral_dp.features.Prepared`.
        root: The directory that holds the directories of all caches.
        title: What the images are called.
        views: The views that the first stage reads. With more than one, it gets them side by side, and averages them.
        jobs: The number of processes that compute.
        verify: Whether to compare rows that are there with their checksums, and to compute damaged ones again.
        show: Called with how far the computation of each cache is.
    """
    caches = [
        extract_features(images, extractor, root, title=title, view=view, jobs=jobs, verify=verify, show=show)
        for view in views
    ]
    if len(caches) > 1 and not stages:
        raise FeatureError("views are averaged by a stage: give stages=[Prepared()]")
    found, source = caches[0], ViewsOfRows(*caches) if len(caches) > 1 else caches[0]
    for stage in stages:
        title = found.path.name.rpartition("-")[0]  # the stages before, without the checksum of their settings
        found = source = extract_features(source, stage, root, title=title, jobs=jobs, verify=verify, show=show)
    return found


def shape_after(extractor: Extractor, stages: Sequence[Extractor], input_shape: Shape, views: int = 1) -> Shape:
    """Returns the shape of what comes out of all stages, for images of this shape."""
    shape = extractor.output_shape(input_shape)
    shape = (views, *shape) if views > 1 else shape
    for stage in stages:
        shape = stage.output_shape(shape)
    return shape
