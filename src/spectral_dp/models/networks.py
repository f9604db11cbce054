"""The networks that the paper trains from scratch (its appendix, "Model architectures"), for images of any size.

Each is a plain dense network; ``registry.build`` makes the block-circulant form. A network may say, in
``input_layouts``, which of its dense layers is fed by an image or a feature map, and of which shape: there a dense
layer has frequencies that can be filtered (``SpectralConfig.input_layouts``).
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor, nn

Activation = Literal["tanh", "relu"]
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

    def __init__(self, input_shape: Shape, classes: int, activation: Activation = "tanh") -> None:
        super().__init__(input_shape, activation, smallest=16)
        channels, _, _ = input_shape
        self.conv1 = nn.Conv2d(channels, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.conv3 = nn.Conv2d(64, 64, 3, padding=1)
        self.conv4 = nn.Conv2d(64, 64, 3, padding=1)
        self.conv5 = nn.Conv2d(64, classes, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, H, W) -> (B, classes)``."""
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = self.pool(self.activation(conv(x)))
        return self.conv5(x).mean((2, 3))


class Model3(_Network):
    """Three pairs of 3 x 3 convolutions (32, 64, 128) with max-pooling after each, then dense layers 120, classes."""

    def __init__(self, input_shape: Shape, classes: int, activation: Activation = "tanh") -> None:
        super().__init__(input_shape, activation, smallest=8)
        channels, height, width = input_shape
        map_shape = (128, height // 8, width // 8)
        self.input_layouts = {"fc1": map_shape}
        self.conv1 = nn.Conv2d(channels, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 32, 3, padding=1)
        self.conv3 = nn.Conv2d(32, 64, 3, padding=1)
        self.conv4 = nn.Conv2d(64, 64, 3, padding=1)
        self.conv5 = nn.Conv2d(64, 128, 3, padding=1)
        self.conv6 = nn.Conv2d(128, 128, 3, padding=1)
        self.fc1 = nn.Linear(map_shape[0] * map_shape[1] * map_shape[2], 120)
        self.fc2 = nn.Linear(120, classes)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, H, W) -> (B, classes)``."""
        pairs = ((self.conv1, self.conv2), (self.conv3, self.conv4), (self.conv5, self.conv6))
        for first, second in pairs:
            x = self.pool(self.activation(second(self.activation(first(x)))))
        return self.fc2(self.activation(self.fc1(x.flatten(1))))


def activation_layer(name: Activation) -> nn.Module:
    """Returns the activation function of this name."""
    if name not in get_args(Activation):
        listed = ", ".join(map(repr, get_args(Activation)))
        raise ValueError(f"unknown activation {name!r}: choose one of {listed}")
    return nn.Tanh() if name == "tanh" else nn.ReLU()
