"""Networks by name, for the command line and for user code: the paper's own, and anyone's by import path."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from torch import nn

from spectral_dp.import_paths import imported_factory
from spectral_dp.layers import BlockCirculantLinear, convert_linear
from spectral_dp.models.networks import Activation, GroupNormPlace, LeNet5, Model1, Model2, Model3
from spectral_dp.models.scattering import ScatterCNN, ScatterLinear
from spectral_dp.models.transfer import Transfer1, TransferHead
from spectral_dp.pretrained import ARCHITECTURES, Architecture, find_architecture

Factory = Callable[..., nn.Module]
Reads = Literal["images", "features", "text"]


@dataclass(frozen=True)
class Entry:
    """A network with what Spectral-DP is recommended to use for it.

    Attributes:
        factory: Called with ``input_shape`` and ``classes``, and with ``activation`` if it takes one.
        spectral: Settings of ``spectral-dp train`` to use with ``--method spectral`` where the user gives none.
        reads: What the network is for: ``"images"``, cached ``"features"`` of records, or ``"text"``.
        features: The features (see ``spectral_dp.features.registry``) to read where the user names none.
    """

    factory: Factory
    spectral: Mapping[str, Any] = field(default_factory=dict)
    reads: Reads = "images"
    features: str | None = None


_REGISTRY: dict[str, Entry] = {}


def register_model(
    name: str,
    factory: Factory,
    *,
    spectral: Mapping[str, Any] | None = None,
    reads: Reads = "images",
    features: str | None = None,
) -> None:
    """Makes a network known by name; the latest registration wins. The arguments are those of :class:`Entry`."""
    _REGISTRY[name] = Entry(factory, MappingProxyType(dict(spectral or {})), reads, features)


def entry(name: str) -> Entry:
    """Returns a registered network, or the factory at an import path ``package.module:factory``."""
    if name in _REGISTRY:
        return _REGISTRY[name]
    if ":" in name:
        return Entry(imported_factory(name, "model"))
    raise ValueError(
        f"unknown model {name!r}: choose one of {', '.join(_REGISTRY)}, or give your own as package.module:factory"
    )


def spectral_of_head(name: str, head: str) -> dict[str, Any]:
    """Returns the paper's settings of a head of a pretrained network, and of convolutions that are trained with it.

    Args:
        name: Name of the pretrained network.
        head: Name of the head, such as ``"transfer2"``; nothing is recommended for ``"linear"``.
    """
    if head == "linear":
        return {}
    prefix, own = find_architecture(name).head, entry(head).spectral
    ratios = {f"{prefix}{layer}": ratio for layer, ratio in own.get("layer_ratios", {}).items()}
    return {**own, "layer_ratios": ratios, "conv_ratio": 0.2}


def build(
    name: str,
    *,
    input_shape: tuple[int, ...],
    classes: int,
    activation: Activation | None = None,
    group_norm: GroupNormPlace | None = None,
    weight_standardization: bool = False,
    block_size: int | None = None,
    last_block_size: int | None = None,
    dense_layers: Collection[str] = (),
) -> nn.Module:
    """Returns a freshly initialised network.

    Args:
        name: A registered name, or the import path ``package.module:factory`` of a factory of your own.
        input_shape: The shape ``(C, H, W)`` of an image, or of the features that the network reads.
        classes: The number of classes, which is the number of outputs.
        activation: The activation function of the paper's networks. A factory of your own gets it if it takes one.
        group_norm: Where Model2 and Model3 normalise groups of channels. If None, they do not.
        weight_standardization: Whether the inner convolutions of Model2 and Model3 standardise their weights.
        block_size: The block size of the block-circulant form. If None, the network stays dense.
        last_block_size: The block size of the last dense layer, if it is to differ. The paper uses 10.
        dense_layers: The names of layers to leave dense in the block-circulant form.

    >>> model = build("model1", input_shape=(1, 28, 28), classes=10, block_size=8, last_block_size=10)
    >>> model.fc2
    BlockCirculantLinear(in_features=2048, out_features=1024, block_size=8, bias=True, compression=8x)
    """
    factory = entry(name).factory
    options: dict[str, Any] = {"input_shape": input_shape, "classes": classes}
    asked: dict[str, Any] = {"activation": activation, "group_norm": group_norm}
    asked["weight_standardization"] = weight_standardization or None
    for option, value in ((option, value) for option, value in asked.items() if value is not None):
        taken = inspect.signature(factory).parameters
        if option not in taken and not any(p.kind is p.VAR_KEYWORD for p in taken.values()):
            raise ValueError(f"{name} takes no {option}: leave it out, or give its factory a parameter of that name")
        options[option] = value
    model = factory(**options)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name} must return a torch.nn.Module, got {type(model).__name__}")
    if block_size is None:
        if dense_layers:
            raise ValueError(f"without a block_size all layers are dense: leave out dense_layers {list(dense_layers)}")
        return model
    model = convert_linear(model, block_size, last_block_size, skip=dense_layers)
    for layer in model.modules():
        if isinstance(layer, BlockCirculantLinear):
            layer.reset_parameters()  # the closest circulant to a random matrix is small: start at the usual scale
    return model


def _of(architecture: Architecture) -> Factory:
    """Returns a factory of a pretrained network's form, with fresh weights; runs give it published ones."""

    def factory(input_shape: tuple[int, ...], classes: int) -> nn.Module:
        return architecture.build(classes)

    return factory


# The paper's settings: of blocks of 16 and of 10, eight coefficients each are kept. It gives none for Transfer1.
_TRANSFER = {"block_size": 16, "last_block_size": 10, "layer_ratios": {"fc1": 0.5, "fc2": 0.2}}
_TRANSFER1 = {"block_size": 8, "last_block_size": 10, "linear_ratio": 0.2}

# What measurement supports (see results/): filter dense layers over the image that feeds them, tie the others in
# blocks where they are many, and leave small convolution kernels alone. On LeNet-5 that neither costs nor gains.
register_model("model1", Model1, spectral={"block_size": 8, "dense_layers": ["fc1"], "layer_ratios": {"fc1": 0.8}})
register_model("lenet5", LeNet5, spectral={"layer_ratios": {"fc1": 0.4}})
register_model("model2", Model2)
register_model("model3", Model3)
register_model("linear", ScatterLinear, reads="features")
register_model("cnn", partial(ScatterCNN, large=True), reads="features")
register_model("cnn-small", partial(ScatterCNN, large=False), reads="features")
register_model("scatter-linear", ScatterLinear, reads="features", features="scattering")
register_model("scatter-cnn", ScatterCNN, reads="features", features="scattering")
register_model("transfer1", Transfer1, reads="features", features="resnet18", spectral=_TRANSFER1)
register_model("transfer2", TransferHead, reads="features", features="resnet18", spectral=_TRANSFER)
register_model("transfer3", TransferHead, reads="features", features="resnet18", spectral=_TRANSFER)
for _architecture in ARCHITECTURES:
    register_model(_architecture.name, _of(_architecture), reads=_architecture.reads)
