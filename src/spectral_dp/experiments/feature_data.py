"""Cached features as the data of a run, and the private statistics that normalise them as a release of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from spectral_dp.accounting import Ledger, Phase, calibrate_noise
from spectral_dp.experiments import feature_stages
from spectral_dp.experiments.data_source import Records, load_records
from spectral_dp.experiments.settings import ResolvedSettings
from spectral_dp.features import Extractor, FeatureDataset, FeatureRows, normalization
from spectral_dp.features.datasets import Split, dataset_features
from spectral_dp.features.views import VIEWS, View
from spectral_dp.mechanism.noise import NoiseSource, SecureNoise, SeededNoise
from spectral_dp.models.scattering import with_channel_normalization, with_normalization_module

_NOISE_OF_STATISTICS = 0x5EED  # added to the seed of a reproducible run: its training noise is another stream


def load_features(settings: ResolvedSettings) -> FeatureDataset:
    """Returns the features that a run trains on; those that are not in the cache yet are computed."""
    views, stages = feature_stages.trained_views(settings), feature_stages.stages_of(settings)
    images = load_records(settings)
    dataset = FeatureDataset(
        images.name,
        _rows(settings, images, "train", stages, views),
        images.train_labels,
        _rows(settings, images, "test", stages, VIEWS[:1]),
        images.test_labels,
        images.classes,
    )
    if settings.validation_size:
        dataset = dataset.with_validation(settings.validation_size)
    return dataset.subset(settings.train_size, settings.test_size)


def _rows(
    settings: ResolvedSettings,
    images: Records,
    split: Split,
    stages: Sequence[Extractor],
    views: Sequence[View],
) -> FeatureRows:
    """Returns the features of each of some views; those of a view are its own, or averaged over the mirror image."""
    caches = [
        dataset_features(
            images,
            feature_stages.extractor_of(settings),
            split,
            stages=stages,
            views=feature_stages.averaged_views(settings) if settings.mirror_average else (view,),
            jobs=settings.threads or torch.get_num_threads(),
        )
        for view in views
    ]
    return FeatureRows(caches[0].tensor, others=[cache.tensor for cache in caches[1:]])


def with_normalization(settings: ResolvedSettings, model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """Gives the model of a run its normalisation of channels or axes, if any; it begins with public statistics."""
    if (gains := feature_stages.axis_normalization(settings)) is not None:
        return with_normalization_module(model, gains)
    if not feature_stages.normalizes_in_model(settings):
        return model
    extractor, of_image = feature_stages.extractor_of(settings), feature_stages.image_shape(settings)
    positions = math.prod(extractor.output_shape(of_image)[1:])
    model = with_channel_normalization(model, shape, positions if settings.feature_ratio else None)
    _normalization(model).set(normalization.public_channel_statistics(extractor, of_image))
    return model


def statistics_phases(settings: ResolvedSettings) -> tuple[Phase, ...]:
    """Returns what the private statistics of a run are charged as; nothing if it has none."""
    if not feature_stages.has_private_statistics(settings):
        return ()
    return (Phase(settings.feature_noise_multiplier, 1.0, 1),)


def planned_noise(settings: ResolvedSettings, sample_rate: float, steps: int) -> float:
    """Returns the noise multiplier of a run: as given, or what its budget leaves beside the private statistics."""
    if settings.noise_multiplier is not None:
        return settings.noise_multiplier
    assert settings.epsilon is not None
    return calibrate_noise(
        settings.epsilon,
        settings.delta,
        sample_rate,
        steps,
        accountant=settings.accountant,
        relation=settings.relation,
        beside=statistics_phases(settings),
    )


def noise_source(settings: ResolvedSettings, stream: int) -> NoiseSource:
    """Returns where the noise of a release beside the training steps comes from.

    Args:
        settings: The settings of the run.
        stream: Added to the seed of a reproducible run, so that every release has noise of its own.
    """
    if not settings.reproducible:
        return SecureNoise()
    return SeededNoise(settings.seed + stream, reproducibility_over_privacy=True)


@dataclass(frozen=True)
class StatisticsRelease:
    """The private statistics of a run, a release of its own before the first training step.

    Attributes:
        settings: The settings of the run.
        model: The model, whose normalisation has public statistics until the private ones are released.
        maps: The maps of the training records, or their coordinates along axes.
    """

    settings: ResolvedSettings
    model: nn.Module
    maps: FeatureRows

    def release(self, ledger: Ledger) -> None:
        """Charges the ledger, releases the statistics, and gives them to the model."""
        own = _normalization(self.model)
        public = normalization.ChannelStatistics(own.mean.cpu().clone(), own.std.cpu().clone())
        released = normalization.private_channel_statistics(
            self.maps,
            public,
            noise_multiplier=self.settings.feature_noise_multiplier,
            records=len(self.maps),
            ledger=ledger,
            noise=noise_source(self.settings, _NOISE_OF_STATISTICS),
        )
        own.set(released)

    def facts(self) -> dict[str, Any]:
        """Returns what the privacy statement says of the release."""
        what = "axis of the features" if self.settings.feature_gains == "private" else "feature channel"
        return {
            "normalisation": f"mean and deviation of every {what}, clipped, noised and released once, as a "
            f"phase of its own: noise multiplier {self.settings.feature_noise_multiplier:g}, all records"
        }


def statistics_release(settings: ResolvedSettings, model: nn.Module, dataset: Any) -> StatisticsRelease | None:
    """Returns the release of private statistics that a run begins with, or None if it has none."""
    if not statistics_phases(settings):
        return None
    # Views that are averaged stay so, as the head reads them; of views that are drawn, the first one is enough.
    plain: dict[str, Any] = {"flip": False, "augmentation_multiplicity": 1}
    if settings.feature_gains != "private":  # of whole maps: axes are normalised as they are, channels before cosines
        plain |= {"feature_ratio": None, "feature_norm": "none"}
    is_raw = all(getattr(settings, name) == value for name, value in plain.items() if name != "feature_norm")
    raw = replace(settings, **plain)
    return StatisticsRelease(settings, model, dataset.train_images if is_raw else load_features(raw).train_images)


def _normalization(model: nn.Module) -> normalization.ChannelNormalization:
    found = model.normalization
    assert isinstance(found, normalization.ChannelNormalization)
    return found
