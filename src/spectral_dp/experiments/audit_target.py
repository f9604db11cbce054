"""What the audit is given to audit: the training step of some settings, or of a finished run, and what it claims."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from spectral_dp.accounting import Ledger
from spectral_dp.audit.targets.opacus import OpacusTarget
from spectral_dp.audit.targets.spectral import SpectralTarget
from spectral_dp.audit.targets.target import Claim, Target
from spectral_dp.experiments.data_source import records_info
from spectral_dp.experiments.feature_data import planned_noise, statistics_phases
from spectral_dp.experiments.feature_stages import feature_shape, image_shape
from spectral_dp.experiments.fine_tuning import audited_shape, is_fine_tuned
from spectral_dp.experiments.head_target import target_of_head, target_of_release
from spectral_dp.experiments.network import build_network
from spectral_dp.experiments.one_shot import bound_of_head
from spectral_dp.experiments.run_directory import RunDirectory
from spectral_dp.experiments.settings import ONE_SHOT, ResolvedSettings, SettingsError
from spectral_dp.experiments.spectral import spectral_config
from spectral_dp.features.normalization import JOINT_BOUND, release_moments
from spectral_dp.mechanism.noise import NoiseSource


def target_from_settings(
    settings: ResolvedSettings,
    *,
    input_shape: tuple[int, int, int] | None = None,
    classes: int | None = None,
    samples: int | None = None,
    claim: Claim | None = None,
) -> Target:
    """Returns the training step that settings describe, or the release of a one-shot head; no data are needed.

    The network is freshly initialised: what is released of a layer does not depend on its weights.

    Args:
        settings: The settings of the run.
        input_shape: Shape ``(C, H, W)`` of an image; that of the data set where not given.
        classes: Number of classes; that of the data set where not given.
        samples: Number of training samples; that of the settings and the data set where not given.
        claim: What is claimed of the run; follows from the settings where not given.
    """
    if not settings.is_private:
        raise SettingsError(f"method {settings.method} claims no privacy, so there is nothing to audit")
    if settings.method in ONE_SHOT:
        return target_of_head(settings, claim)
    info = records_info(settings)
    if is_fine_tuned(settings):
        shape: tuple[int, ...] = audited_shape(settings)
    else:
        shape = feature_shape(settings, input_shape or image_shape(settings))
    claim = claim or claim_from_settings(settings, samples)
    model = build_network(settings, shape, classes or info.classes)
    name = f"{settings.model} ({settings.method})"
    if settings.method == "opacus":
        return OpacusTarget(model, claim, input_shape=shape, name=name)
    return SpectralTarget(
        model,
        claim,
        input_shape=shape,
        spectral=spectral_config(settings, model, claim.steps),
        clipping=settings.clipping,
        max_grad_norm=settings.layer_max_grad_norms or settings.max_grad_norm,
        noise_allocation=settings.noise_allocation,
        max_physical_batch_size=min(settings.max_physical_batch_size or 64, 64),
        name=name,
    )


def claim_from_settings(settings: ResolvedSettings, samples: int | None = None) -> Claim:
    """Returns what settings claim: the noise of their budget, or the budget of their noise."""
    if samples is None:
        samples = settings.train_size or records_info(settings).train_samples - settings.validation_size
    rate, steps = settings.sampling(samples)
    return _claim(settings, planned_noise(settings, rate, steps), rate, steps, settings.epsilon)


def target_from_run(directory: str | os.PathLike[str]) -> Target:
    """Returns the training step or the one release of a finished run, with what its privacy statement claims."""
    run = RunDirectory(directory)
    settings = run.settings()
    if not settings.is_private:
        raise SettingsError(f"{run.path} was trained without privacy, so there is nothing to audit")
    stated: dict[str, Any] = run.read(run.privacy)
    facts = (stated["noise_multiplier"], stated["sample_rate"], stated["steps"], stated["epsilon"])
    return target_from_settings(settings, claim=_claim(settings, *facts))


def _claim(settings: ResolvedSettings, sigma: float, rate: float, steps: int, stated: float | None) -> Claim:
    is_one_shot = settings.method in ONE_SHOT
    return Claim(
        noise_multiplier=sigma,
        max_grad_norm=bound_of_head(settings) if is_one_shot else settings.sensitivity_bound,
        expected_batch_size=1.0 if is_one_shot else settings.batch_size,
        sample_rate=rate,
        steps=steps,
        delta=settings.delta,
        relation=settings.relation,
        stated_epsilon=stated,
        beside=statistics_phases(settings),
    )


def statistics_target(settings: ResolvedSettings, release: Callable[..., Tensor] = release_moments) -> Target | None:
    """Returns the release of the private statistics that a run begins with, or None if it has none.

    Args:
        settings: The settings of the run.
        release: What makes the release; tests put broken ones here.
    """
    phases = statistics_phases(settings)
    if not phases:
        return None
    size = 2 * feature_shape(replace(settings, feature_ratio=None), image_shape(settings))[0]

    def made(moments: Tensor, sigma: float, ledger: Ledger, noise: NoiseSource) -> Tensor:
        # As a run reads them, an empty part first: a fault may be in all parts but that.
        parts = [moments[:0], *moments.tensor_split(3)]
        return release(parts, noise_multiplier=sigma, ledger=ledger, noise=noise)

    name = f"private normalisation of {settings.model}"
    return target_of_release(settings, made, phases[0].noise_multiplier, JOINT_BOUND, dimension=size, name=name)
