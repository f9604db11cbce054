"""MiniLM-L6 (Wang et al. 2020), an encoder like BERT for English text, with the parameter names of BERT."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spectral_dp.pretrained.networks.backbone import linear_head

_EPSILON = 1e-12  # of LayerNorm, as in BERT


class MiniLM(nn.Module):
    """Encodes texts, given as numbers of word pieces, and averages over the pieces.

    Padding (number 0) is ignored. There is no dropout: a frozen encoder has no use for it, and private training
    seldom overfits.

    Args:
        classes: Number of classes of the head; None for no head.
        layers: Number of layers.
        width: Number of features of a word piece.
        heads: Number of attention heads.
        hidden: Width of the feed-forward layers.
        vocabulary: Number of word pieces.
        positions: The largest number of word pieces in a text.
    """

    def __init__(
        self,
        classes: int | None = None,
        *,
        layers: int = 6,
        width: int = 384,
        heads: int = 12,
        hidden: int = 1536,
        vocabulary: int = 30522,
        positions: int = 512,
    ) -> None:
        super().__init__()
        self.width, self.positions = width, positions
        self.embeddings = _Embeddings(vocabulary, positions, width)
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList(_Layer(width, heads, hidden) for _ in range(layers))
        self.classifier = linear_head(width, classes)

    def maps(self, pieces: Tensor) -> Tensor:
        """Returns the features of each word piece: ``(B, L)``, integers, ``-> (B, L, width)``."""
        if pieces.ndim != 2 or pieces.is_floating_point() or pieces.shape[1] > self.positions:
            raise ValueError(
                f"expected numbers of at most {self.positions} word pieces, integers of shape (B, L), got "
                f"{pieces.dtype} of shape {tuple(pieces.shape)}: encode texts with WordPiece"
            )
        mask = _mask(pieces)[:, None, None]
        x = self.embeddings(pieces.long())
        for layer in self.encoder.layer:  # type: ignore[union-attr]
            x = layer(x, mask)
        return x

    def pooled(self, pieces: Tensor) -> Tensor:
        """Returns the average over the word pieces of each text: ``(B, L) -> (B, width)``."""
        features = self.maps(pieces)
        weights = _mask(pieces)[..., None].to(features.dtype)
        return (features * weights).sum(1) / weights.sum(1)

    def forward(self, pieces: Tensor) -> Tensor:
        """``(B, L) -> (B, classes)``; without a head, ``(B, width)``."""
        return self.classifier(self.pooled(pieces))


class _Embeddings(nn.Module):
    def __init__(self, vocabulary: int, positions: int, width: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocabulary, width, padding_idx=0)
        self.position_embeddings = nn.Embedding(positions, width)
        self.token_type_embeddings = nn.Embedding(2, width)
        self.LayerNorm = nn.LayerNorm(width, _EPSILON)

    def forward(self, pieces: Tensor) -> Tensor:
        positions = torch.arange(pieces.shape[1], device=pieces.device).expand_as(pieces)
        embedded = self.word_embeddings(pieces) + self.token_type_embeddings(torch.zeros_like(pieces))
        return self.LayerNorm(embedded + self.position_embeddings(positions))


class _SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        parts = (self.query, self.key, self.value)
        query, key, value = (part(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value, mask)
        return attended.transpose(1, 2).flatten(2)


class _Output(nn.Module):
    """A dense layer, the shortcut and the normalisation, after attention and after the feed-forward layer."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, width)
        self.LayerNorm = nn.LayerNorm(width, _EPSILON)

    def forward(self, x: Tensor, shortcut: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + shortcut)


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention, self.intermediate = nn.Module(), nn.Module()
        self.attention.self = _SelfAttention(width, heads)
        self.attention.output = _Output(width, width)
        self.intermediate.dense = nn.Linear(width, hidden)
        self.output = _Output(hidden, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.attention.output(self.attention.self(x, mask), x)  # type: ignore[operator]
        return self.output(F.gelu(self.intermediate.dense(x)), x)  # type: ignore[operator]


def _mask(pieces: Tensor) -> Tensor:
    """Returns which word pieces are text; the first one always is, so that no text is empty."""
    return torch.cat([torch.ones_like(pieces[:, :1], dtype=torch.bool), pieces[:, 1:] != 0], dim=1)
