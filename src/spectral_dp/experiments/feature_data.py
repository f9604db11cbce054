"""Cached features as the data of a run, and the private statistics that normalise them as a release of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from spectral_dp import data
from spectral_dp.accounting import Ledger, Phase
from spectral_dp.data import ImageDataset, catalog
from spectral_dp.experiments.settings import ResolvedSettings, SettingsError
from spectral_dp.features import (
    Extractor,
    FeatureDataset,
    FeatureRows,
    ImageFacts,
    Prepared,
    ViewsOfRows,
    build_extractor,
    extract_features,
    extractor_entry,
)
from spectral_dp.features.datasets import Split, dataset_features, features_directory
from spectral_dp.features.normalization import (
    ChannelNormalization,
    ChannelStatistics,
    private_channel_statistics,
    public_channel_statistics,
)
from spectral_dp.features.views import VIEWS
from spectral_dp.mechanism.noise import NoiseSource, SecureNoise, SeededNoise
from spectral_dp.models.scattering import with_channel_normalization

_NOISE_OF_STATISTICS = 0x5EED  # added to the seed of a reproducible run: its training noise is another stream


def reads_features(settings: ResolvedSettings) -> bool:
    """Returns whether the model of a run reads cached features, not images."""
    return settings.features is not None


def extractor_of(settings: ResolvedSettings, shape: tuple[int, int, int] | None = None) -> Extractor:
    """Returns the front end of a run, for images of its data set, or of another ``shape`` (as audits have)."""
    assert settings.features is not None
    info, shape = catalog.find(settings.dataset), shape or image_shape(settings)
    is_of_data_set = shape[0] == len(info.mean)
    mean, std = (info.mean, info.std) if is_of_data_set else ((0.5,) * shape[0], (0.25,) * shape[0])
    return build_extractor(settings.features, ImageFacts(shape, mean, std), settings.feature_options)


def prepared_by(settings: ResolvedSettings) -> Prepared:
    """Returns how the features of a run are prepared, once, before a head reads them."""
    if settings.feature_norm == "group" and not settings.feature_groups:
        raise SettingsError(f"feature_norm group of {settings.features} features: give feature_groups, how many groups")
    groups = settings.feature_groups if settings.feature_norm == "group" else 0
    return Prepared(groups or 0, settings.feature_ratio or 0.0)


def feature_shape(settings: ResolvedSettings, shape: tuple[int, int, int]) -> tuple[int, ...]:
    """Returns the shape of what the model of a run reads of an image of this shape."""
    if not reads_features(settings):
        return shape
    return prepared_by(settings).output_shape(extractor_of(settings, shape).output_shape(shape))


def load_features(settings: ResolvedSettings) -> FeatureDataset:
    """Returns the features that a run trains on; those that are not in the cache yet are computed."""
    refused = {
        "flip": settings.flip,
        "shift": settings.shift,
        "augmentation_multiplicity": settings.augmentation_multiplicity > 1,
    }
    if asked := [name for name, is_asked in refused.items() if is_asked]:
        raise SettingsError(
            f"{settings.model} reads cached features, which {', '.join(asked)} cannot act on: use mirror_average"
        )
    images = data.load_dataset(settings.dataset, path=settings.data_path)
    images = images.resized(settings.image_size) if settings.image_size else images
    rows = {split: _rows(settings, images, split) for split in ("train", "test")}
    dataset = FeatureDataset(
        images.name,
        rows["train"],
        images.train_labels,
        rows["test"],
        images.test_labels,
        images.classes,
    )
    if settings.validation_size:
        dataset = dataset.with_validation(settings.validation_size)
    return dataset.subset(settings.train_size, settings.test_size)


def _rows(settings: ResolvedSettings, images: ImageDataset, split: Split) -> FeatureRows:
    extractor, jobs = extractor_of(settings), settings.threads or torch.get_num_threads()
    views = VIEWS if settings.mirror_average else VIEWS[:1]
    caches = [dataset_features(images, extractor, split, view=view, jobs=jobs) for view in views]
    source = ViewsOfRows(*caches) if len(caches) > 1 else caches[0]
    prepared = prepared_by(settings)
    if prepared == Prepared() and len(caches) == 1:
        return FeatureRows(caches[0].tensor)
    title = caches[0].path.name.rpartition("-")[0]
    return FeatureRows(extract_features(source, prepared, features_directory(), title=title, jobs=jobs).tensor)


def with_normalization(settings: ResolvedSettings, model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """Gives the model of a run its normalisation of channels, if it has one; public statistics are set at once."""
    if not reads_features(settings) or settings.feature_norm not in ("private", "public"):
        return model
    extractor, of_image = extractor_of(settings), image_shape(settings)
    positions = math.prod(extractor.output_shape(of_image)[1:])
    model = with_channel_normalization(model, shape, positions if settings.feature_ratio else None)
    _normalization(model).set(public_channel_statistics(extractor, of_image))
    return model


def feature_facts(settings: ResolvedSettings) -> dict[str, Any]:
    """Returns what the privacy statement says of the features of a run; nothing if it reads images."""
    if settings.features is None:
        return {}
    assumption = extractor_entry(settings.features).assumption
    return {
        "features": f"{settings.features}: {assumption}. They are a fixed public function of one record, so nothing of "
        "them is released or charged; cached, they are as private as the records"
    }


def statistics_phases(settings: ResolvedSettings) -> tuple[Phase, ...]:
    """Returns what the private statistics of a run are charged as; nothing if it has none."""
    if not reads_features(settings) or settings.feature_norm != "private":
        return ()
    return (Phase(settings.feature_noise_multiplier, 1.0, 1),)


@dataclass(frozen=True)
class StatisticsRelease:
    """The private statistics of a run, a release of its own before the first training step.

    Attributes:
        settings: The settings of the run.
        model: The model, whose normalisation has public statistics until the private ones are released.
        maps: The maps of the training records.
    """

    settings: ResolvedSettings
    model: nn.Module
    maps: FeatureRows

    def release(self, ledger: Ledger) -> None:
        """Charges the ledger, releases the statistics, and gives them to the model."""
        normalization = _normalization(self.model)
        public = ChannelStatistics(normalization.mean.cpu().clone(), normalization.std.cpu().clone())
        noise: NoiseSource = SecureNoise()
        if self.settings.reproducible:
            noise = SeededNoise(self.settings.seed + _NOISE_OF_STATISTICS, reproducibility_over_privacy=True)
        released = private_channel_statistics(
            self.maps,
            public,
            noise_multiplier=self.settings.feature_noise_multiplier,
            records=len(self.maps),
            ledger=ledger,
            noise=noise,
        )
        normalization.set(released)

    def facts(self) -> dict[str, Any]:
        """Returns what the privacy statement says of the release."""
        return {
            "normalisation": "mean and deviation of every feature channel, clipped, noised and released once, as a "
            f"phase of its own: noise multiplier {self.settings.feature_noise_multiplier:g}, all records"
        }


def statistics_release(settings: ResolvedSettings, model: nn.Module, dataset: Any) -> StatisticsRelease | None:
    """Returns the release of private statistics that a run begins with, or None if it has none."""
    if not statistics_phases(settings):
        return None
    raw = replace(settings, feature_norm="none", feature_ratio=None)  # still averaged over views, as the head reads it
    maps = dataset.train_images if prepared_by(settings) == Prepared() else load_features(raw).train_images
    return StatisticsRelease(settings, model, maps)


def image_shape(settings: ResolvedSettings) -> tuple[int, int, int]:
    """Returns the shape of the images of a run."""
    channels, height, width = catalog.find(settings.dataset).shape
    side = settings.image_size
    return channels, side or height, side or width


def _normalization(model: nn.Module) -> ChannelNormalization:
    found = model.normalization
    assert isinstance(found, ChannelNormalization)
    return found
