"""A frozen pretrained network as a front end: the average of its last maps, or the maps themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

from spectral_dp.features.errors import FeatureError
from spectral_dp.features.extractor import FixedExtractor, Shape
from spectral_dp.features.registry import ImageFacts, register_extractor
from spectral_dp.pretrained.architectures import ARCHITECTURES, Architecture, find_architecture
from spectral_dp.pretrained.folding import fold_batch_norms
from spectral_dp.pretrained.inputs import Interpolation, network_pixels, without_padding
from spectral_dp.pretrained.weights import PretrainedWeights, find_weights
from spectral_dp.pretrained.wordpiece import WordPiece

_PIXELS_AT_ONCE = 150_000  # three images of 224 x 224: maps of more leave the processor's cache between two layers


@dataclass(frozen=True)
class Backbone(FixedExtractor):
    """A pretrained network as an :class:`~spectral_dp.features.Extractor`.

    Images keep the size in which they were published and are resized inside the module, so that a cache is of the data
    set itself. Grey images are repeated in three channels. Texts are ``(L,)`` bytes of UTF-8 with zeros behind them, or
    already numbers of word pieces, of a larger type of integers.

    Attributes:
        weights: The weights, as :func:`~spectral_dp.pretrained.find_weights` finds them.
        image_size: Pixels a side to which images are resized. None is the size that the network was trained on.
        maps: Whether features are the last maps ``(C, h, w)``, rather than their average ``(C,)``.
        interpolation: How images are resized; antialiased where they get smaller.
        length: The number of word pieces that are read of a text.
    """

    weights: PretrainedWeights
    image_size: int | None = None
    maps: bool = False
    interpolation: Interpolation = "bilinear"
    length: int = 256

    def __post_init__(self) -> None:
        if self.interpolation not in get_args(Interpolation):
            choices = ", ".join(get_args(Interpolation))
            raise FeatureError(f"unknown interpolation {self.interpolation!r}: choose one of {choices}")
        if self.image_size is not None and not (isinstance(self.image_size, int) and self.image_size >= 1):
            raise FeatureError(f"the size of an image is a number of pixels, at least 1, got {self.image_size!r}")
        if not (isinstance(self.length, int) and self.length >= 2):
            raise FeatureError(f"the length of a text is a number of word pieces, at least 2, got {self.length!r}")
        if self.maps not in (False, True):
            raise FeatureError(f"maps is 1 for the last maps, or 0 for their average, got {self.maps!r}")
        if self._reads_text and (self.maps or self.image_size is not None):
            raise FeatureError(
                f"{self.weights.name} reads texts, which have no maps and no image size: leave these out"
            )

    @property
    def name(self) -> str:
        """The name of the network."""
        return self.weights.name

    @property
    def settings(self) -> Mapping[str, Any]:
        """Everything that decides the features, with the checksum of the weights."""
        facts: dict[str, Any] = {"weights": self.weights.sha256, "version": self.version}
        if self.weights.options:
            facts["options"] = dict(self.weights.options)
        if self._reads_text:
            return facts | {"length": self.length, "vocabulary": self.weights.tokenizer().sha256}
        return facts | {
            "image_size": self._side,
            "maps": bool(self.maps),
            "interpolation": self.interpolation,
            "mean": list(self.weights.mean),
            "std": list(self.weights.std),
        }

    def output_shape(self, input_shape: Shape) -> Shape:
        """Returns ``(C,)``, or ``(C, h, w)`` for maps."""
        if self._reads_text:
            if len(input_shape) != 1:
                raise FeatureError(f"{self.name} reads texts (L,), got records of shape {input_shape}")
            return (_text_width(find_architecture(self.name)),)
        if len(input_shape) != 3 or input_shape[0] not in (1, 3):
            raise FeatureError(f"expected images of 1 or 3 channels, (C, H, W), got shape {input_shape}")
        maps = _map_shape(find_architecture(self.name), self._side)
        return maps if self.maps else maps[:1]

    def _module(self, input_shape: Shape) -> nn.Module:
        network = fold_batch_norms(self.weights.network())
        if self._reads_text:
            return _TextFeatures(network, self.weights.tokenizer(), self.length)
        return _ImageFeatures(self, network, self._side)

    @property
    def assumption(self) -> str:
        """What the privacy statement says of where the weights come from."""
        return self.weights.assumption

    @property
    def _reads_text(self) -> bool:
        return find_architecture(self.weights.name).reads == "text"

    @property
    def _side(self) -> int:
        return self.image_size or find_architecture(self.weights.name).image_size


class _ImageFeatures(nn.Module):
    """``(B, C, H, W)``, bytes or numbers from 0 to 1, to ``(B, C')`` or ``(B, C', h, w)``."""

    def __init__(self, settings: Backbone, network: nn.Module, side: int) -> None:
        super().__init__()
        # Neighbouring channels in memory are what small convolutions are fastest on.
        self.network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.settings, self.side = settings, side
        self.rows_at_once = max(1, _PIXELS_AT_ONCE // side**2)

    def forward(self, images: Tensor) -> Tensor:
        weights, interpolation = self.settings.weights, self.settings.interpolation
        pixels = network_pixels(images, self.side, weights.mean, weights.std, interpolation)
        features = self.network.maps(pixels) if self.settings.maps else self.network.pooled(pixels)
        return features.contiguous()


class _TextFeatures(nn.Module):
    """``(B, L)``, bytes of UTF-8 or word pieces, to ``(B, width)``."""

    def __init__(self, network: nn.Module, tokenizer: WordPiece, length: int) -> None:
        super().__init__()
        self.network, self.tokenizer, self.length = network, tokenizer, length

    def forward(self, texts: Tensor) -> Tensor:
        if texts.dtype == torch.uint8:
            # A text that was cut off may end within a character, which is then left out.
            decoded = (bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in texts)
            texts = self.tokenizer.encode(decoded, length=self.length)
        return self.network.pooled(without_padding(texts[:, : self.length]))  # type: ignore[operator]


@lru_cache
def _map_shape(architecture: Architecture, side: int) -> Shape:
    with torch.device("meta"):
        network = architecture.build().eval()
    # One image through whatever is in memory: on the device meta, torch would load its compiler to tell a shape.
    with torch.no_grad():
        try:
            maps = network.to_empty(device="cpu").maps(torch.zeros(1, 3, side, side))  # type: ignore[operator]
            return tuple(maps.shape[1:])
        except RuntimeError as error:
            raise FeatureError(
                f"images of {side} x {side} pixels are too small for {architecture.name}: enlarge them"
            ) from error


@lru_cache
def _text_width(architecture: Architecture) -> int:
    with torch.device("meta"):
        width = architecture.build().width
    assert isinstance(width, int)
    return width


def image_backbone(
    name: str,
    images: ImageFacts,
    *,
    weights: str | None = None,
    image_size: int | None = None,
    maps: bool = False,
    interpolation: Interpolation = "bilinear",
    cache: str | None = None,
) -> Backbone:
    """Returns a pretrained network of images as a front end.

    Args:
        name: Name of the network; ``spectral-dp weights list`` has them.
        images: Facts of the images, which it does not need.
        weights: A file of your own. If None, the weights are those that ``spectral-dp weights get`` put into the cache.
        image_size: Pixels a side to which images are resized. None is the size that the network was trained on.
        maps: Whether features are the last maps, rather than their average.
        interpolation: How images are resized.
        cache: Cache directory to use instead of the user's.
    """
    return Backbone(find_weights(name, weights, cache=cache), image_size, maps, interpolation)


def text_backbone(
    name: str, texts: ImageFacts, *, weights: str | None = None, length: int = 256, cache: str | None = None
) -> Backbone:
    """Returns a pretrained network of texts as a front end, which reads ``length`` word pieces of a text."""
    return Backbone(find_weights(name, weights, cache=cache), length=length)


for _architecture in ARCHITECTURES:
    register_extractor(
        _architecture.name,
        partial(text_backbone if _architecture.reads == "text" else image_backbone, _architecture.name),
        assumption="a pretrained network, whose training data are taken to be public",
    )
