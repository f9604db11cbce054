"""From the settings of a run to the :class:`SpectralConfig` of its model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from spectral_dp.experiments.settings import ResolvedSettings, SettingsError
from spectral_dp.mechanism.filters import AdaptiveFilter, AnnealedFilter, Filter, IdentityFilter
from spectral_dp.training.config import SpectralConfig


def spectral_config(settings: ResolvedSettings, model: nn.Module, steps: int) -> SpectralConfig:
    """Returns what a run releases of each layer; ``steps`` is the length of the run.

    Dense layers that a model declares to be fed by an image (``input_layouts``) are filtered over that image.
    """
    if settings.method != "spectral":
        return SpectralConfig.dpsgd()
    layouts = {
        name: shape
        for name, shape in getattr(model, "input_layouts", {}).items()
        if isinstance(model.get_submodule(name), nn.Linear)
    }
    make_filter = _filter_maker(settings, steps)
    common: dict[str, Any] = {
        "conv_transform": settings.conv_transform or ("fourier" if settings.band == "paper" else None),
        "support": settings.support,
    }

    def config(conv_ratio: float, linear_ratio: float, **others: Any) -> SpectralConfig:
        common["input_layouts"] = {
            name: shape for name, shape in layouts.items() if name not in others.get("layers", ())
        }
        if make_filter is None:
            return SpectralConfig(
                conv_ratio, linear_ratio, order=settings.order, band=settings.band, **common, **others
            )
        return SpectralConfig(
            conv_filter=make_filter(conv_ratio), linear_filter=make_filter(linear_ratio), **common, **others
        )

    layers = {}
    for name, ratio in settings.layer_ratios.items():
        released = config(ratio, ratio).layer_configs(model).get(name)
        if released is None and ratio > 0:
            filterable = ", ".join(config(0.5, 0.5).layer_configs(model)) or "none"
            raise SettingsError(f"layer_ratios: {name!r} is no layer with a spectrum; this model has {filterable}")
        if released is not None:
            layers[name] = released
    return config(settings.conv_ratio, settings.linear_ratio, layers=layers)


def _filter_maker(settings: ResolvedSettings, steps: int) -> Callable[[float], Filter] | None:
    """Returns how to make a filter of a ratio; None for the low-pass that SpectralConfig makes itself."""
    if settings.filter == "low-pass":
        return None
    if settings.band == "paper":
        raise SettingsError(
            f"the paper's band is a fixed one: use filter low-pass, or another band than {settings.band}"
        )
    region, order = settings.band, settings.order
    if settings.filter == "adaptive":
        return lambda ratio: AdaptiveFilter(ratio, region=region, order=order)
    return lambda ratio: AnnealedFilter(ratio, 0.0, steps, "cosine", region, order) if ratio else IdentityFilter()
