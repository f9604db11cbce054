"""Models of sequences of tokens: encoders like BERT, trained in full or in part, and a reader with an LSTM."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 10
VOCABULARY = 1000
TOKENS = 128
STEPS = 64
LAYERS = 4
HEADS = 4
RANK = 8


class Embeddings(nn.Module):
    """Words and their positions, which are looked up for each sample."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(TOKENS, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = (
            torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens).contiguous()
        )  # a view: Opacus fails
        return self.norm(self.words(tokens) + self.positions(positions))


class BertLayer(nn.Module):
    """A layer as BERT has it, with projections as separate dense layers and norms after the sums."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(2, (HEADS, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.out(attended))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class LowRank(nn.Module):
    """An adapter ``y = W x + B A x`` (LoRA) of a frozen dense layer."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen
        self.a = nn.Linear(frozen.in_features, RANK, bias=False)
        self.b = nn.Linear(RANK, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.frozen(x) + self.b(self.a(x))
        return y


class Classifier(nn.Module):
    """Embeddings, layers, and a head on what comes out for the first token, as BERT's."""

    def __init__(self, width: int, layers: nn.Module) -> None:
        super().__init__()
        self.embeddings, self.layers = Embeddings(width), layers
        self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layers(self.embeddings(tokens))
        y: Tensor = self.head(torch.tanh(self.pooler(x[:, 0])))
        return y


class LSTMReader(nn.Module):
    """Word embeddings, an LSTM, and a head on what comes out at the last step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        out, _ = self.lstm(self.words(tokens))
        y: Tensor = self.head(out[:, -1])
        return y


def bert(width: int) -> nn.Module:
    return Classifier(width, nn.Sequential(*(BertLayer(width) for _ in range(LAYERS))))


def torch_encoder(width: int) -> nn.Module:
    """The same by torch's own layers, whose attention computes its projections itself."""
    layer = nn.TransformerEncoderLayer(width, HEADS, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
    return Classifier(width, nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False))


def bert_lora(width: int) -> nn.Module:
    """Adapters of queries and values, and the head; everything else is frozen."""
    model = bert(width).requires_grad_(False)
    for layer in model.modules():
        if isinstance(layer, BertLayer):
            layer.query, layer.value = LowRank(layer.query), LowRank(layer.value)  # type: ignore[assignment]
    model.get_submodule("head").requires_grad_(True)
    return model


def bert_biases(width: int) -> nn.Module:
    """All biases, and the head (BitFit)."""
    model = bert(width)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias") or name.startswith("head."))
    return model


def bert_head(width: int) -> nn.Module:
    model = bert(width).requires_grad_(False)
    model.get_submodule("head").requires_grad_(True)
    return model
