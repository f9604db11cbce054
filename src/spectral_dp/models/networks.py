"""The networks that the paper trains from scratch (its appendix, "Model architectures"), for images of any size.

Each is a plain dense network; ``registry.build`` makes the block-circulant form. A network may say, in
``input_layouts``, which of its dense layers is fed by an image or a feature map, and of which shape: there a dense
layer has frequencies that can be filtered (``SpectralConfig.input_layouts``).
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor, nn

from spectral_dp.mechanism.filters import check_choice
from spectral_dp.models.standardized_conv import StandardizedConv2d

Activation = Literal["tanh", "relu"]
#: Group normalisation before or after each activation of a convolution.
GroupNormPlace = Literal["before", "after"]
Shape = tuple[int, int, int]


class _Network(nn.Module):
    """What the networks share: an activation function, pooling, and images that must not be too small for it."""

    def __init__(self, input_shape: Shape, activation: Activation, smallest: int = 1) -> None:
        super().__init__()
        if len(input_shape) != 3:
            raise ValueError(
                f"{type(self).__name__.lower()} reads images or maps (C, H, W), got features of shape {input_shape}: "
                "take the model linear"
            )
        if min(input_shape[1:]) < smallest:
            raise ValueError(
                f"{type(self).__name__.lower()} needs images of at least {smallest} x {smallest} pixels, got "
                f"{input_shape[1]} x {input_shape[2]}: enlarge them (--image-size {smallest}), or take another model"
            )
        self.activation = activation_layer(activation)
        self.pool = nn.MaxPool2d(2)

    def _normalise(self, group_norm: GroupNormPlace | None, *channels: int) -> None:
        """Makes the group normalisations of convolutions with so many channels, or none."""
        if group_norm not in (None, *get_args(GroupNormPlace)):
            raise ValueError(
                f"group_norm must be one of {', '.join(get_args(GroupNormPlace))} or None, got {group_norm!r}"
            )
        self.group_norm = group_norm
        self.norms = nn.ModuleList([nn.GroupNorm(8, each) for each in channels] if group_norm else [])

    def _activated(self, x: Tensor, number: int) -> Tensor:
        """Returns the activation of the output of a convolution, normalised before, after, or not at all."""
        if self.group_norm == "before":
            return self.activation(self.norms[number](x))
        x = self.activation(x)
        return self.norms[number](x) if self.group_norm == "after" else x


class Model1(_Network):
    """Four dense layers: 2048, 1024, 160, classes (784-2048-1024-160-10 on MNIST)."""

    def __init__(self, input_shape: Shape, classes: int, activation: Activation = "tanh") -> None:
        super().__init__(input_shape, activation)
        channels, height, width = input_shape
        self.input_layouts = {"fc1": input_shape}
        self.fc1 = nn.Linear(channels * height * width, 2048)
        self.fc2 = nn.Linear(2048, 1024)
        self.fc3 = nn.Linear(1024, 160)
        self.fc4 = nn.Linear(160, classes)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, H, W) -> (B, classes)``."""
        x = self.activation(self.fc1(x.flatten(1)))
        x = self.activation(self.fc2(x))
        x = self.activation(self.fc3(x))
        return self.fc4(x)


class LeNet5(_Network):
    """LeNet-5: two convolutions of 5 x 5 with 6 and 16 filters, then dense layers of 120, 84 and classes."""

    def __init__(self, input_shape: Shape, classes: int, activation: Activation = "tanh") -> None:
        super().__init__(input_shape, activation, smallest=12)
        channels, height, width = input_shape
        map_shape = (16, (height // 2 - 4) // 2, (width // 2 - 4) // 2)
        self.input_layouts = {"fc1": map_shape}
        self.conv1 = nn.Conv2d(channels, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(map_shape[0] * map_shape[1] * map_shape[2], 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, H, W) -> (B, classes)``."""
        x = self.pool(self.activation(self.conv1(x)))
        x = self.pool(self.activation(self.conv2(x)))
        x = self.activation(self.fc1(x.flatten(1)))
        x = self.activation(self.fc2(x))
        return self.fc3(x)


class Model2(_Network):
    """Five convolutions of 3 x 3 (32, 64, 64, 64, classes) with max-pooling between them, averaged over positions.

    It has no dense layer, so its block-circulant form is the network itself.
    """

    def __init__(
        self,
        input_shape: Shape,
        classes: int,
        activation: Activation = "tanh",
        group_norm: GroupNormPlace | None = None,
        weight_standardization: bool = False,
    ) -> None:
        super().__init__(input_shape, activation, smallest=16)
        self._normalise(group_norm, 32, 64, 64, 64)
        channels, _, _ = input_shape
        conv = _convolution(weight_standardization)
        self.conv1 = conv(channels, 32, 3, padding=1)
        self.conv2 = conv(32, 64, 3, padding=1)
        self.conv3 = conv(64, 64, 3, padding=1)
        self.conv4 = conv(64, 64, 3, padding=1)
        self.conv5 = nn.Conv2d(64, classes, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, H, W) -> (B, classes)``."""
        for number, conv in enumerate((self.conv1, self.conv2, self.conv3, self.conv4)):
            x = self.pool(self._activated(conv(x), number))
        return self.conv5(x).mean((2, 3))


class Model3(_Network):
    """Three pairs of 3 x 3 convolutions (32, 64, 128) with max-pooling after each, then dense layers 120, classes."""

    def __init__(
        self,
        input_shape: Shape,
        classes: int,
        activation: Activation = "tanh",
        group_norm: GroupNormPlace | None = None,
        weight_standardization: bool = False,
    ) -> None:
        super().__init__(input_shape, activation, smallest=8)
        self._normalise(group_norm, 32, 32, 64, 64, 128, 128)
        channels, height, width = input_shape
        map_shape = (128, height // 8, width // 8)
        self.input_layouts = {"fc1": map_shape}
        conv = _convolution(weight_standardization)
        self.conv1 = conv(channels, 32, 3, padding=1)
        self.conv2 = conv(32, 32, 3, padding=1)
        self.conv3 = conv(32, 64, 3, padding=1)
        self.conv4 = conv(64, 64, 3, padding=1)
        self.conv5 = conv(64, 128, 3, padding=1)
        self.conv6 = conv(128, 128, 3, padding=1)
        self.fc1 = nn.Linear(map_shape[0] * map_shape[1] * map_shape[2], 120)
        self.fc2 = nn.Linear(120, classes)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, H, W) -> (B, classes)``."""
        pairs = ((self.conv1, self.conv2), (self.conv3, self.conv4), (self.conv5, self.conv6))
        for number, (first, second) in enumerate(pairs):
            x = self._activated(first(x), 2 * number)
            x = self.pool(self._activated(second(x), 2 * number + 1))
        return self.fc2(self.activation(self.fc1(x.flatten(1))))


def _convolution(weight_standardization: bool) -> type[nn.Conv2d]:
    """Returns the kind of the inner convolutions. One that gives the scores stays plain, so that they have any size."""
    return StandardizedConv2d if weight_standardization else nn.Conv2d


def activation_layer(name: Activation) -> nn.Module:
    """Returns the activation function of this name."""
    check_choice("activation", name, Activation)
    return nn.Tanh() if name == "tanh" else nn.ReLU()
