"""Heads on cached features, those of the paper on scattering first, and the whole network on raw images.

The heads are those of Tramèr and Boneh (2021). What they read is cached (``spectral_dp.features``): maps ``(C, H, W)``,
or for the linear head also kept cosine coefficients ``(C, M)`` and vectors ``(D,)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from spectral_dp.features.extractor import Extractor
from spectral_dp.features.normalization import ChannelNormalization
from spectral_dp.models.networks import Activation, activation_layer

_LARGE = 128  # channels up to which the head for grey images is taken


class ScatterLinear(nn.Module):
    """A linear classifier on features of any shape, with weights that begin at zero.

    ``normalization`` is the identity until statistics of channels are set (see ``spectral_dp.features.normalization``).

    Args:
        input_shape: Shape of the features of one record.
        classes: Number of classes.
        feature_scale: What features are multiplied by. The bias has the input 1, so beside features of unit length it
            takes half of the squared norm that a gradient is clipped to. Beside features of length 10 it takes 1 %.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int, *, feature_scale: float = 1.0) -> None:
        super().__init__()
        self.feature_scale = feature_scale
        if len(input_shape) == 3:
            self.input_layouts = {"fc": input_shape}
        self.normalization: nn.Module = nn.Identity()
        self.fc = nn.Linear(math.prod(input_shape), classes)
        for parameter in self.fc.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, H, W)``, ``(B, C, M)`` or ``(B, D) -> (B, classes)``."""
        features = self.normalization(x).flatten(1)
        return self.fc(features if self.feature_scale == 1 else self.feature_scale * features)


class ScatterCNN(nn.Module):
    """A small convolutional network on maps, in two forms.

    - small, for scattering of grey images (81 channels): convolutions of 3 x 3 with 16 (stride 2) and 32 filters, dense
      layers of 32, classes;
    - large, for scattering of colour images (243 channels): convolutions of 3 x 3 with 64 filters, max-pooling, 64
      filters, one dense layer.

    Args:
        input_shape: The shape ``(C, H, W)`` of the maps.
        classes: The number of classes.
        activation: The activation function.
        large: Which form. By default it is the large one for more than 128 channels.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        classes: int,
        activation: Activation = "tanh",
        large: bool | None = None,
    ) -> None:
        super().__init__()
        if len(input_shape) != 3:
            raise ValueError(
                f"the convolutional head reads maps (C, H, W), got shape {input_shape}: leave feature_ratio out, take "
                "features that are maps, or the model linear"
            )
        channels, height, width = input_shape
        if min(height, width) < 2:
            raise ValueError(
                f"the convolutional head needs maps of at least 2 x 2, got {height} x {width}: enlarge the images"
            )
        self.normalization: nn.Module = nn.Identity()
        self.activation = activation_layer(activation)
        self.is_large = channels > _LARGE if large is None else large
        if self.is_large:
            map_shape = (64, height // 2, width // 2)
            self.conv1 = nn.Conv2d(channels, 64, 3, padding=1)
            self.conv2 = nn.Conv2d(64, 64, 3, padding=1)
            self.pool = nn.MaxPool2d(2)
            self.fc1 = nn.Linear(map_shape[0] * map_shape[1] * map_shape[2], classes)
        else:
            map_shape = (32, (height + 1) // 2, (width + 1) // 2)
            self.conv1 = nn.Conv2d(channels, 16, 3, stride=2, padding=1)
            self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
            self.fc1 = nn.Linear(map_shape[0] * map_shape[1] * map_shape[2], 32)
            self.fc2 = nn.Linear(32, classes)
        self.input_layouts = {"fc1": map_shape}

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, H, W) -> (B, classes)``."""
        x = self.activation(self.conv1(self.normalization(x)))
        if self.is_large:
            x = self.pool(x)
            return self.fc1(self.activation(self.conv2(x)).flatten(1))
        x = self.activation(self.conv2(x))
        return self.fc2(self.activation(self.fc1(x.flatten(1))))


class FeatureNetwork(nn.Module):
    """Front end, stages and a trained head as one network on raw images, for deployment.

    Its outputs are those that the head has on cached features: it rounds to half precision where the cache does.

    Args:
        extractor: The front end, such as :class:`~spectral_dp.features.Scattering`.
        stages: What is done to its features, such as ``[Prepared(groups=27)]``; none if the head reads them unchanged.
        head: The trained head.
        input_shape: Shape ``(C, H, W)`` of an image.
        mirrored: Whether features are averaged over the mirror image, as they were for training.
    """

    def __init__(
        self,
        extractor: Extractor,
        stages: Sequence[Extractor],
        head: nn.Module,
        input_shape: tuple[int, ...],
        *,
        mirrored: bool = False,
    ) -> None:
        super().__init__()
        if mirrored and not stages:
            raise ValueError("views are averaged by a stage: give stages=[Prepared()]")
        self.front_end = extractor.module(input_shape)
        shape = extractor.output_shape(input_shape)
        shape = (2, *shape) if mirrored else shape
        modules = []
        for stage in stages:
            modules.append(stage.module(shape))
            shape = stage.output_shape(shape)
        self.stages = nn.ModuleList(modules)
        self.head, self.mirrored = head, mirrored

    def forward(self, images: Tensor) -> Tensor:
        """``(B, C, H, W)``, bytes as they are cached, ``-> (B, classes)``."""
        features = self.front_end(images).half()
        if self.mirrored:
            features = torch.stack([features, self.front_end(images.flip(-1)).half()], dim=1)
        for stage in self.stages:
            features = stage(features).half()
        return self.head(features.float())


def with_channel_normalization(
    head: nn.Module, input_shape: tuple[int, ...], positions: int | None = None
) -> nn.Module:
    """Gives a head a normalisation of channels, whose statistics are still to be set, and returns the head.

    Args:
        head: A head with a ``normalization``.
        input_shape: The shape of the features that the head reads.
        positions: The number of positions of a map, if the head reads cosine coefficients of maps; None if not.
    """
    return with_normalization_module(head, ChannelNormalization(input_shape[0], positions))


def with_normalization_module(head: nn.Module, normalization: nn.Module) -> nn.Module:
    """Gives a head a normalisation of what it reads, and returns the head."""
    if not hasattr(head, "normalization"):
        raise ValueError(f"{type(head).__name__} has no place for a normalisation: give it an attribute normalization")
    head.normalization = normalization.to(next(head.parameters()).device)
    return head
