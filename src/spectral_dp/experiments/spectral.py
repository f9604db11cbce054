"""From the settings of a run to the :class:`SpectralConfig` of its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from spectral_dp.experiments.settings import ResolvedSettings, SettingsError
from spectral_dp.gradients.rules.layer_config import LayerConfig
from spectral_dp.mechanism.filters import AdaptiveFilter, AnnealedFilter, Filter, IdentityFilter
from spectral_dp.training.config import SpectralConfig


def spectral_config(settings: ResolvedSettings, model: nn.Module, steps: int) -> SpectralConfig:
    """Returns what a run releases of each layer; ``steps`` is the length of the run.

    Dense layers that a model declares to be fed by an image (``input_layouts``) are filtered over that image.
    """
    if settings.method != "spectral":
        return SpectralConfig.dpsgd()
    declared = getattr(model, "input_layouts", {})
    layouts = {name: shape for name, shape in declared.items() if isinstance(model.get_submodule(name), nn.Linear)}
    make_filter = _filter_maker(settings, steps)

    def config(conv_ratio: float, linear_ratio: float, layers: Mapping[str, LayerConfig]) -> SpectralConfig:
        released: dict[str, Any]
        if make_filter is None:
            ratios = {"conv_ratio": conv_ratio, "linear_ratio": linear_ratio}
            released = {**ratios, "order": settings.order, "band": settings.band}
        else:
            released = {"conv_filter": make_filter(conv_ratio), "linear_filter": make_filter(linear_ratio)}
        return SpectralConfig(
            **released,
            layers=layers,
            input_layouts={name: shape for name, shape in layouts.items() if name not in layers},
            conv_transform=settings.conv_transform or ("fourier" if settings.band == "paper" else None),
            support=settings.support,
        )

    layers = {}
    for name, ratio in settings.layer_ratios.items():
        released = config(ratio, ratio, {}).layer_configs(model).get(name)
        if released is not None:
            layers[name] = released
        elif ratio > 0:
            filterable = ", ".join(config(0.5, 0.5, {}).layer_configs(model)) or "none"
            raise SettingsError(f"layer_ratios: {name!r} is no layer with a spectrum; this model has {filterable}")
    return config(settings.conv_ratio, settings.linear_ratio, layers)


def _filter_maker(settings: ResolvedSettings, steps: int) -> Callable[[float], Filter] | None:
    """Returns how to make a filter of a ratio; None for the low-pass that SpectralConfig makes itself."""
    if settings.filter == "low-pass":
        return None
    if settings.band == "paper":
        raise SettingsError("the paper's band is a fixed one: use filter low-pass, or another band than paper")
    region, order = settings.band, settings.order
    if settings.filter == "adaptive":
        return lambda ratio: AdaptiveFilter(ratio, region=region, order=order)
    return lambda ratio: AnnealedFilter(ratio, 0.0, steps, "cosine", region, order) if ratio else IdentityFilter()
