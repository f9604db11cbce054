"""Attention whose projections are layers of their own, so that they can be block-circulant and filtered."""

from __future__ import annotations

import math
from typing import Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class SplitAttention(nn.Module):
    """Multi-head attention with a dense layer for each of queries, keys, values and output.

    It computes what ``nn.MultiheadAttention`` computes, with the same arguments. That module holds the weights of three
    projections as one parameter and reads all of them directly, so none of them can be replaced by another layer.
    Here ``q_proj``, ``k_proj``, ``v_proj`` and ``out_proj`` are called as layers. ``convert_linear`` uses it.

    Args:
        embed_dim: Number of features of queries and outputs.
        num_heads: Number of heads, which divides ``embed_dim``.
        dropout: Probability with which attention weights are dropped in training.
        bias: Whether the four layers have biases.
        kdim: Number of features of keys; by default ``embed_dim``.
        vdim: Number of features of values; by default ``embed_dim``.
        batch_first: Whether samples are in the first dimension of inputs and outputs, or in the second.
    """

    #: Read by ``nn.TransformerEncoderLayer``, whose fused path needs it and is not taken without it.
    in_proj_bias = None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
    ) -> None:
        super().__init__()
        if embed_dim % num_heads:
            raise ValueError(f"{embed_dim} features cannot be divided among {num_heads} heads: choose a divisor")
        self.embed_dim, self.num_heads, self.dropout, self.batch_first = embed_dim, num_heads, dropout, batch_first
        self.q_proj: nn.Module = nn.Linear(embed_dim, embed_dim, bias)
        self.k_proj: nn.Module = nn.Linear(embed_dim if kdim is None else kdim, embed_dim, bias)
        self.v_proj: nn.Module = nn.Linear(embed_dim if vdim is None else vdim, embed_dim, bias)
        self.out_proj: nn.Module = nn.Linear(embed_dim, embed_dim, bias)

    @classmethod
    def from_attention(cls, attention: nn.MultiheadAttention) -> Self:
        """Returns the attention with the same weights.

        Raises:
            ValueError: If the attention adds keys and values of its own (``add_bias_kv``, ``add_zero_attn``).
        """
        if attention.bias_k is not None or attention.add_zero_attn:
            raise ValueError("attention with add_bias_kv or add_zero_attn cannot be split into dense layers")
        source = attention.out_proj.weight
        split = cls(
            attention.embed_dim,
            attention.num_heads,
            attention.dropout,
            attention.in_proj_bias is not None,
            attention.kdim,
            attention.vdim,
            attention.batch_first,
        ).to(source.device, source.dtype)
        packed = attention.in_proj_weight
        inner = (attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight)
        weights = [*(inner if packed is None else packed.chunk(3)), source]
        biases: list[Tensor | None] = [None] * 4
        if attention.in_proj_bias is not None:
            biases = [*attention.in_proj_bias.chunk(3), attention.out_proj.bias]
        needed = [inner[0] if packed is None else packed] * 3 + [source]
        layers = (split.q_proj, split.k_proj, split.v_proj, split.out_proj)
        with torch.no_grad():
            for layer, weight, bias, of in zip(layers, weights, biases, needed, strict=True):
                dense = cast(nn.Linear, layer)
                dense.weight.copy_(weight).requires_grad_(of.requires_grad)
                if bias is not None:
                    dense.bias.copy_(bias).requires_grad_(bias.requires_grad)
        return split.train(attention.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the outputs, and the attention weights if they are needed; see ``nn.MultiheadAttention``."""
        if query.ndim != 3:
            raise ValueError("attention was called with one unbatched sample: add x[None]")
        if is_causal and attn_mask is None:
            raise ValueError("is_causal only says that attn_mask is causal: give the mask, too")
        if not self.batch_first:  # the layers must see samples in the first dimension
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        pairs = ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        q, k, v = (layer(t).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer, t in pairs)
        mask = self._mask(attn_mask, key_padding_mask, q)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.mT / math.sqrt(q.shape[-1])
            weights = F.dropout(F.softmax(scores if mask is None else scores + mask, dim=-1), dropout)
            out = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        return out if self.batch_first else out.transpose(0, 1), weights

    def _mask(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor) -> Tensor | None:
        """What is added to the scores ``(B, heads, L, S)``, or None."""
        if attn_mask is not None:
            attn_mask = added_mask(attn_mask, q.dtype)
            if attn_mask.ndim == 3:  # (B * heads, L, S)
                attn_mask = attn_mask.unflatten(0, (len(q), self.num_heads))
        if key_padding_mask is None:
            return attn_mask
        padding = added_mask(key_padding_mask, q.dtype)[:, None, None]
        return padding if attn_mask is None else padding + attn_mask


def added_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a mask that is true where attention is forbidden as numbers to add to the scores; numbers as they are."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
