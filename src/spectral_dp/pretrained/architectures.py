"""The networks by name: how to make one, what it reads, and which of its parts are its head and its last stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import nn

from spectral_dp.pretrained.errors import WeightsError
from spectral_dp.pretrained.networks.efficientnet_lite import EfficientNetLite
from spectral_dp.pretrained.networks.minilm import MiniLM
from spectral_dp.pretrained.networks.mobilenet import MobileNetV2
from spectral_dp.pretrained.networks.resnet import resnet18, resnet50
from spectral_dp.pretrained.networks.resnext import ResNeXt29
from spectral_dp.pretrained.networks.wide_resnet import WideResNet

Means = tuple[float, float, float]

#: Mean and deviation of pixels from 0 to 1 that torchvision's networks expect, as published.
IMAGENET: tuple[Means, Means] = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

#: Of the CIFAR repositories: those of CIFAR-10, as published.
CIFAR: tuple[Means, Means] = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))

#: Of EfficientNet-Lite: (x - 127) / 128 for pixels from 0 to 255.
_LITE: tuple[Means, Means] = ((127 / 255,) * 3, (128 / 255,) * 3)


@dataclass(frozen=True)
class Architecture:
    """A network.

    Attributes:
        name: What users call it.
        factory: Called with ``classes``, None for no head; further options by keyword.
        head: How the names of its head begin.
        last_stage: How the names of its last stage begin: what fine-tuning trains besides the head.
        last_block: How the names of the last block of that stage begin, which is less to train.
        reads: Images, or texts as word pieces.
        image_size: Pixels a side that it was trained on.
        normalization: Mean and deviation of pixels from 0 to 1 that it expects.
        unused: How names in published files begin that the network has no use for.
        low_rank: How the dense layers are called that LoRA adds to; none for a network of convolutions.
    """

    name: str
    factory: Callable[..., nn.Module]
    head: str
    last_stage: tuple[str, ...]
    last_block: tuple[str, ...]
    reads: Literal["images", "text"] = "images"
    image_size: int = 224
    normalization: tuple[Means, Means] = IMAGENET
    unused: tuple[str, ...] = ()
    low_rank: tuple[str, ...] = ()

    def build(self, classes: int | None = None, **options: Any) -> nn.Module:
        """Returns the network, freshly initialised; without a head if ``classes`` is None."""
        return self.factory(classes=classes, **options)


def _lite(number: int, image_size: int) -> Architecture:
    # The last stage of one block, and the convolution before the head.
    last = {0: 15, 1: 20, 2: 20}[number]
    return Architecture(
        f"efficientnet-lite{number}",
        partial(EfficientNetLite, number),
        "_fc.",
        (f"_blocks.{last}.", "_conv_head.", "_bn1."),
        ("_conv_head.", "_bn1."),
        image_size=image_size,
        normalization=_LITE,
    )


ARCHITECTURES = (
    Architecture("resnet18", resnet18, "fc.", ("layer4.",), ("layer4.1.",)),
    Architecture("resnet50", resnet50, "fc.", ("layer4.",), ("layer4.2.",)),
    Architecture("mobilenet-v2", MobileNetV2, "classifier.", ("features.17.", "features.18."), ("features.18.",)),
    _lite(0, 224),
    _lite(1, 240),
    _lite(2, 260),
    Architecture(
        "resnext29",
        ResNeXt29,
        "classifier.",
        ("stage_3.",),
        ("stage_3.stage_3_bottleneck_2.",),
        image_size=32,
        normalization=CIFAR,
    ),
    Architecture(
        "wrn-28-10",
        WideResNet,
        "fc.",
        ("block3.", "bn1."),
        ("block3.layer.3.", "bn1."),
        image_size=32,
        normalization=CIFAR,
    ),
    Architecture(
        "minilm-l6",
        MiniLM,
        "classifier.",
        ("encoder.layer.5.",),
        ("encoder.layer.5.",),
        reads="text",
        unused=("pooler.", "embeddings.position_ids"),
        low_rank=("query", "value"),
    ),
)
NAMES = tuple(architecture.name for architecture in ARCHITECTURES)


def find_architecture(name: str) -> Architecture:
    """Looks a network up by its name."""
    for architecture in ARCHITECTURES:
        if architecture.name == name:
            return architecture
    raise WeightsError(f"there is no pretrained network {name!r}: choose one of {', '.join(NAMES)}")
