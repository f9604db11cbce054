"""The configuration of what a private training run releases: one filter for each kind of layer."""

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
from spectral_dp.mechanism.public_basis import PublicBasis
from spectral_dp.mechanism.transforms import TransformName, get_transform


def plain_repr(value: object) -> str:
    """Returns the ``repr`` of a setting without memory addresses, so that two runs can be compared."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


Band = Literal["lowest", "box", "paper"]


@dataclass(frozen=True)
class SpectralConfig:
    """Says which coordinates of each layer's gradient are released.

    The privacy guarantee is the same for every configuration; only what is released changes. By default nothing is
    filtered, because only a measurement can tell where filtering improves the accuracy.

    No setting is silently ignored: if one setting makes another meaningless, a ``ValueError`` is raised.

    Attributes:
        conv_ratio: The fraction of the real degrees of freedom to drop in convolutions.
        linear_ratio: The fraction to drop in block-circulant layers, and in dense layers that have an entry in
            ``input_layouts`` or ``input_bases``. Other dense layers have no frequencies and are never filtered.
        conv_filter: A filter for convolutions, in place of ``conv_ratio``.
        linear_filter: A filter for block-circulant and dense layers, in place of ``linear_ratio``.
        layers: The configuration of single layers, by layer name. It takes precedence over all other settings.
        input_layouts: For dense layers, the shape ``(C, H, W)``, ``(C, L)`` or ``(L,)`` of their input before it was
            flattened; for convolutions with ``support="signal"``, the shape of their input. By layer name.
        input_bases: For dense layers, a public basis in which their input is expressed, by layer name. All its axes are
            kept, unless a ratio or a filter for dense layers says otherwise (such as ``EigenvalueFilter``).
        conv_transform: The name of the transform of convolution kernels. None means the cosine transform.
        support: ``"kernel"`` filters the kernel's gradient; ``"signal"`` filters as in the paper's Algorithm 2.
        order: The order of filtering and clipping when a ratio is given: ``"filter_then_clip"`` (None means the same)
            or the paper's ``"clip_then_filter"``.
        band: Which coordinates a ratio keeps:

            * ``"lowest"`` (None means the same): those of the lowest frequencies.
            * ``"box"``: a box of low frequencies.
            * ``"paper"``: the first K Fourier coefficients of each axis and their mirror images, as in the paper. For
              dense layers this is the box, because their inputs are filtered by cosines, which have no mirror images.
    """

    conv_ratio: float | None = None
    linear_ratio: float | None = None
    conv_filter: Filter | None = None
    linear_filter: Filter | None = None
    layers: Mapping[str, LayerConfig] = field(default_factory=dict)
    input_layouts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    input_bases: Mapping[str, PublicBasis] = field(default_factory=dict)
    conv_transform: TransformName | None = None
    support: Support = "kernel"
    order: Order | None = None
    band: Band | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "input_layouts", "input_bases"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        if self.band not in (None, *get_args(Band)):
            raise ValueError(f"unknown band {self.band!r}: choose one of {', '.join(map(repr, get_args(Band)))}")
        if self.conv_transform is not None:
            get_transform(self.conv_transform)
        for kind in ("conv", "linear"):
            ratio, given = getattr(self, f"{kind}_ratio"), getattr(self, f"{kind}_filter")
            if given is not None and ratio is not None:
                raise ValueError(f"give {kind}_ratio={ratio} or {kind}_filter={given!r}, not both")
            self._low_pass(ratio)  # a wrong ratio fails here, not at the first layer
        LayerConfig(support=self.support)
        self._refuse_what_would_be_ignored()

    @classmethod
    def dpsgd(cls) -> SpectralConfig:
        """Returns the configuration of plain DP-SGD, which filters nothing."""
        return cls()

    @classmethod
    def paper(cls, conv_ratio: float = 0.5, linear_ratio: float = 0.5, **others: Any) -> SpectralConfig:
        """Returns the configuration of the paper's Algorithms 2 to 4: its support, its order and its band.

        Unlike in the paper, the noise is added to real coordinates, so the release is private.

        Args:
            conv_ratio: The fraction to drop in convolutions.
            linear_ratio: The fraction to drop in block-circulant and dense layers.
            **others: Further settings, which take precedence over those of the paper.
        """
        paper = {"support": "signal", "order": "clip_then_filter", "band": "paper"} | others
        return cls(conv_ratio, linear_ratio, **paper)

    def layer_configs(self, model: nn.Module) -> dict[str, LayerConfig]:
        """Returns the configuration of every layer of a model that is filtered, by layer name.

        Each layer gets its own copy of a filter, so that adaptive filters do not share state. Layers that share a
        weight share the copy.

        Raises:
            ValueError: If a setting names a layer that does not exist, or one on which it has no effect.
        """
        modules = dict(model.named_modules())
        for name in (*self.layers, *self.input_layouts, *self.input_bases):
            if name not in modules:
                raise ValueError(f"the model has no layer named {name!r}: it has {', '.join(filter(None, modules))}")
        for name in self.layers:
            if find_rule(modules[name]) is None:
                raise ValueError(
                    f"layers[{name!r}] acts on nothing: nothing is filtered of a {type(modules[name]).__name__}. Leave "
                    "it out, or name the layers within"
                )
        for name in self.input_layouts:
            self._check_layout(name, modules[name])
        for name in self.input_bases:
            if not isinstance(modules[name], nn.Linear):
                raise ValueError(
                    f"input_bases[{name!r}] acts on nothing, as {name!r} is a {type(modules[name]).__name__}: bases "
                    "are for nn.Linear"
                )
        chosen: dict[str, LayerConfig] = {}
        copies: dict[int, LayerConfig] = {}  # layers that share a weight share what is released of it
        for name, module in modules.items():
            spectral = self.layers.get(name) or self._of(name, module)
            if spectral is not None and find_rule(module) is not None:
                chosen[name] = copies.setdefault(id(module._parameters.get("weight")), copy.deepcopy(spectral))
        return chosen

    def describe(self) -> dict[str, Any]:
        """Returns the settings as text, by name, for a checkpoint or a privacy statement."""
        out = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: plain_repr(dict(v) if isinstance(v, Mapping) else v) for name, v in out.items()}

    @property
    def _filters_linear(self) -> bool:
        return self.linear_ratio is not None or self.linear_filter is not None

    def _refuse_what_would_be_ignored(self) -> None:
        """Raises ``ValueError`` if one setting makes another meaningless, and says what to write instead."""
        for name in ("order", "band"):
            value = getattr(self, name)
            for kind in ("conv", "linear"):
                if value is not None and (given := getattr(self, f"{kind}_filter")) is not None:
                    raise ValueError(
                        f"{name}={value!r} says how a ratio filters, and does not act on {kind}_filter={given!r}: "
                        f"leave {name} out, and make that filter as you want it, and one for the other kind of layer"
                    )
            if value is not None and self.conv_ratio is None and self.linear_ratio is None:
                raise ValueError(
                    f"{name}={value!r} says how a ratio filters, and there is none: give conv_ratio or linear_ratio, "
                    f"or leave {name} out"
                )
        if self.conv_transform is not None:
            if self.support == "signal" and self.conv_transform != "fourier":
                raise ValueError(
                    f"support='signal' is defined on the Fourier spectrum, not on {self.conv_transform!r}: leave "
                    "conv_transform out, or use support='kernel'"
                )
            if self.conv_ratio is None and self.conv_filter is None:
                raise ValueError(
                    f"conv_transform={self.conv_transform!r} changes nothing where convolutions are not filtered: give "
                    "conv_ratio or conv_filter, or leave conv_transform out"
                )
        if self.band == "paper" and self.conv_ratio is not None and self._kernel_transform != "fourier":
            raise ValueError(
                f"band='paper' is one of Fourier coefficients, not of {self._kernel_transform!r}: give "
                "conv_transform='fourier' or support='signal', or use band='box'"
            )
        if self.input_layouts and not self._filters_linear and self.support == "kernel":
            raise ValueError(
                "input_layouts say over what dense layers are to be filtered, and nothing filters them: give "
                "linear_ratio or linear_filter, or leave input_layouts out"
            )
        for field_name, of_layer in (("input_layouts", "input_layout"), ("input_bases", "input_basis")):
            if both := sorted(self.layers.keys() & getattr(self, field_name).keys()):
                raise ValueError(
                    f"layers wins over {field_name} for {', '.join(map(repr, both))}: give "
                    f"LayerConfig(..., {of_layer}=...) in layers, or leave one of the two out"
                )
        if both := sorted(self.input_layouts.keys() & self.input_bases.keys()):
            raise ValueError(
                f"input_layouts and input_bases both say in what to express the input of "
                f"{', '.join(map(repr, both))}: leave one of the two out"
            )

    @property
    def _kernel_transform(self) -> TransformName:
        return "fourier" if self.support == "signal" else self.conv_transform or "dct"

    def _check_layout(self, name: str, module: nn.Module) -> None:
        """Raises ``ValueError`` if an input layout is given for a layer that cannot use it."""
        dense = isinstance(module, nn.Linear) and self._filters_linear
        signal = isinstance(module, nn.Conv1d | nn.Conv2d) and self.support == "signal"
        if not dense and not signal:
            raise ValueError(
                f"input_layouts[{name!r}] acts on nothing, as {name!r} is a {type(module).__name__}: layouts are for "
                "nn.Linear, with linear_ratio or linear_filter, and for convolutions with support='signal'"
            )

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
        if isinstance(module, nn.Linear) and (basis := self.input_bases.get(name)) is not None:
            return LayerConfig(self.linear_filter or self._low_pass(self.linear_ratio, dense=True), input_basis=basis)
        if isinstance(module, nn.Linear) and layout is not None:
            filter = self.linear_filter or self._low_pass(self.linear_ratio, dense=True)
            return None if isinstance(filter, IdentityFilter) else LayerConfig(filter, input_layout=layout)
        return None

    def _low_pass(self, ratio: float | None, *, dense: bool = False) -> Filter:
        order = self.order or "filter_then_clip"
        if self.band == "paper" and ratio is not None:
            # The band is one of Fourier coefficients; the input of a dense layer is filtered by cosines.
            return PaperBandFilter(ratio, order) if not dense else LowPassFilter(ratio, "box", order)
        region: Region = "box" if self.band == "box" else "lowest"
        filter = LowPassFilter(ratio or 0.0, region, order)
        return filter if ratio else IdentityFilter()
