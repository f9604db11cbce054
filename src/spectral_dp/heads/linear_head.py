"""What a one-shot head is in the end: the weights of a dense layer on the features as they are cached."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class LinearHead(NamedTuple):
    """The weights of a dense layer that classifies features, ``(B, n) -> (B, classes)``.

    Scaling a record's features does not change which class has the largest score, relative to the public centre. So the
    layer needs no normalisation of lengths, although the records were of unit length where the weights were computed.

    Attributes:
        weight: ``(classes, n)``, float32.
        bias: ``(classes,)``, float32. It undoes the centring.
    """

    weight: Tensor
    bias: Tensor

    @classmethod
    def on_centred(cls, weight: Tensor, centre: Tensor | None) -> LinearHead:
        """Returns the head that scores ``x`` by ``weight (x - centre)``."""
        bias = weight.new_zeros(len(weight)) if centre is None else -(weight @ centre.to(weight).flatten())
        return cls(weight.float(), bias.float())

    def module(self) -> nn.Linear:
        """Returns the head as a module, for deployment."""
        layer = nn.Linear(self.weight.shape[1], self.weight.shape[0])
        with torch.no_grad():
            layer.weight.copy_(self.weight)
            layer.bias.copy_(self.bias)
        return layer
