"""From the settings of a run to its features: which front end, which stages after it, and what the statement says."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from spectral_dp import features
from spectral_dp.experiments.data_source import records_info
from spectral_dp.experiments.settings import ResolvedSettings, SettingsError
from spectral_dp.features.axis_normalization import AxisNormalization
from spectral_dp.features.datasets import features_directory
from spectral_dp.features.pipeline import shape_after
from spectral_dp.features.projected import projected_shape
from spectral_dp.features.views import VIEWS, View
from spectral_dp.models import FeatureNetwork
from spectral_dp.priors import get_prior, prior_assumption


def reads_features(settings: ResolvedSettings) -> bool:
    """Returns whether the model of a run reads cached features, not images."""
    return settings.features is not None


def image_shape(settings: ResolvedSettings) -> tuple[int, ...]:
    """Returns the shape of the images of a run; of texts, how many bytes they have."""
    shape, side = records_info(settings).shape, settings.image_size
    return (shape[0], side, side) if side and len(shape) == 3 else shape


def extractor_of(settings: ResolvedSettings, shape: tuple[int, ...] | None = None) -> features.Extractor:
    """Returns the front end of a run, for images of its data set, or of another ``shape`` (as audits have)."""
    assert settings.features is not None
    info, shape = records_info(settings), shape or image_shape(settings)
    if info.has_texts:
        return features.build_extractor(settings.features, features.ImageFacts(shape, (), ()), settings.feature_options)
    is_of_data_set = shape[0] == len(info.mean)
    mean, std = (info.mean, info.std) if is_of_data_set else ((0.5,) * shape[0], (0.25,) * shape[0])
    return features.build_extractor(settings.features, features.ImageFacts(shape, mean, std), settings.feature_options)


def stages_of(settings: ResolvedSettings) -> list[features.Extractor]:
    """Returns what is done to the features of a run, once, before a head reads them.

    The spectrum of a projection is computed if it is not on the disk yet.
    """
    prepared = _preparation(settings)
    rank = settings.feature_rank or settings.feature_channels
    if not rank:
        return prepared
    spectrum = features.generated_spectrum(
        extractor_of(settings),
        image_shape(settings),
        features_directory(),
        stages=prepared,
        mirrored=settings.mirror_average,
        channels=settings.feature_channels is not None,
        standardized=settings.feature_norm == "public",
        rank=rank,
        prior=settings.feature_prior,
        images=settings.feature_prior_images,
        jobs=settings.threads or torch.get_num_threads(),
    )
    projected = [*prepared, features.Projected(spectrum, rank)]
    if settings.feature_gains == "private":  # they are released by the run, and applied by its model
        return projected
    unit = settings.feature_length == "unit"
    return [*projected, features.Weighted(spectrum, settings.feature_power, settings.feature_damp, unit)]


def axis_normalization(settings: ResolvedSettings) -> AxisNormalization | None:
    """Returns the gains of axes that the model of a run applies itself, or None; they are those of generated images."""
    if not reads_features(settings) or settings.feature_gains != "private":
        return None
    projected = stages_of(settings)[-1]
    assert isinstance(projected, features.Projected)
    spectrum, unit = projected.spectrum.load(projected.rank), settings.feature_length == "unit"
    return AxisNormalization(spectrum, settings.feature_power, settings.feature_damp, unit)


def has_private_statistics(settings: ResolvedSettings) -> bool:
    """Returns whether a run begins with the release of statistics of its features."""
    return reads_features(settings) and "private" in (settings.feature_norm, settings.feature_gains)


def normalizes_in_model(settings: ResolvedSettings) -> bool:
    """Returns whether the model of a run normalises channels itself; projected features are normalised before."""
    is_projected = settings.feature_rank or settings.feature_channels
    return reads_features(settings) and (
        settings.feature_norm == "private" or (settings.feature_norm == "public" and not is_projected)
    )


def feature_shape(settings: ResolvedSettings, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of what the model of a run reads of an image of this shape; nothing is computed for it."""
    if not reads_features(settings):
        return shape
    views = len(averaged_views(settings))
    found = shape_after(extractor_of(settings, shape), _preparation(settings), shape, views)
    if rank := settings.feature_rank or settings.feature_channels:
        return projected_shape(found, rank, channels=settings.feature_channels is not None)
    return found


def averaged_views(settings: ResolvedSettings) -> tuple[View, ...]:
    """Returns the views that the features of a record are averaged over."""
    return VIEWS if settings.mirror_average else VIEWS[:1]


def trained_views(settings: ResolvedSettings) -> tuple[View, ...]:
    """Returns the views whose features are cached for training: one, or several as augmentation.

    Raises:
        SettingsError: If the settings ask for views that are not cached.
    """
    if settings.shift:
        raise SettingsError(
            f"features are cached, so images cannot be shifted any more: leave shift {settings.shift} out, use "
            f"augmentation_multiplicity {len(VIEWS)} or flip, which read features of the mirror image"
        )
    if settings.augmentation_multiplicity > len(VIEWS):
        raise SettingsError(
            f"augmentation_multiplicity {settings.augmentation_multiplicity}: features of {len(VIEWS)} views of an "
            f"image are cached ({', '.join(VIEWS)}), so it can be {len(VIEWS)} at most"
        )
    if settings.augmentation_multiplicity == 1 and not settings.flip:
        return VIEWS[:1]
    if settings.mirror_average:
        raise SettingsError(
            "with mirror_average an image and its mirror image have the same features, so flip and "
            "augmentation_multiplicity have nothing to choose from: leave one of them out"
        )
    return VIEWS


def deployed_network(settings: ResolvedSettings, head: nn.Module) -> FeatureNetwork:
    """Returns the front end, the stages and the trained head of a run as one network on raw images."""
    stages, mirrored = stages_of(settings), settings.mirror_average
    return FeatureNetwork(extractor_of(settings), stages, head, image_shape(settings), mirrored=mirrored)


def is_filtered_in_cache(settings: ResolvedSettings) -> bool:
    """Returns whether the features of a run are filtered before training."""
    return reads_features(settings) and bool(
        settings.feature_ratio or settings.feature_rank or settings.feature_channels
    )


def features_are_public(settings: ResolvedSettings) -> bool:
    """Returns whether the features of a run depend on no other private record than the one they are of."""
    if settings.features is None:
        return True
    is_projected = settings.feature_rank or settings.feature_channels
    return getattr(extractor_of(settings), "is_public", True) and (
        not is_projected or get_prior(settings.feature_prior).is_public
    )


def feature_facts(settings: ResolvedSettings) -> dict[str, Any]:
    """Returns what the privacy statement says of the features of a run; nothing if it reads images."""
    if settings.features is None:
        return {}
    general = features.extractor_entry(settings.features).assumption
    extractor = extractor_of(settings)
    front_end = extractor.of if isinstance(extractor, features.Upright) else extractor
    assumption = getattr(front_end, "assumption", general)  # a front end may know more of itself
    if front_end is not extractor:
        assumption += "; each image is centred and made upright by itself"
    if not features_are_public(settings):
        return {"features": f"{settings.features}: {assumption}; or they were projected on axes that are not public"}
    what = "releases nothing; statistics of them are released and charged, see normalisation"
    released = what if has_private_statistics(settings) else "releases nothing, and nothing is charged"
    facts = {
        "features": f"{settings.features}: {assumption}. They are a fixed public function of one record, so computing "
        f"them {released}; cached, they are as private as the records"
    }
    if settings.feature_rank or settings.feature_channels:
        what = (
            f"{settings.feature_rank} coordinates" if settings.feature_rank else f"{settings.feature_channels} channels"
        )
        own = "" if settings.feature_gains == "private" else "and with gains "
        facts["projection"] = (
            f"on {what}, in a basis {own}from {settings.feature_prior_images} generated images "
            f"({settings.feature_prior}): {prior_assumption(settings.feature_prior)}, so nothing of it is released or "
            "charged"
        )
    return facts


def _preparation(settings: ResolvedSettings) -> list[features.Extractor]:
    """Returns the stage before a projection; none if the head reads the features as they are."""
    if settings.feature_norm == "group" and not settings.feature_groups:
        raise SettingsError(f"feature_norm group of {settings.features} features: give feature_groups, how many groups")
    groups = settings.feature_groups if settings.feature_norm == "group" else None
    is_projected = settings.feature_rank or settings.feature_channels
    unit = settings.feature_length == "unit" and not is_projected
    prepared = features.Prepared(groups or 0, settings.feature_ratio or 0.0, unit, settings.feature_exponent)
    return [] if prepared == features.Prepared() and not settings.mirror_average else [prepared]
