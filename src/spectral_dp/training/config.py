"""What a private training run releases: the filters of every kind of layer, in one frozen value."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal, get_args

from torch import nn

from spectral_dp.gradients.rules.layer_config import LayerConfig, Support
from spectral_dp.gradients.rules.registry import find_rule
from spectral_dp.layers import BlockCirculantLinear
from spectral_dp.mechanism.filters import Filter, IdentityFilter, LowPassFilter, Order, PaperBandFilter, Region
from spectral_dp.mechanism.transforms import TransformName, get_transform


def plain_repr(value: object) -> str:
    """The ``repr`` of a setting without memory addresses, so that two runs can be compared."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


Band = Literal["lowest", "box", "paper"]


@dataclass(frozen=True)
class SpectralConfig:
    """Which coordinates of each layer's gradient are released. Everything here is privacy-relevant, nothing else is.

    The privacy guarantee is the same for every value of it; what changes is what is released under it. The defaults
    filter nothing: whether and where filtering gains accuracy is a matter of measurement.

    Attributes:
        conv_ratio: Fraction of the degrees of freedom to drop in convolutions.
        linear_ratio: The same in block-circulant layers, and in dense layers whose input layout is given. Other dense
            layers have no frequencies and are never filtered.
        conv_filter: A filter for convolutions in place of ``conv_ratio``.
        linear_filter: A filter for those dense layers in place of ``linear_ratio``.
        layers: What is released of particular layers, by name; wins over all else.
        input_layouts: Shape ``(C, H, W)``, ``(C, L)`` or ``(L,)`` of what was flattened into a dense layer, by layer
            name.
        conv_transform: Transform of convolution kernels; the cosine transform where None.
        support: ``"kernel"``, or ``"signal"`` as in the paper's Algorithm 2.
        order: ``"filter_then_clip"``, or the paper's ``"clip_then_filter"``.
        band: Which coordinates a ratio keeps: those of ``"lowest"`` frequency, a ``"box"`` of them, or the
            ``"paper"``'s first K with their mirror images (Fourier only).
    """

    conv_ratio: float = 0.0
    linear_ratio: float = 0.0
    conv_filter: Filter | None = None
    linear_filter: Filter | None = None
    layers: Mapping[str, LayerConfig] = field(default_factory=dict)
    input_layouts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    conv_transform: TransformName | None = None
    support: Support = "kernel"
    order: Order = "filter_then_clip"
    band: Band = "lowest"

    def __post_init__(self) -> None:
        for name in ("layers", "input_layouts"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        if self.band not in get_args(Band):
            raise ValueError(f"unknown band {self.band!r}: choose one of {', '.join(map(repr, get_args(Band)))}")
        if self.conv_transform is not None:
            get_transform(self.conv_transform)
        for kind in ("conv", "linear"):
            ratio, given = getattr(self, f"{kind}_ratio"), getattr(self, f"{kind}_filter")
            if given is not None and ratio != 0:
                raise ValueError(f"give {kind}_ratio={ratio} or {kind}_filter={given!r}, not both")
            self._low_pass(ratio)  # fails here, not at the first layer
        LayerConfig(support=self.support)

    @classmethod
    def dpsgd(cls) -> SpectralConfig:
        """Plain DP-SGD: nothing is filtered."""
        return cls()

    @classmethod
    def paper(cls, conv_ratio: float = 0.5, linear_ratio: float = 0.5, **others: Any) -> SpectralConfig:
        """The layout of the paper's Algorithms 2 to 4, made sound: noise on real coordinates, its band, its order."""
        paper = {"support": "signal", "order": "clip_then_filter", "band": "paper"} | others
        return cls(conv_ratio, linear_ratio, **paper)

    def layer_configs(self, model: nn.Module) -> dict[str, LayerConfig]:
        """Returns what is released of every layer of a model that is not plain, by layer name.

        Each layer gets a filter of its own, so that filters that learn do not share what they learnt.
        """
        modules = dict(model.named_modules())
        for name in (*self.layers, *self.input_layouts):
            if name not in modules:
                raise ValueError(f"the model has no layer named {name!r}: it has {', '.join(filter(None, modules))}")
        chosen: dict[str, LayerConfig] = {}
        copies: dict[int, LayerConfig] = {}  # layers that share a weight share what is released of it
        for name, module in modules.items():
            spectral = self.layers.get(name) or self._of(name, module)
            if spectral is not None and find_rule(module) is not None:
                chosen[name] = copies.setdefault(id(module._parameters.get("weight")), copy.deepcopy(spectral))
        return chosen

    def describe(self) -> dict[str, Any]:
        """Returns the settings as plain text, for a checkpoint or a privacy statement."""
        out = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: plain_repr(dict(v) if isinstance(v, Mapping) else v) for name, v in out.items()}

    def _of(self, name: str, module: nn.Module) -> LayerConfig | None:
        layout = self.input_layouts.get(name)
        if isinstance(module, nn.Conv1d | nn.Conv2d):
            filter = self.conv_filter or self._low_pass(self.conv_ratio)
            if isinstance(filter, IdentityFilter) and self.support == "kernel":
                return None
            return LayerConfig(filter, self.conv_transform, self.support, layout)
        if isinstance(module, BlockCirculantLinear):
            filter = self.linear_filter or self._low_pass(self.linear_ratio)
            return None if isinstance(filter, IdentityFilter) else LayerConfig(filter)
        if isinstance(module, nn.Linear) and layout is not None:
            filter = self.linear_filter or self._low_pass(self.linear_ratio, dense=True)
            return None if isinstance(filter, IdentityFilter) else LayerConfig(filter, input_layout=layout)
        return None

    def _low_pass(self, ratio: float, *, dense: bool = False) -> Filter:
        if self.band == "paper":
            # The band is one of Fourier coefficients; the input of a dense layer is filtered by cosines.
            return PaperBandFilter(ratio, self.order) if not dense else LowPassFilter(ratio, "box", self.order)
        region: Region = self.band
        filter = LowPassFilter(ratio, region, self.order)
        return IdentityFilter() if ratio == 0 else filter
