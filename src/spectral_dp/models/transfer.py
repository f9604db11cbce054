"""The dense layers of the paper's transfer networks, as heads on cached features of a frozen backbone.

- ``transfer1`` retrains "only a hidden layer with 1000 units and a softmax layer".
- ``transfer2`` and ``transfer3`` have dense layers of 160 units and of the classes, block-circulant with blocks of 16
  and 10, of which 8 coefficients each are kept. The paper also trains the last two and the last four convolutions of
  its ResNet-18 there. These are layers of the backbone (``spectral_dp.pretrained.train_only``), and frozen where
  features are cached: here both are the same head.
"""

from __future__ import annotations

import math
from functools import partial

from torch import Tensor, nn

from spectral_dp.models.networks import Activation, activation_layer


class TransferHead(nn.Module):
    """Two dense layers on features: a hidden one, and one of the classes.

    ``normalization`` is the identity until statistics of channels are set (see ``spectral_dp.features.normalization``).

    Args:
        input_shape: Shape of the features of one record: ``(512,)`` for the average of the last maps of a ResNet-18.
            Maps ``(C, H, W)`` are flattened, and can then be filtered over their positions.
        classes: Number of classes.
        activation: Activation function of the hidden layer.
        hidden: Units of the hidden layer.
    """

    def __init__(
        self, input_shape: tuple[int, ...], classes: int, activation: Activation = "tanh", *, hidden: int = 160
    ) -> None:
        super().__init__()
        if len(input_shape) == 3:
            self.input_layouts = {"fc1": input_shape}
        self.normalization: nn.Module = nn.Identity()
        self.fc1 = nn.Linear(math.prod(input_shape), hidden)
        self.activation = activation_layer(activation)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, D)`` or ``(B, C, H, W) -> (B, classes)``."""
        return self.fc2(self.activation(self.fc1(self.normalization(x).flatten(1))))


#: The head of Transfer1.
Transfer1 = partial(TransferHead, hidden=1000)
