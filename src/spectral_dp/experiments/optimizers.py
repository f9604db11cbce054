"""From the settings of a run to its optimizer, before it is made private."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from spectral_dp.experiments.settings import ResolvedSettings, SettingsError
from spectral_dp.training.denoising.adam_bc import AdamBC
from spectral_dp.training.denoising.kalman import KalmanGradients
from spectral_dp.training.denoising.low_pass import LowPassGradients


def make_optimizer(settings: ResolvedSettings, model: nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer that the settings name. Its groups have a ``rate``, a factor on the learning rate."""
    options: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    groups = _groups(settings, model)
    optimizer: torch.optim.Optimizer
    if settings.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, momentum=settings.momentum, **options)
    else:
        optimizer = (AdamBC if settings.optimizer == "adam-bc" else torch.optim.Adam)(groups, **options)
    if settings.gradient_filter == "none":
        return optimizer
    gain = {} if settings.gradient_filter_gain is None else {"gain": settings.gradient_filter_gain}
    return (LowPassGradients if settings.gradient_filter == "low-pass" else KalmanGradients)(optimizer, **gain)


def settled(optimizer: Any) -> AbstractContextManager[None]:
    """Puts the weights of a run in the place of those at which the next gradient is taken, where these differ."""
    inner = getattr(optimizer, "original_optimizer", optimizer)
    found = next((each for each in (optimizer, inner) if isinstance(each, KalmanGradients)), None)
    return nullcontext() if found is None else found.settled()


def _groups(settings: ResolvedSettings, model: nn.Module) -> list[dict[str, Any]]:
    """Returns the trained parameters, in groups with the same factor on the learning rate."""
    factors = dict(settings.layer_rates)
    layers = {name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))}
    if unknown := sorted(set(factors) - layers):
        raise SettingsError(
            f"layer_rates: no such layers as {', '.join(unknown)}; there are {', '.join(sorted(layers))}"
        )
    grouped: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            grouped.setdefault(factors.get(name.rpartition(".")[0], 1.0), []).append(parameter)
    return [{"params": parameters, "rate": factor} for factor, parameters in grouped.items()]
