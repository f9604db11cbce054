"""What the audit is given to audit: the training step of some settings, or of a finished run, and what it claims."""

from __future__ import annotations

import math
import os
from typing import Any

from spectral_dp import accounting
from spectral_dp.audit.targets.model import ModelTarget
from spectral_dp.audit.targets.opacus import OpacusTarget
from spectral_dp.audit.targets.spectral import SpectralTarget
from spectral_dp.audit.targets.target import Claim
from spectral_dp.data import catalog
from spectral_dp.experiments.network import build_network
from spectral_dp.experiments.run_directory import RunDirectory
from spectral_dp.experiments.settings import ResolvedSettings, SettingsError
from spectral_dp.experiments.spectral import spectral_config


def target_from_settings(
    settings: ResolvedSettings,
    *,
    input_shape: tuple[int, int, int] | None = None,
    classes: int | None = None,
    samples: int | None = None,
    claim: Claim | None = None,
) -> ModelTarget:
    """Returns the training step that settings describe; no data are needed.

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
    info = catalog.find(settings.dataset)
    if input_shape is None:
        channels, height, width = info.shape
        side = settings.image_size
        input_shape = (channels, side or height, side or width)
    claim = claim or claim_from_settings(settings, samples)
    model = build_network(settings, input_shape, classes or info.classes)
    name = f"{settings.model} ({settings.method})"
    if settings.method == "opacus":
        return OpacusTarget(model, claim, input_shape=input_shape, name=name)
    return SpectralTarget(
        model,
        claim,
        input_shape=input_shape,
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
        samples = settings.train_size or catalog.find(settings.dataset).train_samples - settings.validation_size
    if settings.batch_size > samples:
        raise SettingsError(f"batch_size {settings.batch_size} exceeds the {samples} training samples: lower it")
    rate, steps = settings.batch_size / samples, settings.epochs * math.ceil(samples / settings.batch_size)
    sigma = settings.noise_multiplier
    if sigma is None:
        assert settings.epsilon is not None
        sigma = accounting.calibrate_noise(
            settings.epsilon, settings.delta, rate, steps, accountant=settings.accountant, relation=settings.relation
        )
    return _claim(settings, sigma, rate, steps, settings.epsilon)


def target_from_run(directory: str | os.PathLike[str]) -> ModelTarget:
    """Returns the training step of a finished run, with what its privacy statement claims."""
    run = RunDirectory(directory)
    settings = run.settings()
    if not settings.is_private:
        raise SettingsError(f"{run.path} was trained without privacy, so there is nothing to audit")
    stated: dict[str, Any] = run.read(run.privacy)
    facts = (stated["noise_multiplier"], stated["sample_rate"], stated["steps"], stated["epsilon"])
    return target_from_settings(settings, claim=_claim(settings, *facts))


def _claim(settings: ResolvedSettings, sigma: float, rate: float, steps: int, stated: float | None) -> Claim:
    return Claim(
        noise_multiplier=sigma,
        max_grad_norm=settings.sensitivity_bound,
        expected_batch_size=settings.batch_size,
        sample_rate=rate,
        steps=steps,
        delta=settings.delta,
        relation=settings.relation,
        stated_epsilon=stated,
    )
