"""What is trained: the models, and batches of random numbers, or of random tokens, in the shape of their data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import sequence_models
import torch
from sequence_models import CLASSES
from torch import Tensor, nn
from torch.nn import functional as F

from spectral_dp import convert_linear, models

TOKENS = 64


class TransformerBlock(nn.Module):
    """Attention over tokens with projections as separate dense layers, then a two-layer network, then a classifier."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(2, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        attended = (torch.softmax(q @ k.transpose(2, 3) / q.shape[-1] ** 0.5, -1) @ v).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        x = x + self.down(F.relu(self.up(self.norm2(x))))
        return self.head(x.mean(1))


def perceptron(width: int) -> nn.Module:
    """Three dense layers, of which the middle one grows with the square of the width."""
    return nn.Sequential(
        nn.Linear(784, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, CLASSES)
    )


def convolutions(width: int) -> nn.Module:
    """Three convolutions at full resolution, of which two grow with the square of the width."""
    layers = [nn.Conv2d(n, width, 3, padding=1) for n in (3, width, width)]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))
    return nn.Sequential(*(module for layer in layers for module in (layer, nn.Tanh())), *head)


def one_layer(width: int) -> nn.Module:
    return nn.Linear(width, width)


#: Networks by name, and the shape of their input; both for a width where there is one.
_OWN: dict[str, tuple[Callable[[int], nn.Module], Callable[[int], tuple[int, ...]]]] = {
    "transformer": (TransformerBlock, lambda width: (TOKENS, width)),
    "mlp": (perceptron, lambda width: (784,)),
    "conv stack": (convolutions, lambda width: (3, 16, 16)),
    "layer": (one_layer, lambda width: (width,)),
}
#: Models of sequences by name, and how many tokens a sample has.
_SEQUENCES: dict[str, tuple[Callable[[int], nn.Module], int]] = {
    "bert": (sequence_models.bert, sequence_models.TOKENS),
    "torch encoder": (sequence_models.torch_encoder, sequence_models.TOKENS),
    "bert, lora": (sequence_models.bert_lora, sequence_models.TOKENS),
    "bert, biases": (sequence_models.bert_biases, sequence_models.TOKENS),
    "bert, head": (sequence_models.bert_head, sequence_models.TOKENS),
    "lstm": (sequence_models.LSTMReader, sequence_models.STEPS),
}
_IMAGES = {"model1": (1, 28, 28), "lenet5": (1, 28, 28), "model2": (3, 32, 32), "model3": (3, 32, 32)}


@dataclass(frozen=True)
class Workload:
    """A model and a batch size.

    Attributes:
        model: ``"model1"``, ``"lenet5"``, ``"model2"``, ``"model3"``; ``"transformer"``, ``"mlp"``, ``"conv stack"`` or
            ``"layer"``; ``"bert"``, ``"torch encoder"``, ``"bert, lora"``, ``"bert, biases"``, ``"bert, head"`` or
            ``"lstm"``.
        batch_size: How many samples a step sees.
        block_size: Makes the dense layers block-circulant, except for contestants that train the dense form.
        width: Of all models but the first four.
        channels_last: Whether images have their channels last in memory, as CPUs convolve them quickest.
    """

    model: str
    batch_size: int
    block_size: int | None = None
    width: int = 256
    channels_last: bool = False

    def build(self, *, dense: bool = False) -> nn.Module:
        torch.manual_seed(0)
        block_size = None if dense else self.block_size
        if self.model in _IMAGES:
            shape = _IMAGES[self.model]
            return models.build(
                self.model, input_shape=shape, classes=CLASSES, block_size=block_size, last_block_size=10
            )
        if self.is_of_sequences:
            return _SEQUENCES[self.model][0](self.width)
        model = _OWN[self.model][0](self.width)
        if block_size is None:
            return model
        return convert_linear(model, block_size, skip=["head"] if self.model == "transformer" else [])

    @property
    def convolves(self) -> bool:
        return self.model in ("lenet5", "model2", "model3", "conv stack")

    @property
    def is_of_sequences(self) -> bool:
        return self.model in _SEQUENCES

    def batch(self) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        y = torch.randint(CLASSES, (self.batch_size,))
        if self.is_of_sequences:
            return torch.randint(sequence_models.VOCABULARY, (self.batch_size, _SEQUENCES[self.model][1])), y
        shape = _IMAGES[self.model] if self.model in _IMAGES else _OWN[self.model][1](self.width)
        x = torch.randn(self.batch_size, *shape)
        if self.channels_last and self.convolves:
            x = x.contiguous(memory_format=torch.channels_last)
        # A layer by itself stands for one inside a network, which has a gradient to hand on.
        x.requires_grad_(self.model == "layer")
        return x, y
